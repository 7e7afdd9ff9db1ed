"""Precision by a memory target: the oldest blocks as cold as ``target_saving`` takes, no colder.

From warm to cold a block loses quality ever faster (measured at 4096 tokens: a KL divergence of
.000005 at K8V8, .00009 at K8V4, .0017 at K4V4), so the least loss at a given size is reached by
turning all old blocks from K8V8 to K8V4 before the first one turns to K4V4::

    oldest                                        newest
    |-- K4V4: what it takes --|-- K8V4 --|-- HOT --|
    |-- K8V4: what it takes --|-- K8V8 --|-- HOT --|     where that is enough

How many follows from the number of old blocks alone, taken at the worst moment between two
conversions. The target holds from `HOLDS_FROM` tokens on. A shorter text, most of which may be
hot, is never colder than it will have to be then: a block that got colder stays so.

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

HOLDS_FROM = 4096
"""Tokens from which on the target holds; a window may bound the live ones to less."""


@dataclass(frozen=True)
class SavingPolicy:
    """When a full block gets colder so that the cache stays under a share of its plain size.

    Attributes:
        target: the share to save, between 0 and 1.
        recent_tokens: the newest tokens, which stay in the model's dtype.
        geometry: the group's blocks and window.
        bytes_per_block: bytes of a HOT, K8V8, K8V4 and K4V4 block in a 16-bit model.
    """

    target: float
    recent_tokens: int
    geometry: Geometry
    bytes_per_block: tuple[int, int, int, int]

    rotates_values = True

    @classmethod
    def for_format(
        cls, target: float, recent_tokens: int, geometry: Geometry, block_format: BlockFormat
    ) -> SavingPolicy:
        """Make the policy of layers whose blocks have this format.

        Raises:
            ValueError: when not even 4 bits save that much.
        """
        size_of = replace(block_format, dtype=torch.float16).bytes_per_block
        sizes = size_of(Tier.HOT), size_of(Tier.K8V8), size_of(Tier.K8V4), size_of(Tier.K4V4)
        most = 1 - sizes[-1] / sizes[0]
        if target >= most:
            raise ValueError(
                f"target_saving must be below {most:.3f} for this model (head_dim "
                f"{block_format.head_dim}), which is what 4-bit blocks save of 16-bit ones, got "
                f"{target}; use a smaller target, or a window_size"
            )
        return cls(target, recent_tokens, geometry, sizes)

    def tier_of(self, end: int, length: int) -> Tier:
        """Return the tier of a full block; see `TierPolicy.tier_of`."""
        origin, size = self.geometry.sink_tokens, self.geometry.block_size
        number = (end - origin) // size - 1
        old = max(0, length - self.recent_tokens - origin) // size
        if number >= old:
            return Tier.HOT
        live = old if self.geometry.window_size is None else self.geometry.window_size // size
        live = min(old, live)
        coldest, cool = _counts(self, live)
        age = old - 1 - number  # 0 is the newest that is old
        if age < live - coldest - cool:
            return Tier.K8V8
        return Tier.K8V4 if age < live - coldest else Tier.K4V4


@lru_cache(maxsize=4096)
def _counts(policy: SavingPolicy, old: int) -> tuple[int, int]:
    """Return how many of ``old`` live blocks are K4V4, and how many K8V4; the rest is K8V8."""
    geometry = policy.geometry
    tokens = HOLDS_FROM - policy.recent_tokens - geometry.sink_tokens
    if geometry.window_size is not None:
        tokens = min(tokens, geometry.window_size)
    later = max(old, tokens // geometry.block_size)
    counts = [_needed(policy, n) for n in range(old, later + 1)]
    coldest = min(cold for cold, _ in counts)
    return coldest, min(cold + cool for cold, cool in counts) - coldest


def _needed(policy: SavingPolicy, old: int) -> tuple[int, int]:
    """Return how many of ``old`` blocks must be K4V4 and K8V4 for the target to hold."""
    _, warm, cool, cold = policy.bytes_per_block
    excess = _excess(policy, old)
    to_cool = min(old, max(0, ceil(excess / (warm - cool))))
    excess -= to_cool * (warm - cool)
    to_cold = min(old, max(0, ceil(excess / (cool - cold))))
    return to_cold, to_cool - to_cold


def _excess(policy: SavingPolicy, old: int) -> float:
    """Return by how many bytes ``old`` K8V8 blocks and the hot ones exceed the target at most.

    The hot tokens grow from ``recent_tokens`` to a block more before the next one is converted, and
    a block counts in full as soon as it is begun.
    """
    geometry, (hot, warm, *_) = policy.geometry, policy.bytes_per_block
    size, sinks = geometry.block_size, geometry.sink_tokens
    per_token = hot / size
    begins = range(-policy.recent_tokens % size, size, size)  # where one more block is begun
    worst = 0.0
    for grown in (0, *(b + 1 for b in begins if b + 1 < size)):
        tokens = policy.recent_tokens + grown
        stored = sinks * per_token + ceil(tokens / size) * hot + old * warm
        plain = (sinks + tokens + old * size) * per_token
        worst = max(worst, stored - (1 - policy.target) * plain)
    return worst
