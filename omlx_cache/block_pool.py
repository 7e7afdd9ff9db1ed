"""The tensors behind the block ids: one pool a layer, which follows the allocator's capacities.

A pool is resized one layer at a time, when its layer runs, so that growing the cache of a model
with ``n`` layers needs room for ``1 / n`` of it twice, never for all of it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

import torch

from omlx_kernels.layout import BlockFormat, LayerBlocks, Tier, TierBlocks
from omlx_kernels.quantization import read_blocks

logger = logging.getLogger(__name__)


class MemoryMeter:
    """Bytes held now and at the worst moment, over everything that reports to it."""

    def __init__(self) -> None:
        self.current = 0
        self.peak = 0

    def add(self, num_bytes: int) -> None:
        """Count ``num_bytes`` more (fewer, when negative) as held."""
        self.current += num_bytes
        self.peak = max(self.peak, self.current)


class LayerPool:
    """One layer's blocks of every tier.

    Args:
        block_format: shapes and dtypes of the layer's blocks.
        device: where they live.
        meter: told of every allocation and release.
        is_pinned: whether the memory, of a CPU, is pinned: a GPU then copies without waiting.
    """

    def __init__(
        self,
        block_format: BlockFormat,
        device: torch.device,
        meter: MemoryMeter,
        *,
        is_pinned: bool = False,
    ) -> None:
        self.format, self.device, self._meter = block_format, device, meter
        self._is_pinned = is_pinned
        self._tiers = {tier: self._allocate(tier, 0) for tier in Tier}
        self.blocks = self._layer_blocks()

    def fit(self, capacity: Mapping[Tier, int]) -> None:
        """Make room for exactly ``capacity[tier]`` blocks of each tier; kept ids keep content."""
        changed = [tier for tier in Tier if self._tiers[tier].num_blocks != capacity[tier]]
        for tier in changed:
            self._resize(tier, capacity[tier])
        if changed:
            self.blocks = self._layer_blocks()

    def fits(self, capacity: Mapping[Tier, int]) -> bool:
        """Whether there is room for exactly ``capacity[tier]`` blocks of each tier."""
        return all(self._tiers[tier].num_blocks == capacity[tier] for tier in Tier)

    def exceeds(self, capacity: Mapping[Tier, int]) -> bool:
        """Whether there is room for more blocks than ``capacity[tier]`` of some tier."""
        return any(self._tiers[tier].num_blocks > capacity[tier] for tier in Tier)

    def shrink(self, capacity: Mapping[Tier, int]) -> None:
        """Give back the room above ``capacity``, if there is memory to do so; never fails.

        A smaller tensor is allocated before the larger one is let go. Where that can't be, the
        room stays until there is a better moment: nothing depends on it.
        """
        smaller = {t: min(capacity[t], self._tiers[t].num_blocks) for t in Tier}
        try:
            self.fit(smaller)
        except (MemoryError, torch.OutOfMemoryError):
            logger.warning("no memory to shrink the cache of a layer in; it stays as it is")

    def num_bytes(self, tier: Tier) -> int:
        """Bytes allocated for ``tier``, used or not."""
        return self._tiers[tier].num_bytes

    def _resize(self, tier: Tier, num_blocks: int) -> None:
        old = self._tiers[tier]
        new = self._allocate(tier, num_blocks)
        self._meter.add(new.num_bytes)  # both exist while the content moves
        kept = min(old.num_blocks, num_blocks)
        targets = new.tensors()
        for name, source in old.tensors().items():
            targets[name][:kept].copy_(source[:kept])
        self._tiers[tier] = new
        self._meter.add(-old.num_bytes)

    def _allocate(self, tier: Tier, num_blocks: int) -> TierBlocks:
        with torch.inference_mode(False):  # tensors made in it could never be written outside
            new = self.format.allocate(tier, num_blocks, self.device)
            if not self._is_pinned:
                return new
            return replace(new, **{name: x.pin_memory() for name, x in new.tensors().items()})

    def _layer_blocks(self) -> LayerBlocks:
        return LayerBlocks(**{tier.name.lower(): t for tier, t in self._tiers.items()})


def copy_blocks(blocks: TierBlocks, pairs: list[tuple[int, int]]) -> None:
    """Copy whole blocks (or pages) of a tier, from the first to the second id of each pair."""
    for source, target in pairs:
        for tensor in blocks.tensors().values():
            tensor[target].copy_(tensor[source])


def reopen_block(
    source: LayerBlocks, tier: Tier, index: int, target: LayerBlocks, hot_index: int
) -> None:
    """Write the values of block ``index`` of a tier into hot block ``hot_index``."""
    k, v = read_blocks(source.tier(tier), tier, [index], torch.float32)
    target.hot.k[hot_index].copy_(k[0])
    target.hot.v[hot_index].copy_(v[0])
