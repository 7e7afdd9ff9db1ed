"""auto-gptq 0.7.1 under transformers 5: the compatibility module, loading, logits, generation."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gptq_checkpoint import (
    AUTO_GPTQ_BASENAME,
    VOCAB_SIZE,
    allowed_error,
    quantize_linear,
    relative_error,
    write_auto_gptq_checkpoint,
)
from safetensors.torch import load_file

from omlx_cache import auto_gptq_compat
from omlx_cache.unwrap import gptq_bits, unwrap

ROOT = Path(__file__).parents[2]
INPUT_IDS = torch.randint(2, VOCAB_SIZE, (2, 40), generator=torch.Generator().manual_seed(0))


def run_python(script):
    """Run a script in a fresh interpreter that finds the packages of this checkout."""
    return subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.fixture
def auto_gptq(monkeypatch):
    """The module, imported through `enable`; undoes what `from_quantized` does to torch.nn.init."""
    if importlib.util.find_spec("auto_gptq") is None:
        pytest.skip("needs auto-gptq: pip install omlx_cache[auto-gptq]")
    for name in ("normal_", "uniform_", "kaiming_uniform_"):
        monkeypatch.setattr(torch.nn.init, name, getattr(torch.nn.init, name))
    auto_gptq_compat.enable()
    import auto_gptq

    return auto_gptq


@pytest.fixture
def load(auto_gptq, tmp_path):
    """Return a function that writes a checkpoint and gives auto-gptq's model of it and its twin."""

    def load(dtype=torch.float32, **options):
        twin = write_auto_gptq_checkpoint(tmp_path, **options)
        loader = auto_gptq.AutoGPTQForCausalLM.from_quantized
        return loader(str(tmp_path), device="cpu", torch_dtype=dtype), twin

    return load


@pytest.mark.parametrize("tie_word_embeddings", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("sym", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("desc_act", [False, True], ids=["plain", "desc_act"])
def test_logits_equal_those_of_the_dequantized_weights(load, desc_act, sym, tie_word_embeddings):
    model, twin = load(desc_act=desc_act, sym=sym, tie_word_embeddings=tie_word_embeddings)
    with torch.no_grad():
        logits = model(input_ids=INPUT_IDS).logits
    assert logits.dtype == torch.float32
    error, allowed = (
        relative_error(logits, twin, INPUT_IDS),
        allowed_error(twin, INPUT_IDS, torch.float32),
    )
    assert error <= allowed


def test_float32_generation_on_a_cpu_equals_the_dequantized_model(load):
    model, twin = load()
    options = {"max_new_tokens": 24, "do_sample": False}
    expected = twin.generate(INPUT_IDS, **options)
    assert torch.equal(unwrap(model).generate(INPUT_IDS, **options), expected)
    # The wrapper's own generate is under bf16 autocast, so only its shape is known.
    assert model.generate(input_ids=INPUT_IDS, **options).shape == expected.shape


def test_unwrap_and_bits(load):
    model, _ = load()
    causal_lm = unwrap(model)
    assert causal_lm is model.model
    assert type(causal_lm).__name__ == "LlamaForCausalLM"
    assert gptq_bits(model) == 4
    assert gptq_bits(causal_lm) == 4


def test_bits_come_from_the_wrapper_where_config_json_has_none(load):
    model, _ = load()
    del model.model.config.quantization_config
    assert gptq_bits(model) == 4
    assert gptq_bits(model.model) is None


def test_the_test_checkpoint_is_what_auto_gptq_saves(load, tmp_path):
    model, _ = load(dtype=torch.float16)
    saved = tmp_path / "saved"
    model.save_quantized(str(saved))
    name = f"{AUTO_GPTQ_BASENAME}.safetensors"
    ours, theirs = load_file(tmp_path / name), load_file(saved / name)
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        assert tensor.dtype == theirs[key].dtype, key
        assert torch.equal(tensor, theirs[key]), key
    settings = [json.loads((d / "quantize_config.json").read_text()) for d in (tmp_path, saved)]
    assert settings[0].keys() == settings[1].keys()


@pytest.mark.parametrize("sym", [True, False], ids=["sym", "asym"])
def test_packing_is_auto_gptqs(auto_gptq, sym):
    from auto_gptq.nn_modules.qlinear.qlinear_cuda import QuantLinear

    generator = torch.Generator().manual_seed(2)
    g_idx = (torch.arange(96) // 32)[torch.randperm(96, generator=generator)]
    weight = torch.randn(64, 96, generator=generator)
    tensors, dequantized = quantize_linear(weight, g_idx, sym=sym)
    shifts = torch.arange(0, 32, 4)
    zeros = (tensors["qzeros"].unsqueeze(-1) >> shifts & 15).flatten(1) + 1  # [groups, out]
    linear = torch.nn.Linear(96, 64, bias=False)
    linear.weight.data = dequantized
    theirs = QuantLinear(4, 32, 96, 64, bias=False, weight_dtype=torch.float32)
    theirs.pack(linear, tensors["scales"].float().T, zeros.float().T, g_idx)
    for part in ("qweight", "qzeros", "g_idx"):
        assert torch.equal(getattr(theirs, part), tensors[part]), part


def test_enable_works_after_a_failed_import_and_leaves_no_name_behind(auto_gptq):
    script = """
import importlib, sys
from omlx_cache import auto_gptq_compat
places = [(importlib.import_module(module), name) for module, name in auto_gptq_compat._MOVED]
before = [hasattr(*place) for place in places]
try:
    import auto_gptq
except ImportError:
    assert not all(before)
auto_gptq_compat.enable()
auto_gptq_compat.enable()
from auto_gptq import AutoGPTQForCausalLM
assert [hasattr(*place) for place in places] == before
print("done")
"""
    result = run_python(script)
    assert result.stdout.endswith("done\n"), result.stderr


def test_enable_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "auto_gptq", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install omlx_cache\[auto-gptq\]"):
        auto_gptq_compat.enable()


def test_enable_names_what_is_missing_and_the_versions(monkeypatch):
    monkeypatch.delitem(sys.modules, "auto_gptq", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    moved = {
        ("transformers.utils.hub", "gone_one"): ("huggingface_hub", "create_repo"),
        ("transformers.utils.hub", "gone_two"): ("huggingface_hub", "gone_three"),
    }
    monkeypatch.setattr(auto_gptq_compat, "_MOVED", moved)
    with pytest.raises(
        ImportError, match=r"huggingface_hub\.gone_three.* transformers \d"
    ) as error:
        auto_gptq_compat.enable()
    assert "omlx_cache[gptq]" in str(error.value)
    import transformers.utils.hub

    assert not hasattr(transformers.utils.hub, "gone_one"), "a failed enable must tidy up too"


def test_import_omlx_cache_leaves_it_alone():
    script = """
import sys, omlx_cache
print([name for name in ("omlx_cache.auto_gptq_compat", "auto_gptq") if name in sys.modules])
"""
    result = run_python(script)
    assert result.stdout == "[]\n", result.stderr
