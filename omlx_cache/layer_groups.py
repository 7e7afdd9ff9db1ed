"""The layers of a cache, and the groups of those that may share their block tables.

Layers that see the same window, keep the same sinks and get colder alike hold the same tokens in
the same tiers: one table, one allocator and one plan serve all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable

from omlx_cache.block_arena import BlockArena
from omlx_cache.block_pool import MemoryMeter
from omlx_cache.config import CacheConfig
from omlx_cache.inspection import ModelSpec, head_dim_of
from omlx_cache.layer_group import LayerGroup
from omlx_cache.paged_layer import PagedLayer
from omlx_cache.policy.choice import coldest_tiers, policy_of
from omlx_cache.policy.eviction import EvictionPolicy
from omlx_cache.sequences import Geometry
from omlx_kernels.layout import BLOCK_TIERS, BlockFormat


def build_layers(
    spec: ModelSpec,
    config: CacheConfig,
    arena_of: Callable[[Hashable], BlockArena],
    meter: MemoryMeter,
) -> tuple[list[LayerGroup], list[PagedLayer]]:
    """Make a layer for each of a model's, and the groups that they belong to.

    Args:
        spec: of the model.
        config: of the cache.
        arena_of: returns the blocks that a group draws from, given what tells it from others.
        meter: counts the bytes of all layers.

    Returns:
        The groups, in the order of their first layers; and the layers, in the model's order.
    """
    groups: dict[tuple, LayerGroup] = {}
    layers = []
    eviction = EvictionPolicy.from_config(config)
    windows = [_effective_window(own, config, spec.trained_length) for own in spec.windows]
    coldest = coldest_tiers(config, len(windows), spec.fragile_layers)
    alike = Counter((window, tier) for (window, _), tier in zip(windows, coldest, strict=True))
    for i, ((window, keep_sinks), sinks) in enumerate(
        zip(windows, spec.sink_distances, strict=True)
    ):
        keep_sinks = keep_sinks and (window is None or sinks.can_pin)
        geometry = Geometry(config.block_size, config.sink_tokens, window)
        block_format = BlockFormat(
            geometry.block_size,
            geometry.sink_tokens,
            1,
            head_dim_of(spec.sites[i].module),
            spec.decoder.dtype,
        )
        limits = {tier: alike[window, tier] for tier in BLOCK_TIERS}
        policy = policy_of(config, geometry, block_format, limits).no_colder_than(coldest[i])
        key = geometry, keep_sinks, policy
        if key not in groups:
            groups[key] = LayerGroup(
                geometry,
                keep_sinks=keep_sinks,
                policy=policy,
                arena=arena_of(key),
                eviction=eviction,
                recall=config.recall_blocks if config.recall == "topk" else None,
            )
        layers.append(PagedLayer(i, groups[key], meter, sinks.rotation))
    return list(groups.values()), layers


def _effective_window(
    own: int | None, config: CacheConfig, trained_length: int | None
) -> tuple[int | None, bool]:
    """Return a layer's window, and whether its sinks stay visible outside of it.

    A layer's own window was trained without pinned sinks and wins where it is the smaller one.
    """
    window = trained_length if config.window_size == "auto" else config.window_size
    if own is not None and (window is None or own <= window):
        return own, False
    return window, True
