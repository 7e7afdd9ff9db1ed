"""Precision by age: which tier a block belongs to, given how many tokens came after it.

Drawn for ``recent_tokens = 128`` and the ranges K8V4: 1024, K4V4: the rest::

    oldest                                                        newest
    |-------- K4V4 --------|-- K8V4: 1024 tokens --|-- HOT: 128 --|
                            the block as a whole must be older than
                            a range's newer end to belong to it
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from omlx_cache.config import CacheConfig
from omlx_kernels.layout import BLOCK_TIERS, Tier

_TIER_OF_BITS = {tier.bits: tier for tier in BLOCK_TIERS if tier.bits is not None}


@dataclass(frozen=True)
class TierPolicy:
    """When a full block gets colder.

    Attributes:
        recent_tokens: the newest tokens, which stay in the model's dtype.
        ranges: (tier, tokens) of what is older, from new to old; None is all the rest. Empty:
            nothing is ever quantized.
    """

    recent_tokens: int
    ranges: tuple[tuple[Tier, int | None], ...]

    @classmethod
    def from_config(cls, config: CacheConfig) -> TierPolicy:
        """Read ``tiers``, or ``cache_bits`` where it is not given, and ``recent_tokens``."""
        if config.tiers is not None:
            ranges = tuple((Tier[name.upper()], n) for name, n in config.tiers.items())
            return cls(config.recent_tokens, ranges)
        bits = config.cache_bits
        if bits == 16:
            return cls(config.recent_tokens, ())
        k, v = (bits["k"], bits["v"]) if isinstance(bits, Mapping) else (bits, bits)
        return cls(config.recent_tokens, ((_TIER_OF_BITS[k, v], None),))

    def no_colder_than(self, tier: Tier) -> TierPolicy:
        """Return the policy in which colder tiers become ``tier``.

        Example:
            >>> policy = TierPolicy(128, ((Tier.K8V8, 512), (Tier.K4V4, None)))
            >>> [(tier.name, tokens) for tier, tokens in policy.no_colder_than(Tier.K8V4).ranges]
            [('K8V8', 512), ('K8V4', None)]
        """
        warmer = [r for r in self.ranges if r[0] < tier]
        if len(warmer) == len(self.ranges):
            return self
        return TierPolicy(self.recent_tokens, (*warmer, (tier, None)))

    @property
    def rotates_values(self) -> bool:
        """Whether some tier has 4-bit values, so that all values are stored rotated."""
        return any(tier.code_bits[1] == 4 for tier, _ in self.ranges)

    def tier_of(self, end: int, length: int) -> Tier:
        """Return the tier of a full block.

        Args:
            end: one more than the position of the block's newest token.
            length: tokens of the sequence.

        Example:
            >>> policy = TierPolicy(128, ((Tier.K8V4, 1024), (Tier.K4V4, None)))
            >>> [policy.tier_of(256, n).name for n in (383, 384, 1407, 1408)]
            ['HOT', 'K8V4', 'K8V4', 'K4V4']
        """
        age = length - self.recent_tokens - end
        if age < 0 or not self.ranges:
            return Tier.HOT
        for tier, tokens in self.ranges:
            if tokens is None or age < tokens:
                return tier
            age -= tokens
        return self.ranges[-1][0]
