"""A patched model under `torch.compile`: one graph for every length and every cache."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from tiny import random_ids, tiny_model
from transformers import CompileConfig

import omlx_cache
from omlx_cache import compiled
from omlx_cache.compat import cache_name
from omlx_kernels import ops


@pytest.fixture(autouse=True)
def no_recompiles():
    """Start without graphs, and make compiling a second time an error."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        yield
    torch._dynamo.reset()


def number_of_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def decode(model, step, cache, ids, mask=None) -> torch.Tensor:
    """Prefill 250 columns with the model, then feed the rest to ``step`` one by one."""
    name = cache_name(type(model).forward)
    first = None if mask is None else mask[:, :250]
    model(ids[:, :250], attention_mask=first, **{name: cache})
    logits = []
    for i in range(250, ids.shape[1]):
        own = None if mask is None else mask[:, i : i + 1]
        logits.append(step(ids[:, i : i + 1], attention_mask=own, **{name: cache}).logits)
    return torch.cat(logits, 1)


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", {}),  # passes a block boundary, where a block is allocated and one is converted
        ("llama", {"window_size": 100, "sink_tokens": 2}),
        ("qwen2-mixed-window", {"cache_bits": 4, "block_size": 64}),
    ],
)
def test_one_graph_serves_every_length_and_cache(family, config):
    model = omlx_cache.patch(tiny_model(family), **config)
    ids = random_ids(2, 400)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    want = decode(model, model, omlx_cache.PagedCache(model), ids, mask)
    step = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        got = decode(model, step, omlx_cache.PagedCache(model), ids, mask)
        torch.testing.assert_close(got, want)
    assert number_of_graphs() == 1


def test_inductor():
    model = omlx_cache.patch(tiny_model(num_hidden_layers=1))
    ids = random_ids(1, 270)
    want = decode(model, model, omlx_cache.PagedCache(model), ids)
    step = torch.compile(model, fullgraph=True)
    got = decode(model, step, omlx_cache.PagedCache(model), ids)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    assert number_of_graphs() == 1


def test_generate_compiles_by_itself_for_a_cache_of_the_callers():
    model, ids = omlx_cache.patch(tiny_model()), random_ids(2, 250)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    wanted = {"attention_mask": mask, "max_new_tokens": 30, "do_sample": False}
    how = CompileConfig(backend="aot_eager", mode="default", fullgraph=True)
    how._compile_all_devices = True  # transformers compiles by itself on accelerators only
    want = model.generate(ids, compile_config=how, **wanted)
    assert not number_of_graphs()
    for _ in range(2):
        cache = omlx_cache.PagedCache(model)
        assert cache.is_compileable
        given = {cache_name(type(model).forward): cache, "compile_config": how}
        assert torch.equal(model.generate(ids, **given, **wanted), want)
    assert number_of_graphs() == 1


def test_the_masks_of_generate_are_its_own():
    model = omlx_cache.patch(tiny_model())
    mask = torch.ones(1, 300, dtype=torch.long)
    one, many = torch.empty(1, 1, 0), torch.empty(1, 5, 0)
    kwargs = {"attention_mask": mask}
    assert model.create_masks_for_generate(inputs_embeds=one, **kwargs).shape == (1, 1)
    assert model.create_masks_for_generate(inputs_embeds=many, **kwargs) is mask
    first = model.create_masks_for_generate(inputs_embeds=one, is_first_iteration=True, **kwargs)
    assert first is mask, "the first mask of a call tells what of the past is padding"
    omlx_cache.unpatch(model)
    assert "create_masks_for_generate" not in vars(model)


def test_an_error_in_the_graph_leaves_the_cache_as_it_was(monkeypatch):
    model, ids = omlx_cache.patch(tiny_model()), random_ids(1, 300)
    name = cache_name(type(model).forward)
    step = torch.compile(model, backend="aot_eager", fullgraph=True)
    cache = omlx_cache.PagedCache(model)
    want = decode(model, step, omlx_cache.PagedCache(model), ids)
    decode(model, step, cache, ids[:, :280])
    calls = []
    attend = ops.paged_attention

    def fail_in_the_second_layer(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return attend(*args, **kwargs)

    monkeypatch.setattr(ops, "paged_attention", fail_in_the_second_layer)
    with pytest.raises(KeyboardInterrupt):
        step(ids[:, 280:281], attention_mask=None, **{name: cache})
    assert cache.get_seq_length() == 280
    cache.crop(0)
    assert not cache.steps.is_running
    feed = {"attention_mask": None, name: cache}
    got = [step(ids[:, i : i + 1], **feed).logits for i in range(280, 300)]
    torch.testing.assert_close(torch.cat(got, 1), want[:, 30:])


def test_a_full_pool_is_said_through_the_graph():
    model, ids = omlx_cache.patch(tiny_model(), max_gpu_blocks=1), random_ids(1, 300)
    step = torch.compile(model, backend="aot_eager", fullgraph=True)
    cache = omlx_cache.PagedCache(model)
    with pytest.raises(omlx_cache.OutOfBlocksError):
        decode(model, step, cache, ids)
    assert cache.get_seq_length() == 256 + 4


def test_without_a_cache_the_graph_breaks_and_says_why():
    model, ids = omlx_cache.patch(tiny_model(), cache_bits=16), random_ids(1, 40)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"cache=omlx_cache\.PagedCache"):
        torch.compile(model, backend="eager", fullgraph=True)(ids)
    with torch._dynamo.config.patch(error_on_recompile=False):
        got = torch.compile(model, backend="eager")(ids).logits
    torch.testing.assert_close(got, model(ids).logits)


def test_backward_is_refused_in_the_graph():
    model, ids = omlx_cache.patch(tiny_model()), random_ids(1, 20)
    cache = omlx_cache.PagedCache(model)
    step = torch.compile(model, backend="aot_eager", fullgraph=True)
    refused = pytest.raises(RuntimeError, match=r"backward through omlx_cache\.attend")
    with torch.enable_grad(), refused:
        step(ids, **{cache_name(type(model).forward): cache}).logits.sum().backward()


def test_a_handle_keeps_no_cache_alive():
    cache = omlx_cache.PagedCache(omlx_cache.patch(tiny_model()))
    number, gone = int(cache.handle), weakref.ref(cache)
    assert compiled._caches[number] is cache
    del cache
    gc.collect()
    assert gone() is None
    assert number not in compiled._caches
