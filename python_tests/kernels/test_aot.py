"""The compile proof's own tests: its rules can fail, and kernels go through it as launched.

The proof itself is ``make aot`` (`bench/aot.py`), which prints its table.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="no triton for this platform")
sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

aot = pytest.importorskip("aot")
import budgets  # noqa: E402 -- lies in bench/
from compile_proof import Report, Tile  # noqa: E402

GOOD = Report(
    name="_paged_decode_kernel",
    arch=86,
    num_warps=4,
    num_stages=3,
    registers=168,
    spills=0,
    shared=40000,
    instructions=Counter(
        {"HMMA.16816.F32": 64, "LDGSTS.E.BYPASS.128": 20, "LDG.E.128": 4, "LDG.E": 9}
    ),
    tiles=(Tile(16384, 128), Tile(2048, 64)),
)
WORKLOAD = aot.Workload(128, "fp16")


def with_instructions(**counts: int) -> Report:
    """Return the good report with some instructions added (underscores for dots)."""
    more = {name.replace("_", "."): count for name, count in counts.items()}
    return replace(GOOD, instructions=GOOD.instructions + Counter(more))


def test_a_good_kernel_has_no_problems():
    assert not list(budgets.problems(GOOD, WORKLOAD))
    assert GOOD.programs_per_sm == 2


@pytest.mark.parametrize(
    ("report", "message"),
    [
        (replace(GOOD, spills=3), "3 spills"),
        (replace(GOOD, shared=100 * 1024), "99 KiB allowed"),
        (replace(GOOD, instructions=Counter({"LDGSTS.E.128": 2})), "no tensor-core"),
        (replace(GOOD, instructions=Counter({"HMMA": 2})), "not pipelined"),
        (replace(GOOD, tiles=(Tile(16384, 32),)), "16384 bytes is copied 32 bits at once"),
        (replace(GOOD, tiles=(Tile(16384, 64),)), "no tile is copied 128 bits"),
        (with_instructions(LDG_E_U8=1), "synchronous load of 8 or 16"),
        (with_instructions(I2F_U8=7), "7 slow integer-to-float"),
        (
            replace(GOOD, name="_copy_blocks_kernel", instructions=Counter({"LDG.E": 3})),
            "no load is wider than 32 bits",
        ),
    ],
)
def test_rules_can_fail(report, message):
    assert message in "; ".join(budgets.problems(report, WORKLOAD))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"registers": 177}, "177 registers, budget 168"),
        ({"shared": 40001}, "40001 bytes of shared memory, budget 40000"),
        ({"num_warps": 16}, "0 programs a multiprocessor, budget 2"),
        ({"instructions": Counter({"LDG.E.128": 24})}, "no tensor-core instruction, budget 64"),
        ({"tiles": (Tile(16384, 32),)}, "32 bits at once, budget 64"),
    ],
)
def test_a_regression_is_named(change, message):
    budget = budgets.figures(GOOD)
    assert not list(budgets.regressions(GOOD, budget))
    assert message in "; ".join(budgets.regressions(replace(GOOD, **change), budget))


def test_accepting_keeps_what_was_not_compiled(tmp_path, monkeypatch):
    monkeypatch.setattr(budgets, "FOLDER", tmp_path)
    assert budgets.read("9.9.9") is None
    budgets.write({"a": {"registers": 1}, "c": {"registers": 2}}, "9.9.9")
    budgets.write({"b": {"registers": 3}, "c": {"registers": 4}}, "9.9.9")
    got = {key: row["registers"] for key, row in budgets.read("9.9.9").items()}
    assert list(got.items()) == [("a", 1), ("b", 3), ("c", 4)]


def test_ci_compiles_every_architecture_head_dim_kind_and_dtype():
    jobs = list(aot.ci_matrix())
    attend = [job for job in jobs if job.query_lens]
    assert {job.arch for job in attend} == set(aot.ARCHS)
    assert {job.workload.dtype for job in attend} == set(aot.DTYPES)
    assert {job.workload.heads for job in attend} == set(aot.HEADS)
    assert len(attend) < len(jobs), "the ops that write are in it"
    full = {job.workload.head_dim for job in aot.full_matrix() if job.query_lens}
    assert full == set(aot.HEAD_DIMS)


@pytest.mark.aot
def test_launches_are_compiled_with_their_real_arguments():
    found = aot.Job(86, aot.Workload(64, "fp16", options=True), (1, 16)).run()
    assert [report.name for _, report in found] == [
        "_paged_decode_kernel",
        "_merge_splits_kernel",
        "_paged_extend_kernel",
    ]
    assert not [w for _, report in found for w in budgets.problems(report, WORKLOAD)]
    decode, _, extend = (report for _, report in found)
    assert decode.num_warps == extend.num_warps == 4, "64 rows of 64 channels need no more"
    assert min(tile.bits for tile in decode.tiles) == 128


@pytest.mark.aot
def test_log_sums_spill_nothing():
    workload = aot.Workload(64, "fp16", options=True)

    def launch() -> None:
        for queries in (1, 16):
            q = torch.zeros(queries, aot.HEADS["gqa"][0], 64, dtype=torch.float16)
            options = workload.all_options(q) | {"lse": torch.zeros(q.shape[:2])}
            aot.kernels.paged_attention(
                q, workload.blocks(), aot.tables(queries), sm_scale=1.0, **options
            )

    found = aot.reports(86, launch)
    assert len(found) == 3
    assert not [w for report in found for w in budgets.problems(report, workload)]
