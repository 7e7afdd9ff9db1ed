"""The memory of a cache in a model: what it takes, where it ends, and what happens then."""

from __future__ import annotations

import pytest
from caches import SMALL, step
from tiny import random_ids, tiny_model

import omlx_cache
from omlx_kernels.layout import BLOCK_TIERS, Tier


@pytest.mark.parametrize("bits", [8, 16])
def test_window_bounds_memory(bits):
    model = omlx_cache.patch(tiny_model(), cache_bits=bits, window_size=128, **SMALL)
    cache = omlx_cache.PagedCache(model)
    sizes = []
    for start in range(0, 1280, 64):
        step(model, cache, random_ids(1, 64, seed=start))
        sizes.append(cache.report().total_bytes)
    # Once the window is full the bytes go up and down with the block in hand, and never higher.
    assert max(sizes[12:]) <= max(sizes[4:12])
    assert cache.report().cached_tokens < 128 + 2 * 64
    assert cache.report().seen_tokens == 1280


def test_report_counts_the_bytes_of_the_tensors():
    model = omlx_cache.patch(tiny_model(), **SMALL)
    cache = omlx_cache.PagedCache(model)
    step(model, cache, random_ids(2, 300))
    tensors = [
        tensor
        for layer in cache.layers
        for tier in Tier
        for tensor in layer.pool.blocks.tier(tier).tensors().values()
    ]
    report = cache.report()
    assert report.total_bytes == sum(t.untyped_storage().nbytes() for t in tensors)
    assert report.peak_bytes >= report.total_bytes
    assert report.cached_tokens == report.seen_tokens == 600
    # 296 tokens outside of the sinks in 5 blocks of 64, for each of two rows
    assert (report.active_blocks, report.num_sequences) == (10, 2)
    assert report.block_utilization == pytest.approx(296 / 320)
    assert report.unquantized_bytes == 600 * 3 * 2 * 2 * 16 * 4


def test_the_tensors_hold_the_blocks_in_use_and_no_more():
    model = omlx_cache.patch(tiny_model(), window_size=200, **SMALL)
    cache = omlx_cache.PagedCache(model)
    for length in (300, 1, 64, 90, 1, 500):
        step(model, cache, random_ids(2, length))
        (group,) = cache.groups
        for layer in cache.layers:
            rooms = [layer.pool.blocks.tier(tier).num_blocks for tier in BLOCK_TIERS]
            assert rooms == [group.blocks.used(tier) for tier in BLOCK_TIERS]
            assert layer.pool.blocks.sink.num_blocks == 2


def test_peak_of_a_long_prefill_is_bounded_by_the_chunk():
    model = omlx_cache.patch(tiny_model(), **SMALL)
    cache = omlx_cache.PagedCache(model)
    step(model, cache, random_ids(1, 2048))
    report = cache.report()
    # One layer exists twice while it grows, and the chunk needs one hot block a layer more.
    layers = model.config.num_hidden_layers
    chunk = layers * 64 * 2 * 2 * 16 * 4
    assert report.peak_bytes < report.total_bytes * (1 + 1 / layers) + chunk
    assert report.total_bytes < 0.4 * report.unquantized_bytes  # float32 model


def test_pool_exactly_full_then_out_of_blocks_then_on_again():
    model = omlx_cache.patch(tiny_model(), max_gpu_blocks=3, sink_tokens=4, **SMALL)
    cache = omlx_cache.PagedCache(model)
    ids = random_ids(1, 4 + 3 * 64 + 1)
    step(model, cache, ids[:, :-1])  # fills all three blocks to the last slot
    full = cache.report()
    assert (full.active_blocks, full.total_blocks, full.block_utilization) == (3, 3, 1.0)
    with pytest.raises(omlx_cache.OutOfBlocksError, match="1 needed, 0 free, 3 configured"):
        step(model, cache, ids[:, -1:])
    assert cache.report() == full
    cache.crop(-10)
    step(model, cache, ids[:, :10])
    assert cache.get_seq_length() == 196
    cache.reset()
    assert cache.report().total_bytes == 0
    step(model, cache, ids[:, :-1])
    assert cache.report().active_blocks == 3


def test_a_prompt_that_cannot_fit_is_refused_before_its_first_chunk():
    model = omlx_cache.patch(tiny_model(), max_gpu_blocks=3, **SMALL)
    cache = omlx_cache.PagedCache(model)
    with pytest.raises(omlx_cache.OutOfBlocksError, match="5 needed, 3 free, 3 configured"):
        step(model, cache, random_ids(1, 300))
    assert cache.get_seq_length() == 0
    assert cache.report().active_blocks == 0
    step(model, cache, random_ids(1, 100))


def test_a_window_lets_a_long_prompt_through_a_small_pool():
    model = omlx_cache.patch(tiny_model(), max_gpu_blocks=4, window_size=100, **SMALL)
    cache = omlx_cache.PagedCache(model)
    step(model, cache, random_ids(1, 1000))
    assert cache.report().seen_tokens == 1000
