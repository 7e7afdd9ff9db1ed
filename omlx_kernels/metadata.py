"""What a launch must know about the sequences of a step; built on the host once a step.

Drawn for one sequence with ``sink_tokens = 4``, ``block_size = 256`` and 700 tokens, of which
blocks 0 and 1 are already 8-bit (physical blocks 7 and 3) and block 2 is hot (physical 1)::

    tokens        0..3      4..259     260..515    516..699
    stored in     sink page K8V8 #7    K8V8 #3     HOT #1

    block_table   [1, 7, 3]            live blocks only, tier by tier in the order of BLOCK_TIERS
    block_starts  [516, 4, 260]        position of each listed block's first token
    tier_starts   [0, 1, 3, 3, 3]      HOT: entries [0, 1); K8V8: [1, 3); K8V4, K4V4: none
    seq_lens      [700]

Attention does not depend on the order of the keys, so a row may list its blocks in any order
within a tier. Blocks that a window has released or that were pruned are simply not listed. So what
a sequence has stored can also be attended to in parts, each with tables of its own that list some
of the blocks, or none, and the sink page in one of them: `omlx_kernels.merge` puts them together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from omlx_kernels.errors import describe
from omlx_kernels.layout import BLOCK_TIERS


@dataclass(frozen=True)
class AttentionMetadata:
    """Tables that `paged_attention` reads; int32, contiguous, on the device of the blocks.

    *Positions* count the real tokens of a sequence from 0; padding is never stored or counted.
    The queries of a sequence are its newest tokens: query ``i`` of the ``n`` queries of sequence
    ``s`` stands at position ``seq_lens[s] - n + i``.

    Attributes:
        block_table: [num_seqs, max_blocks] physical block ids within their tier, listed tier by
            tier; entries past ``tier_starts[s, -1]`` are never read.
        block_starts: [num_seqs, max_blocks] position of the first token of each listed block. The
            block holds the positions ``start .. start + block_size - 1`` that are < seq_len.
        tier_starts: [num_seqs, len(BLOCK_TIERS) + 1] entries ``tier_starts[s, i]`` up to
            ``tier_starts[s, i + 1]`` of row ``s`` are blocks of ``BLOCK_TIERS[i]``.
        sink_pages: [num_seqs] physical sink page of each sequence; it holds the positions
            ``0 .. sink_tokens - 1`` that are < seq_len. -1 lists none: those tokens are not
            attended to, and no split has tier SINK. Never read where ``sink_tokens`` is 0.
        seq_lens: [num_seqs] tokens stored, the new ones included; 0 is legal.
        query_start_loc: [num_seqs + 1] the queries of sequence ``s`` are rows
            ``query_start_loc[s] .. query_start_loc[s + 1] - 1`` of ``q``.
        splits: [num_splits, 4] the work list of decode: (sequence, tier, first, last) reads the
            table entries [first, last) of one tier; tier SINK reads the sink page. A split with
            ``first == last`` and a block tier does nothing.
        split_starts: [num_seqs + 1] the splits of sequence ``s`` are
            ``split_starts[s] .. split_starts[s + 1] - 1``.
        max_query_len: the largest number of queries of a sequence; 1 means decode.

    Raises:
        ValueError: for a table of another shape or dtype, or on another device than ``seq_lens``.
            The values, which live on the device, are not looked at.
    """

    block_table: torch.Tensor
    block_starts: torch.Tensor
    tier_starts: torch.Tensor
    sink_pages: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    splits: torch.Tensor
    split_starts: torch.Tensor
    max_query_len: int

    def __post_init__(self) -> None:
        seqs = self.seq_lens.shape[0]
        shapes = {
            "block_table": (seqs, self.block_table.shape[-1]),
            "block_starts": tuple(self.block_table.shape),
            "tier_starts": (seqs, len(BLOCK_TIERS) + 1),
            "sink_pages": (seqs,),
            "seq_lens": (seqs,),
            "query_start_loc": (seqs + 1,),
            "splits": (self.splits.shape[0], 4),
            "split_starts": (seqs + 1,),
        }
        for name, shape in shapes.items():
            x = getattr(self, name)
            if x.dtype != torch.int32 or tuple(x.shape) != shape or not x.is_contiguous():
                got = f"{x.dtype} {tuple(x.shape)}"
                expected = f"contiguous torch.int32 {shape}"
                raise ValueError(
                    describe("AttentionMetadata", name, expected, got, "call .to(torch.int32)")
                )
            if x.device != self.seq_lens.device:
                expected = f"on {self.seq_lens.device} like seq_lens"
                raise ValueError(describe("AttentionMetadata", name, expected, str(x.device)))

    def newest_queries(self, count: int = 1) -> tuple[AttentionMetadata, torch.Tensor]:
        """Describe a decode step over the newest queries of each sequence.

        Args:
            count: how many of each sequence, >= 1. Query ``i`` before the newest one of sequence
                ``s`` is that of sequence ``i * num_seqs + s`` there, which lists what ``s`` lists
                and ends with the query; where ``s`` has fewer, it has none.

        Returns:
            The tables of that step, whose splits are this step's ``count`` times; and [tokens]
            int64: the rows of this step's ``q`` that it asks for. Reads back from the device.
        """
        seqs, num_splits = self.num_seqs, self.splits.shape[0]
        back = torch.arange(count, device=self.seq_lens.device, dtype=torch.int32)[:, None]
        ends = self.query_start_loc[1:]
        asks = (ends - self.query_start_loc[:-1] > back).flatten()
        starts = torch.cat([asks.new_zeros(1), asks]).cumsum(0).int()
        splits = self.splits.repeat(count, 1)
        splits[:, 0] += (back * seqs).expand(-1, num_splits).flatten()
        split_starts = (self.split_starts[:-1] + back * num_splits).flatten()
        last = self.split_starts[-1:] + (count - 1) * num_splits
        newest = AttentionMetadata(
            block_table=self.block_table.repeat(count, 1),
            block_starts=self.block_starts.repeat(count, 1),
            tier_starts=self.tier_starts.repeat(count, 1),
            sink_pages=self.sink_pages.repeat(count),
            seq_lens=(self.seq_lens - back).clamp(min=0).flatten(),
            query_start_loc=starts,
            splits=splits,
            split_starts=torch.cat([split_starts, last]),
            max_query_len=1,
        )
        return newest, (ends - 1 - back).flatten()[asks].long()

    @property
    def num_seqs(self) -> int:
        """Sequences in the step."""
        return self.seq_lens.shape[0]
