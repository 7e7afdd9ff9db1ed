"""The GPU script runs to its end, times nothing that is wrong, and says what it leaves out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from triton_device import INTERPRETED

pytest.importorskip("triton", reason="no triton for this platform")
sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

gpu_check = pytest.importorskip("gpu_check")
import gpu_correctness  # noqa: E402 -- lies in bench/
import gpu_end_to_end  # noqa: E402
import op_checks  # noqa: E402
import typer  # noqa: E402

from omlx_kernels import ops  # noqa: E402

CPU = torch.device("cpu")
FOREVER = float("inf")
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="tiny sizes are for the interpreter")


def test_it_runs_to_the_end(tmp_path, monkeypatch):
    used = []
    triton_attention = ops.paged_attention
    monkeypatch.setattr(
        op_checks.ops,
        "paged_attention",
        lambda *args, **kwargs: (
            used.append(ops.implementation(CPU).__name__) or triton_attention(*args, **kwargs)
        ),
    )
    out = tmp_path / "gpu_check.json"
    gpu_check.main(tiny=True, budget_s=480, out=out)
    result = json.loads(out.read_text())
    assert {check["result"] for check in result["checks"]} == {"ok"}
    assert {check["op"] for check in result["checks"]} >= {"append_kv", "decode", "extend"}
    timed = {(row["op"], row["contender"]) for row in result["timings"] if row["ms"] > 0}
    extend = set(gpu_check.CONTENDERS) - {"per-token int8"}
    assert timed == {("decode", c) for c in gpu_check.CONTENDERS} | {("extend", c) for c in extend}
    assert result["machine"]["commit"]
    model = result["end_to_end"]
    assert model["reason"] == ""
    assert model["weights"] in ("GPTQ 4-bit", "bfloat16")
    assert model["why"]
    names = {row["contender"] for row in model["rows"] if row["decode_tokens_per_s"] > 0}
    assert names == set(gpu_end_to_end.contenders(tiny=True))
    assert set(used) == {"omlx_kernels.triton"}


def test_what_is_wrong_is_not_timed(monkeypatch):
    def wrong():
        raise AssertionError("off by one")

    def broken():
        raise RuntimeError("no such kernel")

    todo = [
        ("decode", "good", lambda: None),
        ("decode", "bad", wrong),
        ("extend", "breaks", broken),
        ("append_kv", "good", lambda: None),
    ]
    checks = gpu_correctness.run(todo, FOREVER)
    assert [check["result"] for check in checks] == ["ok", "WRONG", "FAILED", "ok"]
    assert gpu_correctness.sound_ops(checks) == {"append_kv"}
    monkeypatch.setattr(gpu_check, "median_ms", lambda run, device: 1.0)
    rows = list(gpu_check.measure(gpu_check.timings(82, tiny=True), set(), CPU, FOREVER))
    assert {row["contender"] for row in rows if row["ms"]} == {"sdpa", "copy"}
    assert all(row["reason"] for row in rows if not row["ms"])


def test_out_of_time_is_said():
    assert gpu_correctness.run([("decode", "late", lambda: None)], 0.0)[0]["result"] == "skipped"
    rows = list(gpu_check.measure(gpu_check.timings(82, tiny=True), {"decode"}, CPU, 0.0))
    assert "out of time" in {row["reason"] for row in rows}
    assert not any(row["ms"] for row in rows)


def test_the_interpreter_needs_tiny_sizes(tmp_path):
    with pytest.raises(typer.BadParameter, match="--tiny"):
        gpu_check.main(tiny=False, budget_s=1, out=tmp_path / "gpu_check.json")
