"""The whole model of the GPU script: what is wrong is not timed, and what it ran on is said."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="no triton for this platform")
sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

gpu_end_to_end = pytest.importorskip("gpu_end_to_end")
import random_llama  # noqa: E402 -- lies in bench/

CPU = torch.device("cpu")
FOREVER = float("inf")
TINY = random_llama.config_of(tiny=True, max_tokens=200)


@pytest.fixture
def model():
    return random_llama.float_llama(TINY, CPU)


def rows_of(model, deadline: float = FOREVER) -> dict[str, dict]:
    rows = gpu_end_to_end.measure(model, (150,), 1, deadline, tiny=True)
    return {row["contender"]: row for row in rows}


@pytest.mark.parametrize(
    ("factor", "message"), [(2.0, "AssertionError: logits are"), (float("nan"), "logits are nan")]
)
def test_a_wrong_model_is_not_timed(model, factor, message, monkeypatch):
    attend = gpu_end_to_end.ops.paged_attention
    monkeypatch.setattr(
        gpu_end_to_end.ops, "paged_attention", lambda *args, **kw: attend(*args, **kw) * factor
    )
    rows = rows_of(model)
    assert rows.pop("DynamicCache")["decode_tokens_per_s"] > 0
    for row in rows.values():
        assert message in row["reason"]
        assert "decode_tokens_per_s" not in row
    assert gpu_end_to_end.failures({"reason": "", "rows": list(rows.values())})


def test_out_of_time_is_said_and_no_fault(model):
    rows = rows_of(model, time.monotonic() - 1)
    assert {row["reason"] for row in rows.values()} == {"out of time"}
    assert not gpu_end_to_end.failures({"reason": "", "rows": list(rows.values())})


def test_a_process_that_takes_too_long_is_stopped():
    found = gpu_end_to_end.in_own_process(0.1, tiny=True)
    assert found["reason"].startswith("out of time")
    assert found["rows"] == []


def test_without_gptqmodel_the_weights_are_bfloat16_and_it_says_why(monkeypatch):
    monkeypatch.setattr(random_llama, "find_spec", lambda name: None)
    model, weights, why = random_llama.random_llama(TINY, CPU)
    assert weights == "bfloat16"
    assert "gptqmodel isn't installed" in why
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_gptq_weights_are_four_bits_and_finite():
    pytest.importorskip("gptqmodel", reason="extra gptq is not installed")
    model, weights, why = random_llama.random_llama(TINY, CPU)
    assert weights == "GPTQ 4-bit"
    assert type(model.model.layers[0].mlp.down_proj).__name__ in why
    logits = model(torch.arange(100)[None]).logits
    assert logits.isfinite().all()
    assert logits.std() > 0.01


def test_too_little_memory_is_said_and_no_fault(monkeypatch, tmp_path):
    def full(*_):
        raise torch.OutOfMemoryError("13 GiB wanted")

    monkeypatch.setattr(gpu_end_to_end, "random_llama", full)
    gpu_end_to_end.main(tiny=True, budget_s=60, out=tmp_path / "rows.json")
    found = json.loads((tmp_path / "rows.json").read_text())
    assert found["reason"] == "memory: 13 GiB wanted"
    assert not gpu_end_to_end.failures(found)


def test_the_shape_is_llama_2_7b():
    config = random_llama.config_of(tiny=False, max_tokens=16384)
    with torch.device("meta"):
        model = random_llama.LlamaForCausalLM(config)
    assert sum(p.numel() for p in model.parameters()) == 6_738_415_616
    assert config.head_dim == 128
