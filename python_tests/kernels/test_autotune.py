"""Tuning: what is tried, in which order, what is kept, and what the compile proof prunes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="no triton for this platform")
BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

autotune = pytest.importorskip("autotune")
import tuning  # noqa: E402 -- lies in bench/
from compile_proof import Report  # noqa: E402
from tuning import Finished, Job  # noqa: E402

from omlx_kernels.launch import decode_config  # noqa: E402
from omlx_kernels.tuned_file import KEYS, load  # noqa: E402

TARGET = ("cuda", 86)
DECODE = Job("decode", (128, "float16", 4))
MADE_WITH = {"triton": "3.7.1", "torch": "2.13.0", "commit": "a5c413f"}
WORKLOADS = dict.fromkeys(KEYS, "a test")
FOREVER = float("inf")


@pytest.mark.parametrize("target", [TARGET, ("cuda", 90), ("hip", "gfx942")])
def test_candidates_begin_with_the_default_and_differ(target):
    for job in tuning.jobs(list(KEYS)):
        found = job.candidates(target)
        assert found[0] == job.default(target)
        assert len(found) == len(set(found)) > 1


def test_jobs_take_turns():
    found = autotune.in_turn([Job("convert", (128,)), DECODE], TARGET)
    assert [job.op for job, _ in found[:4]] == ["convert", "decode"] * 2
    assert {config for job, config in found if job is DECODE} == set(DECODE.candidates(TARGET))


GOOD = Report(
    name="_paged_decode_kernel",
    arch=86,
    num_warps=4,
    num_stages=3,
    registers=168,
    spills=0,
    shared=40000,
    instructions=Counter({"HMMA": 1, "LDGSTS.E.128": 4}),
)


@pytest.mark.parametrize(
    ("report", "objections"),
    [
        (GOOD, []),
        (replace(GOOD, spills=2), ["2 spills"]),
        (replace(GOOD, shared=100 * 1024), ["100 KiB of shared memory, 99 allowed"]),
        (replace(GOOD, instructions=Counter({"HMMA": 1})), ["no 128-bit asynchronous copies"]),
        (replace(GOOD, instructions=Counter({"FFMA": 1})), []),  # float32
    ],
)
def test_the_compile_proof_prunes(report, objections):
    assert tuning.objections([report], "decode") == objections


def try_all(path: Path, candidates, try_out, verdicts=None, deadline=FOREVER, made_with=MADE_WITH):
    """Run `autotune.tune` on what has no result yet; return the results and how many were tried."""
    finished = Finished(path, made_with)
    todo = [c for c in candidates if finished.get(*c) is None]
    verdicts = verdicts or [[] for _ in todo]
    return finished, autotune.tune(todo, verdicts, try_out, finished, deadline)


def test_the_fastest_that_is_right_is_kept(tmp_path):
    candidates = [(DECODE, config) for config in DECODE.candidates(TARGET)[:5]]
    tiles = [config for _, config in candidates]
    times = dict(zip(tiles, (4.0, 3.0, 1.0, 2.0, 0.5), strict=True))

    def try_out(job, config):
        if config == tiles[2]:
            raise AssertionError("wrong result")
        return times[config]

    verdicts = [[], [], [], [], ["3 spills"]]
    finished, tried = try_all(tmp_path / "gpu.jsonl", candidates, try_out, verdicts)
    assert tried == 5
    assert finished.get(DECODE, tiles[2]) == {"failed": "AssertionError: wrong result"}
    assert finished.get(DECODE, tiles[4]) == {"pruned": ["3 spills"]}
    assert tuning.best(DECODE, TARGET, finished) == (tiles[3], 2.0, 4.0)

    path = tmp_path / "gpu.json"
    found = list(tuning.entries([DECODE], TARGET, finished, WORKLOADS))
    autotune.write(path, tuning.content("A GPU", TARGET, MADE_WITH, found))
    assert load(path).tiles == {("decode", *DECODE.key): tiles[3]}
    assert json.loads(path.read_text())["entries"][0]["measured"]["default_ms"] == 4.0


def test_nothing_is_kept_without_the_defaults_time(tmp_path):
    candidates = [(DECODE, config) for config in DECODE.candidates(TARGET)[:2]]
    finished, _ = try_all(tmp_path / "gpu.jsonl", candidates, lambda *_: 1.0, [["spills"], []])
    assert list(tuning.entries([DECODE], TARGET, finished, WORKLOADS)) == []


def test_an_interrupted_run_goes_on(tmp_path):
    path = tmp_path / "gpu.jsonl"
    candidates = [(DECODE, config) for config in DECODE.candidates(TARGET)[:4]]
    seen = []

    def try_out(job, config):
        if len(seen) == 2:
            raise KeyboardInterrupt
        seen.append(config)
        return 1.0

    with pytest.raises(KeyboardInterrupt):
        try_all(path, candidates, try_out)
    with path.open("a") as file:
        file.write('{"candidate": "cut o')  # what an interrupt may leave
    _, tried = try_all(path, candidates, lambda *_: 2.0)
    assert tried == 2
    assert Finished(path, MADE_WITH).get(*candidates[1]) == {"ms": 1.0}
    assert Finished(path, MADE_WITH).get(*candidates[3]) == {"ms": 2.0}


@pytest.mark.parametrize(
    "other", [{"triton": "3.9.0"}, {"commit": "b7d0000"}, {"commit": "a5c413f+"}]
)
def test_results_of_other_code_are_tried_again(tmp_path, other):
    path, candidates = tmp_path / "gpu.jsonl", [(DECODE, DECODE.default(TARGET))]
    made_with = MADE_WITH | other
    assert try_all(path, candidates, lambda *_: 1.0, made_with=made_with)[1] == 1
    assert try_all(path, candidates, lambda *_: 1.0)[1] == 1
    again = int(made_with["commit"].endswith("+"))  # nobody knows which code that was
    assert try_all(path, candidates, lambda *_: 1.0, made_with=made_with)[1] == again


def test_the_budget_ends_a_run(tmp_path):
    candidates = [(DECODE, config) for config in DECODE.candidates(TARGET)[:2]]
    assert try_all(tmp_path / "gpu.jsonl", candidates, lambda *_: 1.0, deadline=0.0)[1] == 0


@pytest.mark.aot
def test_a_candidate_is_compiled_as_it_is_launched():
    tile = replace(decode_config(TARGET, 64, "float16", 4), num_warps=8)
    [report] = tuning.compile_reports(Job("decode", (64, "float16", 4)), tile, 86)
    assert (report.name, report.num_warps) == ("_paged_decode_kernel", 8)


@pytest.mark.aot
def test_a_dry_run_needs_no_gpu():
    command = [sys.executable, "bench/autotune.py", "--dry-run", "--op", "append"]
    done = subprocess.run(
        [*command, "--budget-s", "1", "--processes", "1"],
        cwd=BENCH.parent,
        env={name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "append kv_heads=8 block_d=64" in done.stdout
    assert "be checked and timed" in done.stdout
    assert "candidates would be timed" in done.stdout
