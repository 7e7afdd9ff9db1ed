"""The rows of a cache in a model: cropped, shared, padded and undone, they say what they should."""

from __future__ import annotations

import pytest
import torch
from caches import SMALL, step
from tiny import left_padded, random_ids, tiny_model

import omlx_cache


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
