"""What a cache's memory is made of: tiers, scales, tables, workspace; in a 16-bit model too."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import torch

from omlx_cache.cache import PagedCache
from omlx_kernels.layout import Tier

UNQUANTIZED_TIERS = (Tier.SINK, Tier.HOT)


@dataclass(frozen=True)
class TierMemory:
    """One tier over all layers, in bytes, free blocks included.

    Attributes:
        values: numbers in the model's dtype, or codes.
        scales: the scales and zeros that turn codes into numbers; 0 where there are no codes.
    """

    values: int
    scales: int


@dataclass(frozen=True)
class StepMemory:
    """What a decoding step needs beside the blocks, in bytes.

    Attributes:
        tables: block tables, slots and lengths that the host sends to the device.
        workspace: each split's partial output and log-sum-exp, float32, of one layer at a time.
    """

    tables: int
    workspace: int


def tier_memory(cache: PagedCache) -> dict[str, TierMemory]:
    """Return the bytes of each tier by its name in lower case, as `CacheReport.bytes_by_tier`."""
    found = {}
    for tier in Tier:
        values = scales = 0
        for layer in cache.layers:
            parts = {} if layer.pool is None else layer.pool.blocks.tier(tier).tensors()
            for name, tensor in parts.items():
                size = tensor.numel() * tensor.element_size()
                values, scales = (
                    (values + size, scales) if name in ("k", "v") else (values, scales + size)
                )
        found[tier.name.lower()] = TierMemory(values, scales)
    return found


class _Undo(Exception):
    """Ends a step that is only planned."""


def step_memory(cache: PagedCache, num_q_heads: int) -> StepMemory:
    """Plan the next decoding step, measure its tables, and undo the plan.

    Args:
        cache: a cache that has stored something.
        num_q_heads: query heads of the model.

    Raises:
        OutOfBlocksError: the next step would not find the blocks that it needs.
    """
    tables = splits = 0
    try:
        with cache.step(np.ones((len(cache.groups[0].rows), 1), bool)):
            for group in cache.groups:
                step = group.running_step.tables(group.pools[0].device)
                found = [getattr(step.meta, name) for name in vars(step.meta)]
                found += [step.slots, step.sink_slots, step.token_index, step.sink_offsets]
                found += [ids for *_, old, new in step.convert for ids in (old, new)]
                tables += sum(x.nbytes for x in found if isinstance(x, torch.Tensor))
                splits = max(splits, step.meta.splits.shape[0])
            raise _Undo
    except _Undo:
        pass
    dim = cache.groups[0].pools[0].format.head_dim
    return StepMemory(tables, splits * num_q_heads * (dim + 1) * 4)


def bytes_at_16_bits(cache: PagedCache) -> int:
    """Return what the cache's blocks take in a 16-bit model: of float32, values take half."""
    wide = {layer.pool.format.dtype.itemsize for layer in cache.layers if layer.pool is not None}
    sizes = cache.report().bytes_by_tier
    unquantized = {tier.name.lower() for tier in UNQUANTIZED_TIERS}
    return sum(
        size * 2 // max(wide, default=2) if name in unquantized else size
        for name, size in sizes.items()
    )


def as_data(tiers: dict[str, TierMemory], step: StepMemory) -> dict:
    """Return both as plain data for JSON."""
    return {"tiers": {name: asdict(tier) for name, tier in tiers.items()}, **asdict(step)}
