"""`patch`, `unpatch`, `patched`: what they change, restore and refuse."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from tiny import greedy, random_ids, tiny_model

import omlx_cache
from omlx_cache.attention import ATTENTION_NAME, PagedAttention
from omlx_cache.compat import cache_name
from omlx_kernels import ops


@pytest.fixture
def ids():
    return random_ids(1, 100)


def logits_of(model, ids):
    with torch.no_grad():
        return model(ids).logits


def test_patch_returns_the_model_and_routes_attention(ids, monkeypatch):
    model = tiny_model()
    calls = []
    real = ops.paged_attention
    monkeypatch.setattr(ops, "paged_attention", lambda *a, **k: calls.append(1) or real(*a, **k))
    assert omlx_cache.patch(model, prefill_chunk=50) is model
    logits_of(model, ids)
    assert len(calls) == 2 * model.config.num_hidden_layers  # two chunks


def test_attentions_can_be_asked_for_after_hidden_states_were_while_patched(ids):
    model = tiny_model()
    with torch.no_grad():
        with omlx_cache.patched(model):
            hidden = model(ids, output_hidden_states=True).hidden_states
        attentions = model(ids, output_attentions=True).attentions
    layers = model.config.num_hidden_layers
    assert (len(hidden), len(attentions)) == (layers + 1, layers)


def test_unpatch_restores_outputs_bit_for_bit(ids):
    model = tiny_model()
    attention = model.model.layers[0].self_attn
    before, names, attributes = logits_of(model, ids), list(model.state_dict()), set(vars(model))
    omlx_cache.patch(model)
    assert model.model.config._attn_implementation == ATTENTION_NAME
    assert model.config._attn_implementation != ATTENTION_NAME  # others may share it
    assert omlx_cache.unpatch(model) is model
    assert torch.equal(logits_of(model, ids), before)
    assert model.model.layers[0].self_attn is attention
    assert (list(model.state_dict()), set(vars(model))) == (names, attributes)
    assert model.config._attn_implementation != ATTENTION_NAME
    omlx_cache.unpatch(model)  # once more does nothing
    assert torch.equal(logits_of(model, ids), before)


def test_patched_restores_after_an_exception_inside_generate(ids):
    model = tiny_model()
    before = logits_of(model, ids)

    def fail(*_args, **_kwargs):
        raise KeyboardInterrupt

    hook = model.model.layers[1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt), omlx_cache.patched(model):
        greedy(model, {"input_ids": ids}, 5)
    hook.remove()
    assert torch.equal(logits_of(model, ids), before)


def test_state_dict_names_and_training_flag_are_untouched():
    model = tiny_model()
    names = list(model.state_dict())
    omlx_cache.patch(model)
    assert list(model.state_dict()) == names
    assert isinstance(model.model.layers[0].self_attn, PagedAttention)
    model.train()
    assert model.model.layers[0].self_attn.original.training
    model.eval()
    assert not model.model.layers[0].self_attn.original.training


def test_patching_twice_replaces_the_configuration(ids):
    model = tiny_model()
    before = logits_of(model, ids)
    omlx_cache.patch(model, cache_bits=8, block_size=64)
    omlx_cache.patch(model, cache_bits=16, block_size=128)
    assert omlx_cache.PagedCache(model).config.block_size == 128
    torch.testing.assert_close(logits_of(model, ids), before, rtol=1e-4, atol=1e-4)
    with omlx_cache.patched(model, block_size=256):
        assert omlx_cache.PagedCache(model).config.block_size == 256
    assert omlx_cache.PagedCache(model).config.block_size == 128
    omlx_cache.unpatch(model)
    assert torch.equal(logits_of(model, ids), before)


def test_hooks_on_the_original_keep_running(ids):
    model, seen = tiny_model(), []
    layer = model.model.layers[0]
    layer.self_attn.register_forward_hook(lambda *_: seen.append("attention"))
    layer.self_attn.q_proj.register_forward_hook(lambda *_: seen.append("q_proj"))
    omlx_cache.patch(model)
    logits_of(model, ids)
    assert seen == ["q_proj", "attention"]


def test_a_replaced_forward_keeps_running(ids):
    # what accelerate does to a module that it hooks
    model, seen = tiny_model(), []
    decoder = model.model
    inner = decoder.forward
    decoder.forward = lambda *a, **k: seen.append("hooked") or inner(*a, **k)
    hooked = decoder.forward
    omlx_cache.patch(model)
    logits_of(model, ids)
    assert seen == ["hooked"]
    omlx_cache.unpatch(model)
    assert decoder.forward is hooked


def test_a_deep_copy_is_patched_on_its_own(ids):
    model = omlx_cache.patch(tiny_model(), cache_bits=16)
    want = greedy(model, {"input_ids": ids}, 5)
    copied = copy.deepcopy(model)
    omlx_cache.unpatch(model)
    for weight in model.parameters():
        weight.data.zero_()
    assert torch.equal(greedy(copied, {"input_ids": ids}, 5), want)
    omlx_cache.unpatch(copied)
    assert not isinstance(copied.model.layers[0].self_attn, PagedAttention)


def test_the_cache_does_not_outlive_generate(ids):
    model = omlx_cache.patch(tiny_model())
    alive = []
    real = omlx_cache.PagedCache.for_patch.__func__

    def spy(cls, *args, **kwargs):
        cache = real(cls, *args, **kwargs)
        alive.append(weakref.ref(cache))
        return cache

    omlx_cache.PagedCache.for_patch, original = classmethod(spy), omlx_cache.PagedCache.for_patch
    try:
        greedy(model, {"input_ids": ids}, 3)
    finally:
        omlx_cache.PagedCache.for_patch = original
    gc.collect()
    assert len(alive) == 1
    assert alive[0]() is None
    assert omlx_cache.report(model).seen_tokens == 102  # the last token was never fed back


def test_unpatched_model_has_no_cache_and_no_report():
    model = tiny_model()
    with pytest.raises(ValueError, match=r"call omlx_cache\.patch"):
        omlx_cache.PagedCache(model)
    with pytest.raises(ValueError, match=r"call omlx_cache\.patch"):
        omlx_cache.report(model)
    omlx_cache.patch(model)
    with pytest.raises(ValueError, match="one that has not run"):
        omlx_cache.report(model)
    model(random_ids(1, 5), **{cache_name(type(model).forward): omlx_cache.PagedCache(model)})
    gc.collect()
    with pytest.raises(ValueError, match="pass the PagedCache itself"):
        omlx_cache.report(model)


def test_what_is_no_cache_of_this_model_is_refused(ids):
    model = omlx_cache.patch(tiny_model())
    name = cache_name(type(model).forward)
    with pytest.raises(TypeError, match="must be a PagedCache, got tuple"):
        greedy(model, {"input_ids": ids}, 3, **{name: (1, 2)})
    with pytest.raises(TypeError, match="must be a PagedCache, got tuple"):
        model(ids, **{name: (1, 2)})
    other = omlx_cache.patch(tiny_model(num_hidden_layers=2))
    with pytest.raises(ValueError, match="made for this model"):
        model(ids, **{name: omlx_cache.PagedCache(other)})


def test_a_paged_cache_in_an_unpatched_model_is_refused(ids):
    model = omlx_cache.patch(tiny_model())
    cache = omlx_cache.PagedCache(model)
    omlx_cache.unpatch(model)
    with pytest.raises(RuntimeError, match="inside a step of the model"):
        model(ids, **{cache_name(type(model).forward): cache})


def test_training_and_gradients_are_refused(ids):
    model = omlx_cache.patch(tiny_model())
    with pytest.raises(RuntimeError, match="has no backward pass"):
        model(ids).logits.sum().backward()
    model.train()
    with pytest.raises(RuntimeError, match="can't be trained"):
        model(ids)


def test_a_mask_of_another_shape_is_refused(ids):
    model = omlx_cache.patch(tiny_model())
    with pytest.raises(ValueError, match=r"attention_mask must be \[1, 100\]"):
        model(ids, attention_mask=torch.ones(1, 60))


def test_configuration_errors_leave_the_model_alone(ids):
    model = tiny_model()
    before = set(vars(model))
    with pytest.raises(ValueError, match="block_size"):
        omlx_cache.patch(model, block_size=100)
    with pytest.raises(ValueError, match="model_bits"):
        omlx_cache.patch(model, model_bits=4)
    with pytest.raises(ValueError, match="prefix_cache"):
        omlx_cache.patch(model, disk_cache=True, prefix_cache=False)
    assert set(vars(model)) == before
    assert not isinstance(model.model.layers[0].self_attn, PagedAttention)
