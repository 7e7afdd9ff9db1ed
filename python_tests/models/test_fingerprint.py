"""Fingerprints of a model and its blocks: equal where keys and values are, and only there."""

from __future__ import annotations

import pytest
import torch
from caches import SMALL, filled
from tiny import tiny_model

import omlx_cache
from omlx_cache.storage.fingerprint import block_fingerprint, model_fingerprint


def test_fingerprints_see_what_matters_and_nothing_else():
    model = omlx_cache.patch(tiny_model("qwen2"), **SMALL)
    decoder = model.get_decoder()
    before = model_fingerprint(decoder)
    filled(model)
    model.config.use_cache = False
    assert model_fingerprint(decoder) == before
    assert model_fingerprint(tiny_model("qwen2").get_decoder()) == before  # not patched
    cache = omlx_cache.PagedCache(model)
    blocks = block_fingerprint(cache, decoder)
    assert block_fingerprint(omlx_cache.PagedCache(model), decoder) == blocks
    omlx_cache.patch(model, **{**SMALL, "recent_tokens": 64})
    assert block_fingerprint(omlx_cache.PagedCache(model), decoder) != blocks
    for name, weight in decoder.named_parameters():
        kept = weight.data.clone()
        weight.data *= 1.01
        changed = model_fingerprint(decoder)
        assert changed["weights"] != before["weights"], name
        weight.data = kept
    assert model_fingerprint(decoder) == before
    with pytest.raises(NotImplementedError, match="all offloaded"):
        model_fingerprint(decoder.to("meta"))


def test_a_quantized_layer_is_known_in_any_order_of_its_weights():
    """GPTQ kernels pack codes and scales in an order of their own, some when they first run."""
    decoder = tiny_model(num_hidden_layers=1).get_decoder()
    packed = torch.nn.Module()
    packed.register_buffer("qweight", torch.arange(64, dtype=torch.int32).view(8, 8))
    packed.register_buffer("scales", torch.rand(4, 8).half())
    decoder.layers[0].mlp.up_proj = packed
    before = model_fingerprint(decoder)
    packed.qweight = packed.qweight.view(torch.uint8).t()
    packed.scales = packed.scales.bfloat16()[:, torch.randperm(8)]
    assert model_fingerprint(decoder) == before
    packed.scales *= 1.01
    assert model_fingerprint(decoder)["weights"] != before["weights"]


def test_an_adapter_counts_while_it_is_active():
    decoder = tiny_model(num_hidden_layers=1).get_decoder()
    layer = decoder.layers[0].mlp.up_proj
    plain = model_fingerprint(decoder)
    layer.active_adapters, layer.scaling, layer.disable_adapters = ["one"], {"one": 0.5}, False
    one = model_fingerprint(decoder)
    layer.scaling = {"one": 0.25}
    weaker = model_fingerprint(decoder)
    layer.disable_adapters = True
    assert len({f["adapters"] for f in (plain, one, weaker)}) == 3
    assert model_fingerprint(decoder) == plain
