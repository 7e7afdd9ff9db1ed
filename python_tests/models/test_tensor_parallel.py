"""Tensor parallel through transformers' ``tp_plan="auto"``: two processes, one text."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensor_parallel_worker import results
from tiny import tiny_model

HEADS = {"llama": 1, "qwen2": 1, "gemma2": 1, "gpt-oss": 2}
"""Family: the key heads, of two, that a rank caches. transformers repeats GPT-OSS' attention."""

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    """What each of two gloo processes found."""
    pytest.importorskip("accelerate", reason="transformers needs it to place a model")
    folder = tmp_path_factory.mktemp("models")
    for family in HEADS:
        tiny_model(family).save_pretrained(folder / family)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    worker = Path(__file__).with_name("tensor_parallel_worker.py")
    done = subprocess.run(
        [*command, str(worker), str(folder)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("family", HEADS)
def test_two_processes_say_what_one_says(ranks, family):
    want = results(tiny_model(family))
    assert want["heads"] == 2
    for rank in ranks:
        got = rank[family]
        assert got["heads"] == HEADS[family]
        for mode in ("greedy", "beams"):
            assert torch.equal(got["stock"][mode], want["stock"][mode])
            assert torch.equal(got["patched"][mode], want["stock"][mode])
        torch.testing.assert_close(got["logits"], want["logits"], rtol=1e-3, atol=1e-3)
