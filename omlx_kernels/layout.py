"""The format of a cache block: the single source of truth for shapes, dtypes and bytes.

A *block* holds ``block_size`` consecutive tokens of one sequence. Each layer keeps the blocks of
one tier in tensors whose first axis is the physical block id; every shape below follows
``[blocks, kv_heads]``, with ``size`` for ``block_size`` and ``dim`` for ``head_dim``::

    tier   part              shape             dtype    x ~ code * scale + zero
    SINK   k, v              [sink_tokens, dim]  model  (pages, not blocks: see below)
    HOT    k, v              [size, dim]       model
    K8V8   k                 [size, dim]       uint8    8-bit keys: per (head, channel) and group
           k_scale, k_zero   [size/64, dim]    float16  of 64 tokens, asymmetric
           v                 [size, dim]       int8     8-bit values: per (head, token),
           v_scale           [size]            float16  symmetric
    K8V4   k, k_scale, k_zero  as in K8V8
           v                 [size, dim/2]     uint8    4-bit values: per (head, token) and group
           v_scale, v_zero   [size, groups]    float16  of 64 channels, asymmetric
    K4V4   k                 [size, dim/2]     uint8    4-bit keys: scales as for 8-bit keys
           k_scale, k_zero   [size/64, dim]    float16
           v, v_scale, v_zero  as in K8V4

``groups`` is ``ceil(dim / 64)``. A byte of 4-bit codes holds channel ``c`` in its low and channel
``c + dim/2`` in its high nibble, so that the two halves of a token unpack into contiguous runs.

Where a tier with 4-bit values is in use, the values of *every* tier are stored rotated by an
orthonormal Hadamard transform (`omlx_kernels.quantization.hadamard`), which spreads outliers over
the channels; the finished output is rotated back once.

The first ``sink_tokens`` tokens of a sequence never enter a block. They live in the sequence's own
*sink page*, in the model's dtype, so that a window can keep them for the price of a few tokens
and their outliers never widen a quantization group. Block ``j`` of a sequence therefore holds the
tokens ``[sink_tokens + j * block_size, sink_tokens + (j + 1) * block_size)``.

Everything else (allocation, kernel arguments, reports, rooflines, files) asks this module.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum
from math import prod

import torch

QUANT_GROUP = 64
"""Tokens that share one key scale and zero (every block size is a multiple of it), and channels
that share one scale and zero of a 4-bit value."""


class Tier(IntEnum):
    """Where a token is stored; the numbers are part of the kernels' contract."""

    SINK = 0
    HOT = 1
    K8V8 = 2
    K8V4 = 3
    K4V4 = 4

    @property
    def bits(self) -> tuple[int, int] | None:
        """Bits of a key's and a value's code; None where the model's dtype is stored."""
        return {Tier.K8V8: (8, 8), Tier.K8V4: (8, 4), Tier.K4V4: (4, 4)}.get(self)

    @property
    def code_bits(self) -> tuple[int, int]:
        """The same of a quantized tier.

        Raises:
            ValueError: for a tier that stores the model's dtype.
        """
        if self.bits is None:
            raise ValueError(f"Tier.code_bits: the tier must be quantized, got {self.name}")
        return self.bits


BLOCK_TIERS: tuple[Tier, ...] = (Tier.HOT, Tier.K8V8, Tier.K8V4, Tier.K4V4)
"""The tiers that are made of blocks, from hot to cold: the order within a table row."""


@dataclass(frozen=True)
class TierBlocks:
    """The tensors of one tier in one layer; a format that lacks a part holds None there.

    Every tensor is contiguous. ``k``/``v`` hold values (SINK, HOT) or codes (all others).
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    k_zero: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    v_zero: torch.Tensor | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the parts that exist, by name."""
        parts = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {name: tensor for name, tensor in parts if tensor is not None}

    @property
    def num_blocks(self) -> int:
        """Blocks (pages, for SINK) that the tensors have room for."""
        return self.k.shape[0]

    @property
    def num_bytes(self) -> int:
        """Bytes that the tensors occupy, codes and scales together."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())


@dataclass(frozen=True)
class LayerBlocks:
    """Everything that one layer has stored: its sink pages and the blocks of each tier.

    A tier that is not in use has tensors with zero blocks, so that kernels get every argument.
    """

    sink: TierBlocks
    hot: TierBlocks
    k8v8: TierBlocks
    k8v4: TierBlocks
    k4v4: TierBlocks

    def tier(self, tier: Tier) -> TierBlocks:
        """Return the tensors of ``tier``."""
        return (self.sink, self.hot, self.k8v8, self.k8v4, self.k4v4)[tier]

    @property
    def block_size(self) -> int:
        """Tokens a block holds."""
        return self.hot.k.shape[2]

    @property
    def sink_tokens(self) -> int:
        """Tokens a sink page holds."""
        return self.sink.k.shape[2]


@dataclass(frozen=True)
class BlockFormat:
    """Shapes, dtypes and bytes of one layer's blocks.

    Args:
        block_size: tokens a block holds; a multiple of 64.
        sink_tokens: tokens a sink page holds; 0 means no sinks.
        num_kv_heads: key/value heads of the layer.
        head_dim: channels of a head.
        dtype: the model's dtype (float16, bfloat16 or float32).

    Example:
        >>> f = BlockFormat(block_size=256, sink_tokens=4, num_kv_heads=1, head_dim=64,
        ...                 dtype=torch.float16)
        >>> [f.bytes_per_block(tier) // 256 for tier in BLOCK_TIERS]
        [256, 134, 104, 72]
    """

    block_size: int
    sink_tokens: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.block_size <= 0 or self.block_size % QUANT_GROUP:
            raise ValueError(
                f"BlockFormat: block_size must be a positive multiple of {QUANT_GROUP}, "
                f"got {self.block_size}; use 256"
            )
        if self.head_dim % 8:
            raise ValueError(f"BlockFormat: head_dim must be a multiple of 8, got {self.head_dim}")

    def parts(self, tier: Tier) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return name -> (shape of one block, dtype) of the tensors that ``tier`` consists of."""
        heads, dim, size = self.num_kv_heads, self.head_dim, self.block_size
        if tier is Tier.SINK:
            size = self.sink_tokens
        if tier in (Tier.SINK, Tier.HOT):
            return {"k": ((heads, size, dim), self.dtype), "v": ((heads, size, dim), self.dtype)}
        k_bits, v_bits = tier.code_bits
        group: tuple[int, ...] = (heads, size // QUANT_GROUP, dim)
        parts: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "k": ((heads, size, dim * k_bits // 8), torch.uint8),
            "k_scale": (group, torch.float16),
            "k_zero": (group, torch.float16),
        }
        if v_bits == 8:
            parts["v"] = ((heads, size, dim), torch.int8)
            parts["v_scale"] = ((heads, size), torch.float16)
        else:
            group = (heads, size, -(-dim // QUANT_GROUP))
            parts["v"] = ((heads, size, dim // 2), torch.uint8)
            parts["v_scale"] = parts["v_zero"] = (group, torch.float16)
        return parts

    def allocate(self, tier: Tier, num_blocks: int, device: torch.device | str) -> TierBlocks:
        """Allocate room for ``num_blocks`` blocks of ``tier``; the content is undefined."""
        return TierBlocks(
            **{
                name: torch.empty((num_blocks, *shape), dtype=dtype, device=device)
                for name, (shape, dtype) in self.parts(tier).items()
            }
        )

    def bytes_per_block(self, tier: Tier) -> int:
        """Bytes of one block (one page, for SINK) of ``tier`` in this layer, scales included."""
        return sum(prod(shape) * dtype.itemsize for shape, dtype in self.parts(tier).values())
