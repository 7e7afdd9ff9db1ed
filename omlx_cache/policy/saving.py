"""Precision by a memory target: the oldest blocks as cold as ``target_saving`` takes, no colder.

From warm to cold a block loses quality ever faster (measured at 4096 tokens: a KL divergence of
.000005 at K8V8, .00009 at K8V4, .0017 at K4V4), so the least loss at a given size is reached by
turning all old blocks from K8V8 to K8V4 before the first one turns to K4V4::

    oldest                                        newest
    |-- K4V4: what it takes --|-- K8V4 --|-- HOT --|
    |-- K8V4: what it takes --|-- K8V8 --|-- HOT --|     where that is enough

How many follows from the number of old blocks alone. The newest tokens wait in 16 bits until all
of a block is old, so that the memory of a growing text rises and falls by a block; the target is
its mean. It holds from `HOLDS_FROM` tokens on, and where a window lets fewer live, from its length
on. Until then the share of cold blocks is the one that it will take there: more would be needed of
a shorter text, much of which is hot, but a block that got colder stays so. Layers that stay warmer
leave their part to the others.

Bytes are those of a 16-bit model. One in float32 chooses alike, and saves more of its own bytes:
what a setting does to the quality doesn't depend on the dtype in which it is measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

import torch

from omlx_cache.sequences import Geometry
from omlx_kernels.layout import BlockFormat, Tier

HOLDS_FROM = 8192
"""Tokens from which on the target holds; a window may bound the live ones to less."""


@dataclass(frozen=True)
class SavingPlan:
    """How many blocks are how cold, in layers that have one geometry.

    Attributes:
        target: the share to save, between 0 and 1.
        recent_tokens: the newest tokens, which stay in the model's dtype.
        geometry: the group's blocks and window.
        bytes_per_block: bytes of a HOT, K8V8, K8V4 and K4V4 block in a 16-bit model.
        layers: how many of them may get as cold as K8V8, K8V4 and K4V4 at most.
    """

    target: float
    recent_tokens: int
    geometry: Geometry
    bytes_per_block: tuple[int, int, int, int]
    layers: tuple[int, int, int]


@dataclass(frozen=True)
class SavingPolicy:
    """When a full block gets colder so that the cache stays at a share of its plain size.

    Attributes:
        plan: for all layers with the geometry.
        coldest: the tier at which this policy's own layers stop.
    """

    plan: SavingPlan
    coldest: Tier = Tier.K4V4

    rotates_values = True

    @classmethod
    def for_format(
        cls,
        target: float,
        recent_tokens: int,
        geometry: Geometry,
        block_format: BlockFormat,
        layers: tuple[int, int, int] = (0, 0, 1),
    ) -> SavingPolicy:
        """Make the policy of layers whose blocks have this format.

        Raises:
            ValueError: when not even the coldest tiers save that much.
        """
        size_of = replace(block_format, dtype=torch.float16).bytes_per_block
        hot = size_of(Tier.HOT)
        sizes = size_of(Tier.K8V8), size_of(Tier.K8V4), size_of(Tier.K4V4)
        least = sum(n * size for n, size in zip(layers, sizes, strict=True)) / sum(layers)
        most = 1 - least / hot
        if target >= most:
            warm = sum(layers[:2])
            whose = f" with {warm} of {sum(layers)} layers kept warmer" if warm else ""
            way_out = ", or keep_layers: null" if warm else ""
            raise ValueError(
                f"target_saving must be below {most:.3f} for this model (head_dim "
                f"{block_format.head_dim}), which is what 4-bit blocks save of 16-bit ones{whose}, "
                f"got {target}; use a smaller target, or a window_size{way_out}"
            )
        return cls(SavingPlan(target, recent_tokens, geometry, (hot, *sizes), layers))

    def no_colder_than(self, tier: Tier) -> SavingPolicy:
        """Return the policy of layers that stop at ``tier``."""
        return replace(self, coldest=tier)

    def tier_of(self, end: int, length: int) -> Tier:
        """Return the tier of a full block; see `TierPolicy.tier_of`."""
        geometry = self.plan.geometry
        origin, size = geometry.sink_tokens, geometry.block_size
        number = (end - origin) // size - 1
        old = max(0, length - self.plan.recent_tokens - origin) // size
        if number >= old:
            return Tier.HOT
        live = old if geometry.window_size is None else min(old, geometry.window_size // size)
        coldest, cool = _counts(self.plan, live)
        age = old - 1 - number  # 0 is the newest that is old
        if age < live - coldest - cool:
            return Tier.K8V8
        return min(self.coldest, Tier.K8V4 if age < live - coldest else Tier.K4V4)


@lru_cache(maxsize=4096)
def _counts(plan: SavingPlan, old: int) -> tuple[int, int]:
    """Return how many of ``old`` live blocks are K4V4, and how many K8V4; the rest is K8V8."""
    geometry = plan.geometry
    tokens = HOLDS_FROM - plan.recent_tokens - geometry.sink_tokens
    if geometry.window_size is not None:
        tokens = min(tokens, geometry.window_size)
    later = tokens // geometry.block_size
    if old >= later:
        return _needed(plan, old)
    coldest, cool = _needed(plan, later)
    cold = coldest * old // later
    return cold, (coldest + cool) * old // later - cold


def _needed(plan: SavingPlan, old: int) -> tuple[int, int]:
    """Return how many of ``old`` blocks must be K4V4 and K8V4 for the target to hold."""
    _, warm, cool, cold = plan.bytes_per_block
    _, fragile, free = plan.layers
    excess = max(0.0, _excess(plan, old)) * sum(plan.layers)
    to_cool = _share(excess, (warm - cool) * (fragile + free), old)
    excess -= to_cool * (warm - cool) * (fragile + free)
    to_cold = _share(excess, (cool - cold) * free, old)
    return to_cold, to_cool - to_cold


def _share(excess: float, saved: int, old: int) -> int:
    """Return how many of ``old`` blocks must save ``saved`` bytes each to take off the excess."""
    return min(old, max(0, ceil(excess / saved))) if saved else 0


def _excess(plan: SavingPlan, old: int) -> float:
    """Return by how many bytes a layer with ``old`` K8V8 blocks is above the target, on average.

    The hot tokens grow from ``recent_tokens`` to a block more before the next one is converted, and
    a block counts in full as soon as it is begun.
    """
    geometry, (hot, warm, *_) = plan.geometry, plan.bytes_per_block
    size, recent = geometry.block_size, plan.recent_tokens
    begun = sum(-(-tokens // size) for tokens in range(recent, recent + size)) / size
    stored = geometry.sink_tokens * hot / size + begun * hot + old * warm
    tokens = geometry.sink_tokens + recent + (size - 1) / 2 + old * size
    return stored - (1 - plan.target) * tokens * hot / size
