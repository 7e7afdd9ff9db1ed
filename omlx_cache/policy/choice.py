"""Which policy the configuration asks for, layer by layer."""

from __future__ import annotations

from omlx_cache.config import CacheConfig
from omlx_cache.policy.saving import SavingPolicy
from omlx_cache.policy.tiering import TierPolicy
from omlx_cache.sequences import Geometry
from omlx_kernels.layout import BlockFormat, Tier

Policy = TierPolicy | SavingPolicy


def kept_layers(config: CacheConfig, num_layers: int) -> frozenset[int]:
    """Return the layers that ``keep_layers`` names, counted from 0.

    Raises:
        ValueError: for a layer that the model doesn't have.
    """
    wrong = [i for i in config.keep_layers or () if not -num_layers <= i < num_layers]
    if wrong:
        raise ValueError(
            f"quantization.keep_layers must name layers of the model, from {-num_layers} to "
            f"{num_layers - 1}, got {wrong[0]}"
        )
    return frozenset(i % num_layers for i in config.keep_layers or ())


def policy_of(
    config: CacheConfig, geometry: Geometry, block_format: BlockFormat, *, is_kept: bool
) -> Policy:
    """Return the policy of layers with these blocks.

    Args:
        is_kept: whether ``keep_layers`` names them: then 8 bits are the coldest.

    Raises:
        ValueError: for a ``target_saving`` that the format can't reach.
    """
    policy: Policy
    if config.target_saving is not None:
        policy = SavingPolicy.for_format(
            config.target_saving, config.recent_tokens, geometry, block_format
        )
    else:
        policy = TierPolicy.from_config(config)
    if is_kept and ages(policy):
        return TierPolicy(config.recent_tokens, ((Tier.K8V8, None),))
    return policy


def ages(policy: Policy) -> bool:
    """Whether a block ever leaves the model's dtype."""
    return not (isinstance(policy, TierPolicy) and not policy.ranges)
