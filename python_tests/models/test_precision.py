"""`target_saving` and `keep_layers` in a model."""

from __future__ import annotations

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


@pytest.mark.parametrize("target", [0.5, 0.6])
def test_the_target_is_reached_all_bytes_counted(target):
    model = tiny_model(head_dim=64, num_hidden_layers=2).to(torch.bfloat16)
    report = fill(omlx_cache.patch(model, target_saving=target), 4200).report()
    saved = 1 - report.total_bytes / report.unquantized_bytes
    assert target <= saved < target + 0.03


def test_kept_layers_stay_at_8_bits():
    model = omlx_cache.patch(tiny_model(), cache_bits=4, keep_layers=[0, -1], block_size=64)
    cache = fill(model, 600)
    stored = [
        {tier for tier in Tier if layer.pool.num_bytes(tier) and tier > Tier.HOT}
        for layer in cache.layers
    ]
    assert stored == [{Tier.K8V8}, {Tier.K4V4}, {Tier.K8V8}]


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
