"""An auto-gptq checkpoint through the maintained engines: transformers + gptqmodel, and GPTQModel.

Each must give the logits of the dequantized weights, within what the dtype of its kernels allows.
"""

import copy

import pytest
import torch
from gptq_checkpoint import (
    AUTO_GPTQ_BASENAME,
    VOCAB_SIZE,
    allowed_error,
    as_transformers_checkpoint,
    relative_error,
    write_auto_gptq_checkpoint,
)
from safetensors.torch import load_file

from omlx_cache.unwrap import gptq_bits, unwrap

INPUT_IDS = torch.randint(2, VOCAB_SIZE, (2, 40), generator=torch.Generator().manual_seed(0))
DESC_ACT = pytest.mark.parametrize("desc_act", [False, True], ids=["plain", "desc_act"])
SYM = pytest.mark.parametrize("sym", [True, False], ids=["sym", "asym"])


@pytest.fixture
def checkpoint(tmp_path):
    """Return a function that writes a checkpoint for transformers: its folder and its twin."""

    def write(**options):
        source, destination = tmp_path / "auto-gptq", tmp_path / "transformers"
        source.mkdir()
        destination.mkdir()
        twin = write_auto_gptq_checkpoint(source, **options)
        as_transformers_checkpoint(source, destination)
        return destination, twin

    return write


@pytest.fixture
def gptqmodel():
    return pytest.importorskip("gptqmodel", reason="needs gptqmodel: pip install omlx_cache[gptq]")


def quant_linears(model):
    return [module for module in model.modules() if hasattr(module, "qweight")]


def check_logits(model, twin):
    """Check the logits against the twin, in the dtype that the quantized layers compute in."""
    layers = quant_linears(model)
    assert len(layers) == 14, "every projection of both layers must be quantized"
    with torch.no_grad():
        logits = model(input_ids=INPUT_IDS).logits
    allowed = allowed_error(twin, INPUT_IDS, layers[0].scales.dtype)
    assert relative_error(logits, twin, INPUT_IDS) <= allowed


@SYM
@DESC_ACT
def test_the_written_tensors_mean_the_twins_weights(tmp_path, desc_act, sym):
    """Unpack by the formula of the format, with no reader involved."""
    twin = write_auto_gptq_checkpoint(tmp_path, desc_act=desc_act, sym=sym)
    state = load_file(tmp_path / f"{AUTO_GPTQ_BASENAME}.safetensors")
    shifts = torch.arange(0, 32, 4)
    for name, parameter in twin.model.layers.named_parameters(prefix="model.layers"):
        if not name.endswith("proj.weight"):
            assert torch.equal(state[name].float(), parameter)
            continue
        qweight, qzeros, scales, g_idx = (
            state[name.replace("weight", part)] for part in ("qweight", "qzeros", "scales", "g_idx")
        )
        codes = (qweight.unsqueeze(1) >> shifts.view(1, -1, 1) & 15).flatten(0, 1)
        zeros = (qzeros.unsqueeze(-1) >> shifts & 15).flatten(1) + 1
        expected = scales.float()[g_idx] * (codes - zeros[g_idx])
        assert torch.equal(parameter, expected.T)
        assert (g_idx.diff() < 0).any() == desc_act


def test_the_tolerance_sees_one_projection_with_zeros_off_by_one(tmp_path):
    """Reading v1 as v2 shifts a weight by one scale; in a single layer it must be noticed."""
    twin = write_auto_gptq_checkpoint(tmp_path)
    state = load_file(tmp_path / f"{AUTO_GPTQ_BASENAME}.safetensors")
    wrong = copy.deepcopy(twin)
    projection = "model.layers.1.self_attn.v_proj"
    shift = state[f"{projection}.scales"].float()[state[f"{projection}.g_idx"]].T
    wrong.get_submodule(projection).weight.data += shift
    with torch.no_grad():
        error = relative_error(wrong(INPUT_IDS).logits, twin, INPUT_IDS)
    assert error > 2 * allowed_error(twin, INPUT_IDS, torch.bfloat16)


@SYM
@DESC_ACT
@pytest.mark.parametrize("dtype", [None, torch.float32], ids=["own_dtype", "float32"])
def test_through_transformers(gptqmodel, checkpoint, dtype, desc_act, sym):
    pytest.importorskip("optimum", reason="needs optimum: pip install omlx_cache[gptq]")
    from transformers import AutoModelForCausalLM

    folder, twin = checkpoint(desc_act=desc_act, sym=sym)
    options = {} if dtype is None else {"dtype": dtype}
    model = AutoModelForCausalLM.from_pretrained(folder, device_map="cpu", **options)
    assert unwrap(model) is model
    assert gptq_bits(model) == 4
    check_logits(model, twin)


@DESC_ACT
def test_through_gptqmodel(gptqmodel, checkpoint, desc_act):
    folder, twin = checkpoint(desc_act=desc_act)
    model = gptqmodel.GPTQModel.load(str(folder), device="cpu")
    causal_lm = unwrap(model)
    assert causal_lm is model.model
    assert type(causal_lm).__name__ == "LlamaForCausalLM"
    assert gptq_bits(model) == gptq_bits(causal_lm) == 4
    check_logits(causal_lm, twin)
