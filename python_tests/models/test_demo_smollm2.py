"""The demo, and what it prepares, on the real model."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from omlx_cache.tools.demo import app
from omlx_cache.tools.loading import load_model
from omlx_cache.tools.texts import token_ids

pytestmark = pytest.mark.real_model

WORST_PERPLEXITY = {"smollm2_path": 22.0, "smollm2_gptq_path": 28.0}


@pytest.mark.parametrize("which", sorted(WORST_PERPLEXITY))
def test_the_prepared_model_reads_english(which: str, smollm2_tokenizer, request):
    """A wrong conversion (a transposed weight, a shifted zero) gives hundreds or more."""
    model = load_model(request.getfixturevalue(which), device="cpu")
    ids = torch.tensor([token_ids("quality", smollm2_tokenizer, 1024)])
    with torch.no_grad():
        logits = model(ids).logits[0, :-1].float()
    perplexity = torch.nn.functional.cross_entropy(logits, ids[0, 1:]).exp().item()
    assert perplexity < WORST_PERPLEXITY[which]


def test_the_prepared_models_are_what_they_say(smollm2_path, smollm2_gptq_path, smollm2_tokenizer):
    plain = load_model(smollm2_path, device="cpu")
    quantized = load_model(smollm2_gptq_path, device="cpu")
    assert plain.dtype == torch.float32
    assert isinstance(plain.model.layers[0].self_attn.q_proj, torch.nn.Linear)
    assert quantized.dtype == torch.bfloat16
    assert quantized.config.quantization_config.bits == 4
    assert quantized.config.quantization_config.group_size == 64
    assert not isinstance(quantized.model.layers[0].self_attn.q_proj, torch.nn.Linear)
    assert "<|im_start|>assistant" in smollm2_tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )


def test_the_demo_past_2048_tokens(smollm2_gptq_path: Path, tmp_path: Path):
    """The default model, without ``--model``: the fixture has prepared what the demo looks for.

    One thread: on a shared machine two that wait for each other are many times slower.
    """
    out = tmp_path / "demo.json"
    options = ["--turns", "4", "--answer-tokens", "12", "--device", "cpu"]
    result = CliRunner().invoke(app, [*options, "--threads", "1", "--json", str(out)])
    assert result.exit_code == 0, result.output
    assert "quantizing" not in result.output
    report = json.loads(out.read_text())
    stock, patched = report["stock"]["summary"], report["patched"]["summary"]
    assert report["patched"]["turns"][-1]["context_tokens"] > 2048
    assert patched["cache_end_bytes"] < stock["cache_end_bytes"]
    # As often as the stock model agrees with itself when it computes the same in another order,
    # give or take a few near-ties.
    assert patched["same"]["same"] >= stock["same"]["same"] - 4
