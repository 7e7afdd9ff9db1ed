"""Calls that ask for another cache, or a mask of their own, run as on the unpatched model."""

from __future__ import annotations

import copy
import inspect
import logging
from threading import Event, Thread

import pytest
import torch
from tiny import greedy, left_padded, random_ids, tiny_model
from transformers import DynamicCache, GenerationConfig, QuantizedCache, StaticCache
from transformers.generation import CompileConfig

import omlx_cache
from omlx_cache.compat import cache_name

FAMILIES = ["llama", "mistral-window", "qwen2", "gemma2"]
RETURNED = {"return_dict_in_generate": True}


def cache_of(output):
    """Return the cache of an output, whatever it is called."""
    return next((output[name] for name in ("cache", "past_key_values") if name in output), None)


def both(family="llama", **config):
    """Return a stock model and its patched twin."""
    return tiny_model(family), omlx_cache.patch(tiny_model(family), **config)


def logits(model, input_ids, **kwargs):
    with torch.no_grad():
        return model(input_ids, **kwargs).logits


NAMED = {
    "static": ({"cache_implementation": "static"}, StaticCache),
    "sliding_window": ({"cache_implementation": "sliding_window"}, StaticCache),
    "quantized": (
        {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}},
        QuantizedCache,
    ),
}


@pytest.mark.parametrize(
    ("family", "name"),
    # transformers has no quantized cache for layers with a window
    [(f, n) for f in FAMILIES for n in NAMED if n != "quantized" or f in ("llama", "qwen2")],
)
def test_a_named_cache_is_the_one_that_is_used(family, name, caplog):
    if name == "quantized" and "fp8" not in inspect.getsource(QuantizedCache):
        pytest.skip("this version of transformers quantizes with other packages alone")
    stock, model = both(family, window_size=70, sink_tokens=0)
    inputs, (wanted, kind) = left_padded(random_ids(2, 120), [120, 80]), NAMED[name]
    ours = greedy(model, inputs, 8)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "omlx_cache"):
        for _ in range(2):
            want = stock.generate(**inputs, max_new_tokens=8, **wanted, **RETURNED)
            got = model.generate(**inputs, max_new_tokens=8, **wanted, **RETURNED)
            assert torch.equal(got.sequences, want.sequences)
            assert type(cache_of(got)) is type(cache_of(want)) is kind
    assert caplog.text.count("runs as on the unpatched model") == 1, "once for each reason"
    assert torch.equal(greedy(model, inputs, 8), ours)
    omlx_cache.unpatch(model)
    assert torch.equal(logits(model, **inputs), logits(stock, **inputs))


@pytest.mark.parametrize(
    ("name", "where"), [("dynamic", "call"), ("dynamic", "model"), ("hybrid", "model")]
)
def test_names_of_the_default_cache_mean_the_paged_one(name, where, caplog):
    stock, model = both("gemma2", cache_bits=16)
    inputs, wanted = {"input_ids": random_ids(1, 60)}, {}
    if where == "model":
        model.generation_config.cache_implementation = name
    else:
        wanted = {"cache_implementation": name}
    got = model.generate(**inputs, max_new_tokens=5, do_sample=False, **wanted, **RETURNED)
    assert isinstance(cache_of(got), omlx_cache.PagedCache)
    assert torch.equal(got.sequences[:, 60:], greedy(stock, inputs, 5))
    got = model.generate(**inputs, max_new_tokens=5, do_sample=False, use_cache=False, **wanted)
    assert torch.equal(got[:, 60:], greedy(stock, inputs, 5))
    assert "unpatched" not in caplog.text


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_of_the_callers_is_filled_and_continued(family):
    stock, model = both(family)
    ids, name = random_ids(1, 150), cache_name(type(model).forward)
    results = []
    for each in (stock, model):
        cache = DynamicCache(config=each.config)
        first = each.generate(ids, max_new_tokens=6, do_sample=False, **{name: cache})
        assert cache.get_seq_length() == 155
        after = logits(each, first[:, -1:], **{name: cache})
        assert cache.get_seq_length() == 156
        results.append((first, after))
    (first, after), (got_first, got_after) = results
    assert torch.equal(got_first, first)
    assert torch.equal(got_after, after)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_custom_masks_and_packed_texts(family):
    stock, model = both(family, prefill_chunk=64, block_size=64)
    ids = random_ids(1, 100)
    mask = torch.zeros(1, 1, 100, 100).masked_fill_(torch.ones(100, 100).triu(1).bool(), -1e9)
    mask[..., 60:, 20:40] = -1e9
    positions = torch.cat([torch.arange(60), torch.arange(40)])[None]
    for asked in ({"attention_mask": mask}, {"position_ids": positions, "use_cache": False}):
        want = logits(stock, ids, **asked)
        assert torch.equal(logits(model, ids, **asked), want)
        assert not torch.allclose(logits(model, ids), want, atol=1e-3)


def test_masks_stay_2d_on_a_paged_cache():
    model, ids = omlx_cache.patch(tiny_model()), random_ids(1, 20)
    cache = {cache_name(type(model).forward): omlx_cache.PagedCache(model)}
    with pytest.raises(NotImplementedError, match="attention_mask must be a 2-D tensor"):
        logits(model, ids, attention_mask=torch.zeros(1, 1, 20, 20), **cache)


def test_the_models_own_setting_holds_under_a_configuration_of_the_call():
    model = omlx_cache.patch(tiny_model())
    model.generation_config.cache_implementation = "static"
    how = GenerationConfig(max_new_tokens=3, **RETURNED)
    got = model.generate(random_ids(1, 20), generation_config=how)
    assert isinstance(cache_of(got), StaticCache)


def test_no_cache_where_the_model_wants_none():
    stock, model = both(cache_bits=16)
    ids, how = random_ids(1, 20), GenerationConfig(max_new_tokens=5, do_sample=False, **RETURNED)
    for each in (stock, model):
        each.generation_config.use_cache = False
    want, got = (each.generate(ids, generation_config=how) for each in (stock, model))
    assert torch.equal(got.sequences, want.sequences)
    kinds = {"DynamicCache": "PagedCache", "NoneType": "NoneType"}
    assert type(cache_of(got)).__name__ == kinds[type(cache_of(want)).__name__]


def test_a_compiled_stock_call():
    stock, model = both()
    inputs = left_padded(random_ids(2, 40), [40, 30])
    how = CompileConfig(backend="eager", mode="default", fullgraph=True)
    how._compile_all_devices = True
    wanted = {"cache_implementation": "static", "compile_config": how}
    want = greedy(stock, inputs, 8, cache_implementation="static", disable_compile=True)
    ours = greedy(model, inputs, 8)
    for _ in range(2):
        assert torch.equal(greedy(model, inputs, 8, **wanted), want)
        assert torch.equal(greedy(model, inputs, 8), ours)


def test_an_error_leaves_the_paged_attention_in_place(monkeypatch):
    model, ids = omlx_cache.patch(tiny_model(), cache_bits=16), random_ids(1, 30)
    want, layer = logits(model, ids), model.model.layers[1]

    def fail(*args):
        raise KeyboardInterrupt

    hook = layer.mlp.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        model.generate(ids, cache_implementation="static", max_new_tokens=2)
    hook.remove()
    assert torch.equal(logits(model, ids), want)


def test_a_paged_step_inside_of_a_stock_call():
    """As where a model drafts for itself."""
    model, ids = omlx_cache.patch(tiny_model(), cache_bits=16), random_ids(1, 30)
    want, got = logits(model, ids), []
    static = model.generate(ids, cache_implementation="static", max_new_tokens=4)

    def look(*args):
        hook.remove()
        got.append(logits(model, ids))

    hook = model.lm_head.register_forward_pre_hook(look)
    again = model.generate(ids, cache_implementation="static", max_new_tokens=4)
    assert torch.equal(again, static)
    assert torch.equal(got[0], want)


def test_threads_wait_for_each_other():
    model, ids = omlx_cache.patch(tiny_model(), cache_bits=16), random_ids(1, 30)
    want, inside, go, got = logits(model, ids), Event(), Event(), []

    def wait(*args):
        if not inside.is_set():
            inside.set()
            assert go.wait(60)

    hook = model.model.layers[0].mlp.register_forward_pre_hook(wait)
    named = {"cache_implementation": "static", "max_new_tokens": 4}
    stock = Thread(target=lambda: got.append(model.generate(ids, **named)))
    stock.start()
    assert inside.wait(60)
    paged = Thread(target=lambda: got.append(logits(model, ids)))
    paged.start()
    paged.join(0.2)
    assert paged.is_alive(), "a paged step must not read what a stock call has exchanged"
    go.set()
    stock.join(60)
    paged.join(60)
    hook.remove()
    assert torch.equal(got[1], want)
    assert torch.equal(got[0], model.generate(ids, **named))


def test_a_copied_model_has_a_switch_of_its_own():
    model, ids = omlx_cache.patch(tiny_model(), cache_bits=16), random_ids(1, 30)
    want, named = logits(model, ids), {"cache_implementation": "static", "max_new_tokens": 4}
    static = model.generate(ids, **named)
    copied = copy.deepcopy(model)
    assert torch.equal(copied.generate(ids, **named), static)
    assert torch.equal(logits(copied, ids), want)
    assert copied.model.config is not model.model.config
