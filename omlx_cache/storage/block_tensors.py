"""A block of a layer group as the tensors that a file keeps, and back into the pools.

Layers of one format are stacked: ``<i>.<part>`` [layers, heads, tokens, ...], where ``i`` counts
the different formats of the group's layers; most models have one. A block that isn't full is
stored as the tokens that it has: what else is in its memory is nobody's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from omlx_cache.block_pool import LayerPool
from omlx_cache.storage.codec import RawTensor
from omlx_cache.storage.tensors import DTYPES, from_raw, to_raw
from omlx_kernels.layout import BlockFormat, Tier


@dataclass(frozen=True)
class CopiedBlock:
    """A block on its way to the CPU, and soon there.

    Attributes:
        tensors: [layers, heads, tokens, ...] on the CPU, by name.
        arrivals: one event for each GPU that still fills them.
    """

    tensors: dict[str, torch.Tensor]
    arrivals: tuple[torch.cuda.Event, ...]

    def to_raw(self) -> dict[str, RawTensor]:
        """Wait for the last byte and return the tensors' bytes."""
        for arrival in self.arrivals:
            arrival.synchronize()
        return {name: to_raw(tensor) for name, tensor in self.tensors.items()}


def copy_block(
    pools: Sequence[LayerPool], tier: Tier, index: int, tokens: int | None = None
) -> CopiedBlock:
    """Copy what block (page, for SINK) ``index`` of ``tier`` holds in each of a group's layers.

    The block may be reused at once: on a GPU the copy runs in the order of its stream.

    Args:
        pools: of the group's layers.
        tier, index: which block.
        tokens: how many of the first tokens of a hot block; None is all.
    """
    copied, devices = {}, set()
    for i, (block_format, own) in enumerate(_by_format(pools).items()):
        for part, (shape, dtype) in _parts(block_format, tier, tokens).items():
            on_gpu = any(pool.device.type == "cuda" for pool in own)
            with torch.inference_mode(False):
                target = torch.empty((len(own), *shape), dtype=dtype, pin_memory=on_gpu)
            for pool, place in zip(own, target, strict=True):
                source = pool.blocks.tier(tier).tensors()[part][index]
                place.copy_(source[:, : shape[1]], non_blocking=on_gpu)
                devices.add(pool.device)
            copied[f"{i}.{part}"] = target
    return CopiedBlock(copied, tuple(_arrival(d) for d in devices if d.type == "cuda"))


def _arrival(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def block_to_raw(pools: Sequence[LayerPool], tier: Tier, index: int) -> dict[str, RawTensor]:
    """Return what block (page, for SINK) ``index`` of ``tier`` holds; see `copy_block`."""
    return copy_block(pools, tier, index).to_raw()


def raw_to_block(
    tensors: Mapping[str, RawTensor],
    pools: Sequence[LayerPool],
    tier: Tier,
    index: int,
    tokens: int | None = None,
) -> None:
    """Write what `copy_block` copied into block ``index`` of ``tier`` of each layer.

    Args:
        tensors: of a block of the same tier.
        pools: of the group's layers, in the same order.
        tier, index: where to; the pools have room for it.
        tokens: as they were given to `copy_block`.

    Raises:
        ValueError: when the tensors are those of another format; nothing is written.
    """
    formats = _by_format(pools)
    expected = {
        f"{i}.{part}": (DTYPES[dtype], (len(own), *shape))
        for i, (block_format, own) in enumerate(formats.items())
        for part, (shape, dtype) in _parts(block_format, tier, tokens).items()
    }
    got = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    if got != expected:
        raise ValueError(
            f"raw_to_block: the tensors must be those of a {tier.name} block of these layers, "
            f"{expected}, got {got}; read blocks only with the fingerprint they were written with"
        )
    for i, (block_format, own) in enumerate(formats.items()):
        for part, (shape, _) in _parts(block_format, tier, tokens).items():
            for pool, stored in zip(own, from_raw(tensors[f"{i}.{part}"]), strict=True):
                pool.blocks.tier(tier).tensors()[part][index][:, : shape[1]].copy_(stored)


def _parts(
    block_format: BlockFormat, tier: Tier, tokens: int | None
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return name -> (shape of what a file keeps of one block, dtype)."""
    parts = block_format.parts(tier)
    if tier is not Tier.HOT or tokens is None:
        return parts
    return {name: ((heads, tokens, dim), dtype) for name, ((heads, _, dim), dtype) in parts.items()}


def _by_format(pools: Sequence[LayerPool]) -> dict[BlockFormat, list[LayerPool]]:
    found: dict[BlockFormat, list[LayerPool]] = {}
    for pool in pools:
        found.setdefault(pool.format, []).append(pool)
    return found
