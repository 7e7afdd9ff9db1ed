"""Models that accelerate has spread over devices, and models with adapters."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import greedy, left_padded, random_ids, tiny_model

import omlx_cache
from omlx_cache.step_tables import StepTables
from omlx_kernels import ops

EXACT = {"cache_bits": 16, "block_size": 64, "prefill_chunk": 48}
INPUTS = left_padded(random_ids(2, 130), [130, 40])


@pytest.fixture
def accelerate():
    return pytest.importorskip("accelerate", reason="needs the extra dev")


def spread(accelerate, model, folder, rest="disk"):
    """Keep the last layer's weights on ``rest`` while it doesn't run."""
    last = len(model.model.layers) - 1
    names = ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"]
    device_map = dict.fromkeys(names, "cpu") | {f"model.layers.{i}": "cpu" for i in range(last)}
    device_map[f"model.layers.{last}"] = rest
    return accelerate.dispatch_model(model, device_map, main_device="cpu", offload_dir=str(folder))


@pytest.mark.parametrize("family", ["llama", "gpt-oss", "gemma3"])
@pytest.mark.parametrize("patched_first", [False, True])
def test_weights_on_disk(accelerate, tmp_path, family, patched_first):
    """GPT-OSS' learned sinks are parameters of the very module that is replaced."""
    model = tiny_model(family)
    want = greedy(model, INPUTS, 10)
    if patched_first:
        omlx_cache.patch(model, **EXACT)
    model = spread(accelerate, model, tmp_path)
    assert model.model.layers[-1].self_attn.q_proj.weight.is_meta
    omlx_cache.patch(model, **EXACT)
    assert torch.equal(greedy(model, INPUTS, 10), want)
    omlx_cache.unpatch(model)
    assert torch.equal(greedy(model, INPUTS, 10), want)
    assert model.model.layers[-1].self_attn.q_proj.weight.is_meta


def test_all_weights_come_and_go(accelerate):
    model = tiny_model()
    want = greedy(model, INPUTS, 10)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    omlx_cache.patch(model, **EXACT)
    assert torch.equal(greedy(model, INPUTS, 10), want)


class Spy:
    """A hook of accelerate that counts its calls."""

    def __init__(self, accelerate):
        class Hook(accelerate.hooks.ModelHook):
            calls = 0

            def pre_forward(self, module, *args, **kwargs):
                Hook.calls += 1
                return args, kwargs

        self.hook = Hook()

    def add_to(self, accelerate, module, append=False):
        accelerate.hooks.add_hook_to_module(module, self.hook, append=append)

    def taken(self):
        """Return how often it was called since this was asked last."""
        calls, type(self.hook).calls = type(self.hook).calls, 0
        return calls


def spied_modules(model):
    return {"model": model, "decoder": model.model, "attention": model.model.layers[0].self_attn}


@pytest.mark.parametrize("where", ["model", "decoder", "attention"])
def test_a_hook_that_is_added_to_a_patched_model_outlives_unpatch(accelerate, where):
    model, spy = tiny_model(), Spy(accelerate)
    want = greedy(model, INPUTS, 5)
    omlx_cache.patch(model, **EXACT)
    spy.add_to(accelerate, spied_modules(model)[where])
    assert torch.equal(greedy(model, INPUTS, 5), want)
    assert spy.taken() > 0
    omlx_cache.unpatch(model)
    assert torch.equal(greedy(model, INPUTS, 5), want)
    assert spy.taken() > 0
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    assert torch.equal(greedy(model, INPUTS, 5), want)
    assert spy.taken() == 0


@pytest.mark.parametrize("append", [False, True])
def test_hooks_that_are_exchanged_on_a_patched_model(accelerate, append):
    """The cache serves the model whichever hooks come and go, and unpatch brings none back."""
    model, first, second = tiny_model(), Spy(accelerate), Spy(accelerate)
    want = greedy(model, INPUTS, 5)
    first.add_to(accelerate, model.model)
    omlx_cache.patch(model, **EXACT)
    assert torch.equal(greedy(model, INPUTS, 5), want)
    assert first.taken() > 0
    second.add_to(accelerate, model.model, append=append)
    assert torch.equal(greedy(model, INPUTS, 5), want)
    assert (first.taken() > 0) is append
    assert second.taken() > 0
    accelerate.hooks.remove_hook_from_module(model.model)
    assert torch.equal(greedy(model, INPUTS, 5), want)
    assert omlx_cache.report(model).seen_tokens > 0
    omlx_cache.unpatch(model)
    assert torch.equal(greedy(model, INPUTS, 5), want)
    assert first.taken() == second.taken() == 0
    omlx_cache.patch(model, **EXACT)
    assert torch.equal(greedy(model, INPUTS, 5), want)


def test_all_weights_of_a_patched_model_come_and_go(accelerate):
    model = tiny_model()
    want = greedy(model, INPUTS, 10)
    omlx_cache.patch(model, **EXACT)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.model.layers[0].self_attn.q_proj.weight.is_meta
    assert torch.equal(greedy(model, INPUTS, 10), want)
    omlx_cache.unpatch(model)
    assert torch.equal(greedy(model, INPUTS, 10), want)
    assert model.model.layers[0].self_attn.q_proj.weight.is_meta
    accelerate.hooks.remove_hook_from_submodules(model)
    assert torch.equal(greedy(model, INPUTS, 10), want)
    assert not model.model.layers[0].self_attn.q_proj.weight.is_meta


def test_unpatch_refuses_to_drop_a_wrapper_of_another():
    model = tiny_model()
    want = greedy(model, INPUTS, 5)
    omlx_cache.patch(model, **EXACT)
    inner = model.model.forward
    model.model.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    with pytest.raises(RuntimeError, match=r"LlamaModel\.forward must be as patch left it"):
        omlx_cache.unpatch(model)
    assert torch.equal(greedy(model, INPUTS, 5), want)  # still patched
    assert omlx_cache.report(model).seen_tokens > 0
    model.model.forward = inner
    omlx_cache.unpatch(model)
    assert torch.equal(greedy(model, INPUTS, 5), want)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a second device: CUDA")
def test_layers_on_two_devices(accelerate, tmp_path):
    model = tiny_model()
    want = greedy(model, INPUTS, 10)
    model = spread(accelerate, model, tmp_path, rest=0)
    omlx_cache.patch(model, **EXACT)
    assert torch.equal(greedy(model, INPUTS, 10), want)


def test_each_layer_keeps_its_blocks_on_the_device_of_its_keys(monkeypatch):
    """A step's tables go to each device once; no op gets tensors of two devices."""
    devices, built = [], []

    def op(x, *args, **kwargs):
        held = [x, *args, *kwargs.values()]
        held += [part for y in held if hasattr(y, "seq_lens") for part in vars(y).values()]
        held += [tier for y in held if hasattr(y, "hot") for tier in vars(y).values()]
        held += [part for y in held if hasattr(y, "tensors") for part in y.tensors().values()]
        found = {y.device.type for y in held if isinstance(y, torch.Tensor)}
        assert len(found) == 1
        devices.append(found.pop())
        return x

    build = StepTables._build

    def spy(tables, device):
        built.append(device.type)
        return build(tables, device)

    monkeypatch.setattr(StepTables, "_build", spy)
    for name in ("append_kv", "convert_blocks", "paged_attention"):
        monkeypatch.setattr(ops, name, op)
    model = omlx_cache.patch(tiny_model(num_hidden_layers=4), block_size=64, recent_tokens=0)
    cache = omlx_cache.PagedCache(model)
    with cache.step(np.ones((1, 200), bool)):
        for layer, device in zip(cache.layers, ("cpu", "cpu", "meta", "meta"), strict=True):
            q, kv = (torch.zeros(n, 1, 4 // n, 200, 16, device=device) for n in (1, 2))
            layer.update(*kv)
            assert layer.attend(q[0], *kv, sm_scale=0.25).device.type == device
            assert layer.pool.blocks.hot.k.device.type == device
    assert built == ["cpu", "meta"]
    assert set(devices) == {"cpu", "meta"}


def test_an_adapter_that_is_added_and_merged_later():
    peft = pytest.importorskip("peft", reason="needs the extra dev")
    config = peft.LoraConfig(
        target_modules=["q_proj", "k_proj", "v_proj"],
        task_type="CAUSAL_LM",
        init_lora_weights=False,
    )
    want = [greedy(tiny_model(), INPUTS, 10)]
    want.append(greedy(peft.get_peft_model(tiny_model(), config), INPUTS, 10))
    assert not torch.equal(*want)
    # tiny_model sets the seed: both adapters are the same.
    adapted = peft.get_peft_model(omlx_cache.patch(tiny_model(), **EXACT), config)
    assert torch.equal(greedy(adapted, INPUTS, 10), want[1])
    with adapted.disable_adapter():
        assert torch.equal(greedy(adapted, INPUTS, 10), want[0])
    assert torch.equal(greedy(adapted.merge_and_unload(), INPUTS, 10), want[1])
