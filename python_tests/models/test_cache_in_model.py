"""The cache inside a model: its logits, for every window, precision and dtype."""

from __future__ import annotations

import pytest
import torch
from caches import SMALL, step
from tiny import greedy, random_ids, tiny_model

import omlx_cache


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
    # Frequencies that may change are never rotated again: the sinks keep their true distance.
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model, ids = tiny_model(rope_parameters=scaling), random_ids(1, 260)[:, :length]
    want = windowed_logits(model, ids, 100, sinks)
    omlx_cache.patch(model, cache_bits=16, window_size=100, sink_tokens=sinks, **SMALL)
    cache = omlx_cache.PagedCache(model)
    prompt = step(model, cache, ids[:, :-3])
    decoded = [step(model, cache, ids[:, i : i + 1]) for i in range(length - 3, length)]
    torch.testing.assert_close(torch.cat([prompt, *decoded], 1), want, rtol=1e-4, atol=1e-4)


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


@pytest.mark.parametrize(
    ("setting", "tiers", "bound"),
    [
        ({"cache_bits": {"k": 8, "v": 4}}, {"k8v4"}, 0.05),
        ({"cache_bits": 4}, {"k4v4"}, 0.2),
        ({"tiers": {"k8v8": 64, "k8v4": 128, "k4v4": None}}, {"k8v8", "k8v4", "k4v4"}, 0.2),
    ],
)
def test_colder_tiers_hold_the_older_tokens(setting, tiers, bound):
    model, ids = tiny_model(), random_ids(1, 500)
    with torch.no_grad():
        want = model(ids).logits
    omlx_cache.patch(model, **SMALL, **setting)
    cache = omlx_cache.PagedCache(model)
    got = torch.cat(
        [step(model, cache, ids[:, :-20])]
        + [step(model, cache, ids[:, i : i + 1]) for i in range(480, 500)],
        1,
    )
    used = {name for name, size in cache.report().bytes_by_tier.items() if size}
    assert used == {"sink", "hot"} | tiers
    kld = torch.nn.functional.kl_div(
        got.log_softmax(-1), want.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    assert 0 < kld / ids.shape[1] < bound


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
