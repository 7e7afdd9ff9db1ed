"""The format of a cache block: the single source of truth for shapes, dtypes and bytes.

A *block* holds ``block_size`` consecutive tokens of one sequence. Each layer keeps the blocks of
one tier in tensors whose first axis is the physical block id::

    tier   tensor   shape                                        dtype    x ~ code * scale + zero
    SINK   k, v     [pages,  kv_heads, sink_tokens, head_dim]    model    (not a block: see below)
    HOT    k, v     [blocks, kv_heads, block_size, head_dim]     model
    K8V8   k        [blocks, kv_heads, block_size, head_dim]     uint8    per (head, channel) and
           k_scale  [blocks, kv_heads, block_size/64, head_dim]  float16  group of 64 tokens,
           k_zero   [blocks, kv_heads, block_size/64, head_dim]  float16  asymmetric
           v        [blocks, kv_heads, block_size, head_dim]     int8     per (head, token),
           v_scale  [blocks, kv_heads, block_size]               float16  symmetric

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
"""Tokens that share one key scale and zero; every block size is a multiple of it."""


class Tier(IntEnum):
    """Where a token is stored; the numbers are part of the kernels' contract."""

    SINK = 0
    HOT = 1
    K8V8 = 2


BLOCK_TIERS: tuple[Tier, ...] = (Tier.HOT, Tier.K8V8)
"""The tiers that are made of blocks, in the order in which a table row lists them."""


@dataclass(frozen=True)
class TierBlocks:
    """The tensors of one tier in one layer; a format that lacks a part holds None there.

    Every tensor is contiguous. ``k``/``v`` hold values (SINK, HOT) or codes (K8V8).
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    k_zero: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

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

    def tier(self, tier: Tier) -> TierBlocks:
        """Return the tensors of ``tier``."""
        return (self.sink, self.hot, self.k8v8)[tier]

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
        >>> f.bytes_per_block(Tier.HOT) // 256, f.bytes_per_block(Tier.K8V8) // 256
        (256, 134)
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

    def parts(self, tier: Tier) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return name -> (shape of one block, dtype) of the tensors that ``tier`` consists of."""
        heads, dim, size = self.num_kv_heads, self.head_dim, self.block_size
        if tier is Tier.SINK:
            size = self.sink_tokens
        if tier in (Tier.SINK, Tier.HOT):
            return {"k": ((heads, size, dim), self.dtype), "v": ((heads, size, dim), self.dtype)}
        groups = (heads, size // QUANT_GROUP, dim)
        return {
            "k": ((heads, size, dim), torch.uint8),
            "k_scale": (groups, torch.float16),
            "k_zero": (groups, torch.float16),
            "v": ((heads, size, dim), torch.int8),
            "v_scale": ((heads, size), torch.float16),
        }

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
