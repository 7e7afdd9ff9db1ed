"""A block of a layer group as the tensors that a file keeps, and back into the pools.

Layers of one format are stacked: ``<i>.<part>`` [layers, heads, tokens, ...], where ``i`` counts
the different formats of the group's layers; most models have one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from omlx_cache.block_pool import LayerPool
from omlx_cache.storage.codec import RawTensor
from omlx_cache.storage.tensors import DTYPES, from_raw, to_raw
from omlx_kernels.layout import BlockFormat, Tier


def block_to_raw(pools: Sequence[LayerPool], tier: Tier, index: int) -> dict[str, RawTensor]:
    """Return what block (page, for SINK) ``index`` of ``tier`` holds in each of a group's layers.

    It is a copy: the block may be reused at once.
    """
    return {
        f"{i}.{part}": to_raw(
            torch.stack([pool.blocks.tier(tier).tensors()[part][index] for pool in own])
        )
        for i, (block_format, own) in enumerate(_by_format(pools).items())
        for part in block_format.parts(tier)
    }


def raw_to_block(
    tensors: Mapping[str, RawTensor], pools: Sequence[LayerPool], tier: Tier, index: int
) -> None:
    """Write what `block_to_raw` returned into block ``index`` of ``tier`` of each layer.

    Args:
        tensors: of a block of the same tier.
        pools: of the group's layers, in the same order.
        tier, index: where to; the pools have room for it.

    Raises:
        ValueError: when the tensors are those of another format; nothing is written.
    """
    formats = _by_format(pools)
    expected = {
        f"{i}.{part}": (DTYPES[dtype], (len(own), *shape))
        for i, (block_format, own) in enumerate(formats.items())
        for part, (shape, dtype) in block_format.parts(tier).items()
    }
    got = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    if got != expected:
        raise ValueError(
            f"raw_to_block: the tensors must be those of a {tier.name} block of these layers, "
            f"{expected}, got {got}; read blocks only with the fingerprint they were written with"
        )
    for i, (block_format, own) in enumerate(formats.items()):
        for part in block_format.parts(tier):
            for pool, stored in zip(own, from_raw(tensors[f"{i}.{part}"]), strict=True):
                pool.blocks.tier(tier).tensors()[part][index].copy_(stored)


def _by_format(pools: Sequence[LayerPool]) -> dict[BlockFormat, list[LayerPool]]:
    found: dict[BlockFormat, list[LayerPool]] = {}
    for pool in pools:
        found.setdefault(pool.format, []).append(pool)
    return found
