"""Which layers `patch` finds to have keys that 4 bits would ruin, wherever their bias stands."""

from __future__ import annotations

import pytest
import torch
from every_family import build
from tiny import tiny_model

from omlx_cache.inspection import inspect_model

HUGE = 500.0


def attention_of(model, layer: int = 0) -> torch.nn.Module:
    return inspect_model(model).sites[layer].module


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen2", "k_proj.bias"),
        ("gpt_oss", "k_proj.bias"),
        ("glm", "k_proj.bias"),
        ("gpt_neox", "query_key_value.bias"),  # queries, keys and values head by head
        ("persimmon", "k_layernorm.bias"),
    ],
)
def test_a_huge_bias_that_turns_is_found(family, name):
    model = build(family)
    assert not inspect_model(model).fragile_layers
    attention = attention_of(model)
    bias = attention.get_parameter(name).data
    bias[: len(bias) // 2 : 3] = HUGE
    assert inspect_model(model).fragile_layers == {0}


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("gpt2", "c_attn.bias"),  # learned positions: nothing turns
        ("qwen2", "v_proj.bias"),
        ("persimmon", "query_key_value.bias"),  # keys are normalized after it
        ("gpt_neox", "dense.bias"),
    ],
)
def test_a_huge_bias_that_does_not_turn_in_keys_is_none(family, name):
    model = build(family)
    attention_of(model).get_parameter(name).data[:] = HUGE
    assert not inspect_model(model).fragile_layers


def test_a_bias_under_an_adapter_is_found():
    peft = pytest.importorskip("peft", reason="needs the extra dev")
    model = tiny_model("qwen2")
    for layer in model.get_decoder().layers:
        layer.self_attn.k_proj.bias.data.fill_(0.1)
    model.get_decoder().layers[1].self_attn.k_proj.bias.data.fill_(HUGE)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["k_proj"], r=2))
    assert inspect_model(adapted.get_base_model()).fragile_layers == {1}


def test_a_bias_that_can_not_be_read_may_be_huge():
    model = build("qwen2")
    projection = attention_of(model).k_proj
    projection.bias = torch.nn.Parameter(projection.bias.to("meta"))
    assert inspect_model(model).fragile_layers == {0}
