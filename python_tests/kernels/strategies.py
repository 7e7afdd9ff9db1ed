"""Random stored sequences: ragged lengths, shuffled physical blocks, poison where nobody may read.

`make_case` fills a layer's blocks the way the cache would (sinks in their page, older blocks
8-bit, newer ones hot) and builds the tables that describe them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from omlx_kernels.layout import BLOCK_TIERS, BlockFormat, LayerBlocks, Tier
from omlx_kernels.metadata import AttentionMetadata
from omlx_kernels.reference import convert_blocks


@dataclass
class Case:
    """One call of `paged_attention`: the arguments, and the plain keys and values it stands for."""

    q: torch.Tensor
    blocks: LayerBlocks
    meta: AttentionMetadata
    format: BlockFormat
    keys: list[torch.Tensor]  # per sequence [kv_heads, seq_len, head_dim], before quantization
    values: list[torch.Tensor]

    def attention_kwargs(self) -> dict:
        """Return ``sm_scale`` for the case's head_dim."""
        return {"sm_scale": self.format.head_dim**-0.5}


def poison(blocks: LayerBlocks) -> None:
    """Fill everything with values that no correct kernel lets through: NaN and extreme codes."""
    for tier in Tier:
        for tensor in blocks.tier(tier).tensors().values():
            tensor.fill_(
                float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max
            )


def build_splits(
    tier_starts: torch.Tensor, has_sinks: list[bool], blocks_per_split: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut every sequence's table row into splits of at most ``blocks_per_split`` blocks."""
    splits: list[tuple[int, int, int, int]] = []
    split_starts = [0]
    for seq, bounds in enumerate(tier_starts.tolist()):
        if has_sinks[seq]:
            splits.append((seq, int(Tier.SINK), 0, 1))
        for i, tier in enumerate(BLOCK_TIERS):
            for first in range(bounds[i], bounds[i + 1], blocks_per_split):
                last = min(first + blocks_per_split, bounds[i + 1])
                splits.append((seq, int(tier), first, last))
        split_starts.append(len(splits))
    table = torch.tensor(splits, dtype=torch.int32).reshape(-1, 4)
    return table, torch.tensor(split_starts, dtype=torch.int32)


def make_case(
    seq_lens: list[int],
    query_lens: list[int],
    *,
    num_q_heads: int = 2,
    num_kv_heads: int = 1,
    head_dim: int = 64,
    block_size: int = 64,
    sink_tokens: int = 4,
    hot_blocks: int = 1,
    dtype: torch.dtype = torch.float32,
    blocks_per_split: int = 2,
    window_size: int | None = None,
    seed: int = 0,
) -> Case:
    """Build a poisoned layer that stores random sequences, and queries for it.

    Args:
        seq_lens: tokens of each sequence, the new ones included.
        query_lens: new tokens (queries) of each sequence, at most its length.
        hot_blocks: how many of a sequence's newest blocks (besides a partial one) stay hot; the
            blocks that hold new tokens always do.
        window_size: when given, blocks that no query can see are left out of the table.
    """
    gen = torch.Generator().manual_seed(seed)
    fmt = BlockFormat(block_size, sink_tokens, num_kv_heads, head_dim, dtype)
    tables: list[dict[Tier, list[tuple[int, int]]]] = []
    wanted = dict.fromkeys(BLOCK_TIERS, 0)
    for length, new in zip(seq_lens, query_lens, strict=True):
        row: dict[Tier, list[tuple[int, int]]] = {tier: [] for tier in BLOCK_TIERS}
        starts = list(range(sink_tokens, length, block_size))
        full = [s for s in starts if s + block_size <= length]
        cold = {s for s in full[: max(0, len(full) - hot_blocks)] if s + block_size <= length - new}
        for start in starts:
            if window_size is not None and start + block_size <= length - new - window_size + 1:
                continue
            tier = Tier.K8V8 if start in cold else Tier.HOT
            row[tier].append((wanted[tier], start))
            wanted[tier] += 1
        tables.append(row)

    spare = 2  # physical blocks that belong to nobody and stay poisoned
    layer = LayerBlocks(
        sink=fmt.allocate(Tier.SINK, len(seq_lens) + spare, "cpu"),
        hot=fmt.allocate(Tier.HOT, wanted[Tier.HOT] + wanted[Tier.K8V8] + spare, "cpu"),
        k8v8=fmt.allocate(Tier.K8V8, wanted[Tier.K8V8] + spare, "cpu"),
    )
    poison(layer)
    order = {t: torch.randperm(layer.tier(t).num_blocks, generator=gen).tolist() for t in Tier}

    width = max([sum(len(v) for v in row.values()) for row in tables] + [1]) + 1
    block_table = torch.full((len(seq_lens), width), 2**30, dtype=torch.int32)
    block_starts = torch.full_like(block_table, -(2**30))
    tier_starts = torch.zeros(len(seq_lens), len(BLOCK_TIERS) + 1, dtype=torch.int32)
    keys, values = [], []
    for seq, (length, row) in enumerate(zip(seq_lens, tables, strict=True)):
        shape = (num_kv_heads, length, head_dim)
        k = torch.randn(shape, generator=gen).to(dtype)
        v = torch.randn(shape, generator=gen).to(dtype)
        keys.append(k)
        values.append(v)
        count = min(length, sink_tokens)
        if count:
            page = order[Tier.SINK][seq]
            layer.sink.k[page, :, :count] = k[:, :count]
            layer.sink.v[page, :, :count] = v[:, :count]
        entry = 0
        for i, tier in enumerate(BLOCK_TIERS):
            for logical, start in row[tier]:
                # 8-bit blocks are staged in a hot block nobody owns, then converted and poisoned.
                hot_index = logical if tier is Tier.HOT else wanted[Tier.HOT] + logical
                hot_id = order[Tier.HOT][hot_index]
                stop = min(start + block_size, length)
                layer.hot.k[hot_id, :, : stop - start] = k[:, start:stop]
                layer.hot.v[hot_id, :, : stop - start] = v[:, start:stop]
                physical = hot_id
                if tier is not Tier.HOT:
                    physical = order[tier][logical]
                    convert_blocks(
                        layer.hot, layer.k8v8, torch.tensor([hot_id]), torch.tensor([physical])
                    )
                    layer.hot.k[hot_id] = layer.hot.v[hot_id] = float("nan")
                block_table[seq, entry] = physical
                block_starts[seq, entry] = start
                entry += 1
            tier_starts[seq, i + 1] = entry
    splits, split_starts = build_splits(
        tier_starts, [bool(sink_tokens and n) for n in seq_lens], blocks_per_split
    )
    lens = torch.tensor(query_lens, dtype=torch.int32)
    meta = AttentionMetadata(
        block_table=block_table,
        block_starts=block_starts,
        tier_starts=tier_starts,
        sink_pages=torch.tensor(order[Tier.SINK][: len(seq_lens)], dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        query_start_loc=torch.cat([lens.new_zeros(1), lens.cumsum(0).int()]),
        splits=splits,
        split_starts=split_starts,
        max_query_len=max([*query_lens, 1]),
    )
    q = torch.randn((sum(query_lens), num_q_heads, head_dim), generator=gen).to(dtype)
    return Case(q, layer, meta, fmt, keys, values)
