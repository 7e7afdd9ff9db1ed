"""Everything that transformers' `Cache` offers, on a `PagedCache`: the right answer, or a refusal.

What the operations do to a text is in ``test_cache_rows.py`` and ``test_generation_modes.py``.
"""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from caches import SMALL, step
from tiny import left_padded, random_ids, tiny_model
from transformers import DynamicCache
from transformers.cache_utils import Cache

import omlx_cache

SERVED = {
    "activate_past_recording",
    "batch_repeat_interleave",
    "batch_select_indices",
    "batch_size",
    "crop",
    "early_initialization",
    "get_mask_sizes",
    "get_max_cache_shape",
    "get_max_length",
    "get_query_offset",
    "get_seq_length",
    "is_compileable",
    "is_croppable",
    "is_dummy",
    "is_initialized",
    "is_linear",
    "is_recording_past",
    "is_sliding",
    "max_batch_size",
    "max_cache_len",
    "reorder_cache",
    "reset",
    "update",
}
REFUSED = {
    "get_conv_state",
    "get_recurrent_state",
    "has_previous_state",
    "offload",
    "prefetch",
    "update_conv_state",
    "update_indexer",
    "update_recurrent_state",
}


@pytest.fixture
def model():
    return omlx_cache.patch(tiny_model("gemma2"), window_size=None, **SMALL)


@pytest.fixture
def cache(model):
    cache = omlx_cache.PagedCache(model)
    step(model, cache, random_ids(2, 70))
    return cache


def test_no_method_of_this_version_is_unknown_here():
    public = {name for name, _ in inspect.getmembers(Cache) if not name.startswith("_")}
    assert public <= SERVED | REFUSED


def test_answers_are_those_of_the_stock_cache(cache):
    stock = DynamicCache(config=tiny_model("gemma2").config)
    step(tiny_model("gemma2"), stock, random_ids(2, 70))
    for name in ("is_sliding", "is_linear", "is_dummy", "is_initialized", "is_croppable"):
        if hasattr(stock, name):
            assert getattr(cache, name) == getattr(stock, name), name
    assert len(cache) == len(stock) == 2
    for layer in range(2):
        assert cache.get_seq_length(layer) == stock.get_seq_length(layer) == 70
        assert cache.get_query_offset(layer) == stock.get_query_offset(layer) == 70
    assert cache.get_mask_sizes(3, 1) == stock.get_mask_sizes(3, 1) == (73, 0)


def test_lengths_and_rows(model, cache):
    assert cache.get_max_length() == cache.get_max_length(0) == -1
    assert cache.batch_size == 2
    assert cache.is_compileable
    for name in ("max_batch_size", "max_cache_len"):  # gone since 5.18
        if hasattr(Cache, name):
            assert getattr(cache, name) == (2 if name == "max_batch_size" else -1)
    cache.batch_repeat_interleave(3)
    assert cache.batch_size == 6
    cache.reset()
    assert (cache.batch_size, cache.get_seq_length()) == (-1, 0)
    step(model, cache, random_ids(3, 5))
    assert cache.batch_size == 3


def test_every_layer_slides_under_a_window():
    model = omlx_cache.patch(tiny_model(), window_size=50, **SMALL)
    assert omlx_cache.PagedCache(model).is_sliding == [True] * 3
    omlx_cache.patch(model, window_size=None)
    assert omlx_cache.PagedCache(model).is_sliding == [False] * 3


def test_recording_the_past_is_seen_and_ended(cache):
    assert not cache.layers[0].record_past
    cache.activate_past_recording()
    assert all(layer.record_past for layer in cache.layers)
    for layer in cache.layers:  # how generate() ends it
        layer.record_past = False
    assert not any(group.keep_past for group in cache.groups)


def test_early_initialization_changes_nothing_later(model, cache):
    early = omlx_cache.PagedCache(model)
    assert not early.is_initialized
    early.early_initialization(2, 2, 256, torch.float32, torch.device("cpu"))
    assert early.is_initialized
    step(model, early, random_ids(2, 70))
    tail = random_ids(2, 5, seed=1)
    assert torch.equal(step(model, early, tail), step(model, cache, tail))


def test_offloading_is_refused(cache):
    for method in (cache.offload, cache.prefetch):
        with pytest.raises(NotImplementedError, match="bound the memory with"):
            method(0)


def test_states_of_other_kinds_of_layers_are_refused(cache):
    state = torch.zeros(2, 4)
    for name in REFUSED - {"offload", "prefetch"}:
        method = getattr(cache, name, None)
        if method is None:
            continue
        arguments = (state, 0) if name.startswith("update") else (0,)
        with pytest.raises((ValueError, AttributeError)):
            method(*arguments)
    assert cache.get_seq_length() == 70


@pytest.mark.parametrize(
    "name",
    [
        "reset",
        "crop",
        "reorder_cache",
        "batch_repeat_interleave",
        "batch_select_indices",
        "offload",
        "prefetch",
    ],
)
def test_a_layer_alone_is_refused(cache, name):
    with pytest.raises(NotImplementedError, match="on the PagedCache"):
        getattr(cache.layers[0], name)(0)


def test_update_outside_of_a_step_is_refused(cache):
    keys = torch.zeros(2, 2, 1, 256)
    with pytest.raises(RuntimeError, match=r"call omlx_cache\.patch\(model\)"):
        cache.update(keys, keys, 0)


def test_continuous_batching_is_refused_and_changes_nothing(model):
    ids = random_ids(1, 40)
    before = step(model, omlx_cache.PagedCache(model), ids)
    for call in (
        lambda: model.generate_batch([[5, 6, 7]]),
        lambda: model.init_continuous_batching(),
    ):
        with pytest.raises(NotImplementedError, match=r"continuous batching .* can't be served"):
            call()
    assert torch.equal(step(model, omlx_cache.PagedCache(model), ids), before)
    with pytest.raises(NotImplementedError, match=r"continuous batching .* can't be served"):
        model.generate(ids, cache_implementation="paged", max_new_tokens=2)
    omlx_cache.unpatch(model)
    assert "init_continuous_batching" not in vars(model)


@pytest.mark.parametrize(("bits", "error"), [(16, 0.0), (8, 0.01), (4, 0.15)])
def test_keys_and_values_can_be_read_like_those_of_a_stock_cache(bits, error):
    stock, model = tiny_model(), omlx_cache.patch(tiny_model(), cache_bits=bits, **SMALL)
    inputs = left_padded(random_ids(2, 200), [200, 150])
    ids, seen = inputs["input_ids"], {"attention_mask": inputs["attention_mask"]}
    expected, cache = DynamicCache(config=stock.config), omlx_cache.PagedCache(model)
    step(stock, expected, ids, **seen)
    step(model, cache, ids, **seen)
    real = inputs["attention_mask"].bool()[:, None, :, None]
    pairs = list(zip(cache.layers, expected.layers, strict=True))
    for layer, other in pairs if bits == 16 else pairs[:1]:  # later ones read rounded history
        for got, want in ((layer.keys, other.keys), (layer.values, other.values)):
            assert got.shape == want.shape
            assert not got.masked_select(~real).any()
            difference = ((got - want) * real).abs().max()
            assert difference <= 1e-4 + error * want.abs().max()
    copied = copy.deepcopy(cache)
    cache.reset()
    assert cache.layers[0].keys is None
    assert copied.layers[0].keys.shape[2] == 200
    alone = copied.layers[0]
    del copied
    with pytest.raises(RuntimeError, match="whose cache is gone"):
        _ = alone.keys


def test_what_the_window_has_left_behind_reads_as_zero():
    model = omlx_cache.patch(tiny_model(), **SMALL | {"window_size": 70, "sink_tokens": 2})
    cache = omlx_cache.PagedCache(model)
    step(model, cache, random_ids(1, 300))
    there = cache.layers[0].keys[0, 0].any(-1).nonzero().flatten().tolist()
    assert there[:2] == [0, 1]
    assert there[2:] == list(range(there[2], 300))
    assert 300 - 70 - 64 <= there[2] <= 300 - 70


def test_keys_and_values_cannot_be_replaced(cache):
    with pytest.raises(NotImplementedError, match="can be read but not replaced"):
        cache.layers[0].keys = torch.zeros(1)
