"""The cache inside a model: windows, memory, exhaustion, interrupts, crops, rows."""

from __future__ import annotations

import pytest
import torch
from tiny import greedy, left_padded, random_ids, tiny_model

import omlx_cache
from omlx_cache.compat import cache_name
from omlx_kernels.layout import BLOCK_TIERS

SMALL = {"block_size": 64, "prefill_chunk": 64, "recent_tokens": 0}


def step(model, cache, ids, **kwargs):
    """Run ids through the model on a cache; return the logits."""
    with torch.no_grad():
        return model(ids, **{cache_name(type(model).forward): cache}, **kwargs).logits


def windowed_logits(model, ids, window: int, sinks: int) -> torch.Tensor:
    """Stock attention under an explicit mask: a window of ``window`` keys, plus the sinks."""
    length = ids.shape[1]
    q, k = torch.arange(length)[:, None], torch.arange(length)[None]
    seen = (k <= q) & ((k > q - window) | (k < sinks))
    mask = torch.zeros(length, length).masked_fill(~seen, float("-inf"))[None, None]
    with torch.no_grad():
        return model(ids, attention_mask=mask).logits


@pytest.mark.parametrize("sinks", [0, 4, 64])
@pytest.mark.parametrize("length", [99, 100, 101, 102, 230])
def test_window_equals_stock_attention_under_the_same_mask(length, sinks):
    model, ids = tiny_model(), random_ids(1, 260)[:, :length]
    want = windowed_logits(model, ids, 100, sinks)
    omlx_cache.patch(model, cache_bits=16, window_size=100, sink_tokens=sinks, **SMALL)
    cache = omlx_cache.PagedCache(model)
    prompt = step(model, cache, ids[:, :-3])
    decoded = [step(model, cache, ids[:, i : i + 1]) for i in range(length - 3, length)]
    torch.testing.assert_close(torch.cat([prompt, *decoded], 1), want, rtol=1e-4, atol=1e-4)


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


def test_window_larger_than_the_text_changes_nothing():
    model, ids = tiny_model(), random_ids(1, 200)
    with torch.no_grad():
        want = model(ids).logits
    omlx_cache.patch(model, cache_bits=16, window_size=200, **SMALL)
    torch.testing.assert_close(
        step(model, omlx_cache.PagedCache(model), ids), want, rtol=1e-4, atol=1e-4
    )


def test_quantized_logits_stay_close_and_blocks_really_are_8_bit():
    model, ids = tiny_model(), random_ids(1, 400)
    with torch.no_grad():
        want = model(ids).logits
    omlx_cache.patch(model, **SMALL)
    cache = omlx_cache.PagedCache(model)
    got = step(model, cache, ids)
    assert cache.report().bytes_by_tier["k8v8"] > cache.report().bytes_by_tier["hot"]
    assert not torch.equal(got, want)
    kld = torch.nn.functional.kl_div(
        got.log_softmax(-1), want.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    assert kld / ids.shape[1] < 1e-3


def test_report_counts_the_bytes_of_the_tensors():
    model = omlx_cache.patch(tiny_model(), **SMALL)
    cache = omlx_cache.PagedCache(model)
    step(model, cache, random_ids(2, 300))
    tensors = [
        t
        for layer in cache.layers
        for tier in (layer.pool.blocks.sink, layer.pool.blocks.hot, layer.pool.blocks.k8v8)
        for t in (tier.k, tier.v, tier.k_scale, tier.k_zero, tier.v_scale)
        if t is not None
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


def test_an_error_in_some_layer_undoes_the_step():
    model = omlx_cache.patch(tiny_model(), **SMALL)
    ids = random_ids(2, 200)
    cache, undisturbed = omlx_cache.PagedCache(model), omlx_cache.PagedCache(model)
    for c in (cache, undisturbed):
        step(model, c, ids[:, :150])
    before = cache.report()

    def fail(*_args):
        raise KeyboardInterrupt

    hook = model.model.layers[1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        step(model, cache, ids[:, 150:])
    hook.remove()
    after = cache.report()
    assert (after.active_blocks, after.bytes_by_tier) == (
        before.active_blocks,
        before.bytes_by_tier,
    )
    got, want = (step(model, c, ids[:, 150:]) for c in (cache, undisturbed))
    assert torch.equal(got, want)


@pytest.mark.parametrize("kept", [1, 3, 4, 5, 67, 68, 69, 100, 132, 149, 150])
@pytest.mark.parametrize("bits", [8, 16])
def test_crop_equals_never_having_seen_the_rest(kept, bits):
    model = omlx_cache.patch(tiny_model(), cache_bits=bits, **SMALL)
    ids = random_ids(1, 150)
    cache, fresh = omlx_cache.PagedCache(model), omlx_cache.PagedCache(model)
    step(model, cache, ids)
    cache.crop(kept - 150)
    step(model, fresh, ids[:, :kept])
    assert cache.get_seq_length() == kept
    got, want = (step(model, c, ids[:, :30]) for c in (cache, fresh))
    # At 8 bits a re-opened block keeps its rounded values, where the fresh one has exact ones.
    tolerance = 1e-5 if bits == 16 else 0.02
    assert (got - want).abs().mean() < tolerance * want.abs().mean()


def test_crop_refuses_what_the_window_has_released():
    model = omlx_cache.patch(tiny_model(), window_size=100, **SMALL)
    cache = omlx_cache.PagedCache(model)
    step(model, cache, random_ids(1, 400))
    before = cache.report()
    with pytest.raises(ValueError, match="older blocks were released"):
        cache.crop(-150)
    with pytest.raises(ValueError, match="between -400 and 0"):
        cache.crop(3)
    assert cache.report() == before


def test_rows_share_blocks_until_one_is_written():
    model = omlx_cache.patch(tiny_model(), cache_bits=16, **SMALL)
    ids = random_ids(1, 100)
    cache, fresh = omlx_cache.PagedCache(model), omlx_cache.PagedCache(model)
    step(model, cache, ids)
    single = cache.report().active_blocks
    cache.batch_repeat_interleave(3)
    assert cache.report().active_blocks == single
    branches = random_ids(3, 40, seed=1)
    got = step(model, cache, branches)
    step(model, fresh, ids.expand(3, -1))
    torch.testing.assert_close(got, step(model, fresh, branches), rtol=1e-4, atol=1e-4)
    cache.batch_select_indices(torch.tensor([2]))
    fresh.batch_select_indices(torch.tensor([False, False, True]))
    got, want = (step(model, c, ids[:, :5]) for c in (cache, fresh))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert cache.report().active_blocks == fresh.report().active_blocks
    with pytest.raises(ValueError, match="below 1, got 4"):
        cache.batch_select_indices(torch.tensor([4]))


def test_shared_blocks_are_quantized_once_and_only_together():
    model = omlx_cache.patch(tiny_model(), **SMALL)
    cache = omlx_cache.PagedCache(model)
    step(model, cache, random_ids(1, 60))
    cache.batch_repeat_interleave(2)
    step(model, cache, random_ids(2, 200))
    (group,) = cache.groups
    listed = [(b.tier, b.index) for row in group.rows for b in row.blocks]
    # Block 0 was partial when the rows parted, so each has its own; later blocks never were shared.
    assert len(listed) == len(set(listed)) == group.blocks.num_used == 8

    full = omlx_cache.PagedCache(model)
    step(model, full, random_ids(1, 4 + 2 * 64 + 10))
    full.batch_repeat_interleave(2)
    step(model, full, random_ids(2, 200))
    (group,) = full.groups
    shared = [row.blocks[:2] for row in group.rows]
    assert shared[0] == shared[1]
    assert [group.blocks.refs(b.tier, b.index) for b in shared[0]] == [2, 2]


def test_a_row_that_ended_early_loses_its_padding_in_the_next_turn():
    model = tiny_model()
    first = left_padded(random_ids(2, 50), [50, 30])
    second = random_ids(2, 40, seed=5)
    # row 1 ended after 3 tokens and was padded with 7; the next mask says so
    answers = random_ids(2, 10, seed=6)
    ended = torch.ones_like(answers)
    ended[1, 3:] = 0
    history = torch.cat([first["input_ids"], answers * ended, second], 1)
    mask = torch.cat([first["attention_mask"], ended, torch.ones_like(second)], 1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        want = model(history, attention_mask=mask, position_ids=positions).logits[:, -40:]
    omlx_cache.patch(model, cache_bits=16, **SMALL)
    cache = omlx_cache.PagedCache(model)
    step(
        model,
        cache,
        history[:, :60],
        attention_mask=torch.cat([first["attention_mask"], torch.ones_like(answers)], 1),
        position_ids=positions[:, :60],
    )
    got = step(model, cache, second, attention_mask=mask, position_ids=positions[:, -40:])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    mask = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], 1)
    mask[:, 55] = 0
    with pytest.raises(ValueError, match="hides tokens in the middle"):
        step(model, cache, second[:, :1], attention_mask=mask)


def test_another_batch_size_is_refused():
    model = omlx_cache.patch(tiny_model(), **SMALL)
    cache = omlx_cache.PagedCache(model)
    step(model, cache, random_ids(2, 20))
    with pytest.raises(ValueError, match="2 rows that the cache holds, got 3"):
        step(model, cache, random_ids(3, 20))


def test_rows_of_padding_only_and_empty_input():
    model = omlx_cache.patch(tiny_model(), **SMALL)
    cache = omlx_cache.PagedCache(model)
    ids = random_ids(2, 30)
    mask = torch.ones_like(ids)
    mask[1] = 0
    logits = step(model, cache, ids, attention_mask=mask)
    assert logits.isfinite().all()
    assert cache.report().cached_tokens == 30


def test_two_caches_on_one_model_do_not_mix():
    model = omlx_cache.patch(tiny_model(), cache_bits=16, **SMALL)
    a, b = omlx_cache.PagedCache(model), omlx_cache.PagedCache(model)
    ids = random_ids(2, 80)
    for i in range(0, 80, 20):  # interleaved
        step(model, a, ids[:1, i : i + 20])
        step(model, b, ids[1:, i : i + 20])
    tail = random_ids(1, 5, seed=9)
    alone = omlx_cache.PagedCache(model)
    step(model, alone, ids[:1])
    torch.testing.assert_close(step(model, a, tail), step(model, alone, tail), rtol=1e-4, atol=1e-4)


def test_half_precision_models():
    for dtype in (torch.float16, torch.bfloat16):
        model = tiny_model().to(dtype)
        ids = random_ids(1, 200)
        with torch.no_grad():
            want = model(ids).logits.float()
        omlx_cache.patch(model, **SMALL)
        got = step(model, omlx_cache.PagedCache(model), ids).float()
        assert (got - want).abs().mean() < 0.05 * want.abs().mean()


def test_under_autocast():
    model, ids = tiny_model(), random_ids(1, 100)
    with torch.autocast("cpu", torch.bfloat16):
        want = greedy(model, {"input_ids": ids}, 5)
        omlx_cache.patch(model, cache_bits=16, **SMALL)
        got = greedy(model, {"input_ids": ids}, 5)
    assert got.shape == want.shape
    assert omlx_cache.report(model).bytes_by_tier["hot"] > 0
