"""One layer's step over random stored tokens: what tuning, timings and the roofline measure.

`Step` says what is stored where, in plain numbers, as the cache would have it; `Attention` puts
random codes there and calls the kernels. So bytes are counted and kernels timed on the same thing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch

from omlx_cache.sequences import StoredBlock
from omlx_cache.tables import blocks_of_rows, send, tables_of_rows
from omlx_kernels import ops
from omlx_kernels.launch import blocks_per_split
from omlx_kernels.layout import BlockFormat, LayerBlocks, Tier
from omlx_kernels.metadata import AttentionMetadata

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
MIXES = {
    "hot": (Tier.HOT,),
    "k8v8": (Tier.K8V8,),
    "k8v4": (Tier.K8V4,),
    "k4v4": (Tier.K4V4,),
    "mixed": (Tier.K4V4, Tier.K8V4, Tier.K8V4, Tier.K8V4),
}
"""Tiers of the old blocks, each of an equal part of them, from the oldest on."""


@dataclass(frozen=True)
class Shape:
    """Heads of a model's attention."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.num_q_heads}/{self.num_kv_heads}/{self.head_dim}"


MODELS = {"LLaMA-2-7B": Shape(32, 32, 128), "Llama-3-8B": Shape(32, 8, 128)}


@dataclass(frozen=True)
class Step:
    """What a step reads: sequences of random tokens, stored as the cache stores them.

    Blocks that hold new tokens, and at least the newest block, are hot; the older ones are in the
    tiers of ``mix``. Blocks that the window of no query reaches are released.

    Args:
        shape: heads of the layer.
        dtype: a key of `DTYPES`.
        lengths: tokens of each sequence, the new ones included.
        mix: a key of `MIXES`.
        query_len: new tokens of each sequence; 1 is decode.
        window_size: keys that a query sees; None is all.
        num_sms: multiprocessors of the device, which the splits are cut for.
        block_size, sink_tokens: of the cache.
    """

    shape: Shape
    dtype: str
    lengths: tuple[int, ...]
    mix: str = "k8v8"
    query_len: int = 1
    window_size: int | None = None
    num_sms: int = 82
    block_size: int = 256
    sink_tokens: int = 4
    rows: tuple[tuple[StoredBlock, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        used: Counter[Tier] = Counter()
        rows = tuple(tuple(self._row(length, used)) for length in self.lengths)
        object.__setattr__(self, "rows", rows)

    def _row(self, length: int, used: Counter[Tier]) -> list[StoredBlock]:
        first_query = length - self.query_len
        starts = list(range(self.sink_tokens, length, self.block_size))
        old = [s for s in starts[:-1] if s + self.block_size <= first_query]
        seen = 0 if self.window_size is None else first_query - self.window_size + 1
        parts, row = MIXES[self.mix], []
        for i, start in enumerate(starts):
            tier = parts[i * len(parts) // len(old)] if i < len(old) else Tier.HOT
            if start + self.block_size > seen:
                row.append(StoredBlock(start, tier, used[tier]))
                used[tier] += 1
        return row

    @property
    def format(self) -> BlockFormat:
        """Format of the layer's blocks."""
        heads, dim = self.shape.num_kv_heads, self.shape.head_dim
        return BlockFormat(self.block_size, self.sink_tokens, heads, dim, DTYPES[self.dtype])

    @property
    def rotated_v(self) -> bool:
        """Whether the values are stored rotated: where some tier has 4-bit values."""
        return any(tier.bits and tier.bits[1] == 4 for tier in MIXES[self.mix])

    def counts(self) -> dict[Tier, int]:
        """Return the blocks (pages, for SINK) that the step reads, by tier."""
        counts = Counter(block.tier for row in self.rows for block in row)
        return {tier: counts[tier] for tier in Tier} | {Tier.SINK: len(self.lengths)}

    def num_bytes(self) -> int:
        """Bytes of the blocks and pages that the step reads."""
        return sum(n * self.format.bytes_per_block(tier) for tier, n in self.counts().items())

    def split_size(self) -> int:
        """Return the blocks that a decode split reads, as the cache would choose."""
        blocks = blocks_of_rows(self.rows)
        return blocks_per_split(blocks, self.shape.num_kv_heads, self.num_sms)

    def tables(self) -> dict:
        """Return the step's tables as numpy arrays, as the cache builds them."""
        pages = [i if self.sink_tokens else None for i in range(len(self.lengths))]
        new = [self.query_len] * len(self.lengths)
        return tables_of_rows(self.rows, pages, self.lengths, new, self.split_size())


class Attention:
    """A `Step` on a device, filled with random values and codes.

    Args:
        step: what is stored.
        device: where.
    """

    def __init__(self, step: Step, device: torch.device | str) -> None:
        device = torch.device(device)
        self.step = step
        self.blocks = LayerBlocks(
            *(step.format.allocate(tier, n, device) for tier, n in step.counts().items())
        )
        fill(self.blocks)
        self.meta = AttentionMetadata(**send(step.tables(), device), max_query_len=step.query_len)
        tokens = len(step.lengths) * step.query_len
        shape = (tokens, step.shape.num_q_heads, step.shape.head_dim)
        self.q = torch.randn(shape, device=device, dtype=DTYPES[step.dtype])

    def run(self) -> torch.Tensor:
        """Call the op, in whichever implementation serves the device or is forced."""
        return ops.paged_attention(
            self.q,
            self.blocks,
            self.meta,
            sm_scale=self.step.shape.head_dim**-0.5,
            window_size=self.step.window_size,
            rotated_v=self.step.rotated_v,
        )


def fill(blocks: LayerBlocks) -> None:
    """Fill every tier with keys and values that look like those of a normal distribution."""
    for tier in (blocks.sink, blocks.hot):
        tier.k.normal_()
        tier.v.normal_()
    for tier in (Tier.K8V8, Tier.K8V4, Tier.K4V4):
        stored, (k_bits, v_bits) = blocks.tier(tier), tier.bits
        stored.k.random_(0, 256)
        stored.k_scale.fill_(5.0 / (2**k_bits - 1))
        stored.k_zero.fill_(-2.5)
        if v_bits == 8:
            stored.v.random_(-127, 128)
            stored.v_scale.uniform_(0.01, 0.03)
        else:
            stored.v.random_(0, 256)
            stored.v_scale.uniform_(0.2, 0.6)
            stored.v_zero.fill_(-3.0)
