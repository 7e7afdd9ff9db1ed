"""`target_saving` and `keep_layers` in a model."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tiny import random_ids, tiny_model

import omlx_cache
from omlx_cache.compat import cache_name
from omlx_kernels.layout import Tier


def fill(model, length: int) -> omlx_cache.PagedCache:
    cache = omlx_cache.PagedCache(model)
    with torch.no_grad():
        model(random_ids(1, length), **{cache_name(type(model).forward): cache})
    return cache


def mean_saving(model, length: int) -> float:
    """Return the share saved, as the mean over the time in which 256 more tokens come."""
    cache, saved = fill(model, length), []
    for _ in range(16):
        with torch.no_grad():
            model(random_ids(1, 16), **{cache_name(type(model).forward): cache})
        report = cache.report()
        saved.append(1 - report.total_bytes / report.unquantized_bytes)
    return sum(saved) / len(saved)


@pytest.mark.parametrize("target", [0.5, 0.6])
def test_the_target_is_reached_all_bytes_counted(target):
    model = tiny_model(head_dim=64, num_hidden_layers=2).to(torch.bfloat16)
    saved = mean_saving(omlx_cache.patch(model, target_saving=target), 4200)
    assert target - 0.002 <= saved < target + 0.03  # blocks, of which there is a whole number


def tiers_of(cache: omlx_cache.PagedCache) -> list[set[Tier]]:
    """Return which quantized tiers each layer has blocks in."""
    return [
        {tier for tier in Tier if layer.pool.num_bytes(tier) and tier > Tier.HOT}
        for layer in cache.layers
    ]


def test_kept_layers_stay_at_8_bits():
    model = omlx_cache.patch(tiny_model(), cache_bits=4, keep_layers=[0, -1], block_size=64)
    assert tiers_of(fill(model, 600)) == [{Tier.K8V8}, {Tier.K4V4}, {Tier.K8V8}]


def model_with_biased_keys(layers=(0, 2), **changes):
    """Return a tiny Qwen2 some of whose keys have a bias of hundreds, as real ones do."""
    model = tiny_model("qwen2", head_dim=64, num_hidden_layers=3, **changes)
    for i, layer in enumerate(model.get_decoder().layers):
        bias = layer.self_attn.k_proj.bias.data.zero_().view(-1, 64)
        if i in layers:
            bias[:, [2, 40]] = 250.0
    return model


def test_layers_whose_keys_4_bits_would_ruin_keep_8_bit_keys(caplog):
    model = model_with_biased_keys()
    omlx_cache.patch(model, cache_bits=4, block_size=64)
    assert "keys of layers 0, 2 stay at 8 bits" in caplog.text
    assert tiers_of(fill(model, 600)) == [{Tier.K8V4}, {Tier.K4V4}, {Tier.K8V4}]
    caplog.clear()
    omlx_cache.patch(model, cache_bits=4, block_size=64, keep_layers=None)
    assert tiers_of(fill(model, 600)) == [{Tier.K4V4}] * 3
    omlx_cache.patch(model, cache_bits={"k": 8, "v": 4}, block_size=64)
    assert tiers_of(fill(model, 600)) == [{Tier.K8V4}] * 3
    assert not caplog.text, "nothing was changed"


def test_the_text_survives_where_keys_are_biased():
    ids = random_ids(1, 700)
    model = model_with_biased_keys()
    with torch.no_grad():
        wanted = model(ids).logits[0, 600:].log_softmax(-1)
        losses = []
        for keep in ("auto", None):
            with omlx_cache.patched(model, cache_bits=4, block_size=64, keep_layers=keep):
                got = model(ids).logits[0, 600:].log_softmax(-1)
            losses.append((wanted.exp() * (wanted - got)).sum(-1).mean().item())
    assert losses[0] < losses[1] / 5


def test_the_others_reach_the_target_for_layers_that_keep_their_keys():
    model = model_with_biased_keys(layers=[1]).to(torch.bfloat16)
    assert mean_saving(omlx_cache.patch(model, target_saving=0.6, block_size=64), 4200) >= 0.598


def test_a_target_that_such_layers_stand_against_is_refused_with_the_way_out():
    model = model_with_biased_keys(layers=[0, 1, 2])
    with pytest.raises(
        ValueError, match=r"below 0\.594 .* 3 of 3 layers kept .* keep_layers: null"
    ):
        omlx_cache.patch(model, target_saving=0.65)
    omlx_cache.patch(model, target_saving=0.65, keep_layers=None)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"keep_layers": [3]}, r"keep_layers must name layers of the model, from -3 to 2, got 3"),
        ({"target_saving": 0.95}, r"target_saving must be below .* got 0\.95"),
    ],
)
def test_wrong_for_the_model_is_refused_at_patch(wrong, message):
    model = tiny_model()
    with pytest.raises(ValueError, match=message):
        omlx_cache.patch(model, **wrong)
    assert "generate" not in vars(model)
    omlx_cache.patch(model)
    with pytest.raises(ValueError, match=message):
        omlx_cache.patch(model, **wrong)


def test_calibration_finds_what_4_bits_ruin_and_leaves_the_model_as_it_was():
    ids, steps = random_ids(1, 600), []
    # Only the last layer: what an earlier one loses in a random model decides everything.
    model = model_with_biased_keys(layers=[2])
    with torch.no_grad():
        before = model(ids).logits
    found = omlx_cache.calibrate(model, ids, progress=lambda *x: steps.append(x))
    usual = omlx_cache.calibrate(model_with_biased_keys(layers=[]), ids)
    assert found.divergence[2] > 20 * usual.divergence[2]
    limit = (found.divergence[2] + usual.divergence[2]) / 2
    assert 2 in dataclasses.replace(found, limit=limit).keep_layers
    assert 2 not in dataclasses.replace(usual, limit=limit).keep_layers
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)
    omlx_cache.patch(model, window_size=99)
    omlx_cache.calibrate(model, ids)
    assert model.generate(ids[:, :8], max_new_tokens=2, do_sample=False).shape == (1, 10)
    assert omlx_cache.report(model).seen_tokens == 9


def test_calibration_needs_one_text():
    for wrong in (random_ids(2, 300), random_ids(1, 255), random_ids(1, 300)[0]):
        with pytest.raises(ValueError, match=r"one text of at least 256 tokens, .* got \["):
            omlx_cache.calibrate(tiny_model(), wrong)
