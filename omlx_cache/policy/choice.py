"""Which policy the configuration asks for, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Set

from omlx_cache.config import CacheConfig
from omlx_cache.policy.saving import SavingPolicy
from omlx_cache.policy.tiering import TierPolicy
from omlx_cache.sequences import Geometry
from omlx_kernels.layout import BlockFormat, Tier

Policy = TierPolicy | SavingPolicy


def coldest_tiers(config: CacheConfig, num_layers: int, fragile: Set[int]) -> list[Tier]:
    """Return how cold each layer may get at most, as ``keep_layers`` says.

    Args:
        config: of the cache.
        num_layers: of the model.
        fragile: its layers whose keys lose too much in 4 bits, counted from 0.

    Raises:
        ValueError: for a layer that the model doesn't have.
    """
    if config.keep_layers == "auto":
        return [Tier.K8V4 if i in fragile else Tier.K4V4 for i in range(num_layers)]
    kept = config.keep_layers or ()
    wrong = [i for i in kept if not -num_layers <= i < num_layers]
    if wrong:
        raise ValueError(
            f"quantization.keep_layers must name layers of the model, from {-num_layers} to "
            f"{num_layers - 1}, got {wrong[0]}"
        )
    named = {i % num_layers for i in kept}
    return [Tier.K8V8 if i in named else Tier.K4V4 for i in range(num_layers)]


def policy_of(
    config: CacheConfig, geometry: Geometry, block_format: BlockFormat, layers: Mapping[Tier, int]
) -> Policy:
    """Return the policy of layers with these blocks that may get as cold as can be.

    Args:
        config: of the cache.
        geometry: of the blocks.
        block_format: of the blocks.
        layers: how many layers with this geometry may get as cold as a tier.

    Raises:
        ValueError: for a ``target_saving`` that the format can't reach.
    """
    if config.target_saving is None:
        return TierPolicy.from_config(config)
    coldest = Tier.K8V8, Tier.K8V4, Tier.K4V4
    return SavingPolicy.for_format(
        config.target_saving,
        config.recent_tokens,
        geometry,
        block_format,
        (layers[coldest[0]], layers[coldest[1]], layers[coldest[2]]),
    )


def ages(policy: Policy) -> bool:
    """Whether a block ever leaves the model's dtype."""
    return not (isinstance(policy, TierPolicy) and not policy.ranges)


def may_reach_4_bit_keys(config: CacheConfig) -> bool:
    """Whether some block may get keys in 4 bits, in layers where nothing speaks against it."""
    if config.target_saving is not None:
        return True
    return any(tier is Tier.K4V4 for tier, _ in TierPolicy.from_config(config).ranges)
