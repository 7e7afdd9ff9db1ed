"""What `bench/autotune.py` tries: jobs, candidates, what the compile proof says, what is kept.

A *job* is one entry of a tuned file: an op and a key. Its candidates are the default of the
architecture, which also tells how much tuning gains, and the tiles near it, nearest first, so that
a budget that runs out has cut the least likely ones.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import aot
from compile_proof import SHARED_LIMIT, Report

from omlx_kernels import launch, ops, tuned
from omlx_kernels.launch import Target, TileConfig
from omlx_kernels.tuned_file import FORMAT, KEYS, Tuned, config_fields, tile_of

BLOCK_D = (64, 128)
DTYPES = ("float16", "bfloat16")
VALUES = {"block_n": (32, 64), "num_warps": (4, 8), "num_stages": (1, 2, 3, 4, 5)}


@dataclass(frozen=True)
class Job:
    """One entry to tune: an op, and what its tile depends on (the values of ``KEYS[op]``)."""

    op: str
    key: tuple[int | str, ...]

    def __str__(self) -> str:
        names = zip(KEYS[self.op], self.key, strict=True)
        return " ".join([self.op, *(f"{name}={value}" for name, value in names)])

    def default(self, target: Target) -> TileConfig:
        """Return the tile that serves without tuning."""
        if self.op == "append":
            return launch.append_config(*self.key)
        if self.op == "convert":
            return launch.convert_config(*self.key)
        if self.op == "decode":
            return launch.decode_config(target, *self.key)
        return launch.extend_config(target, *self.key)

    def with_tile(self, config: TileConfig) -> Tuned:
        """Return tiles that hold this candidate only, for `omlx_kernels.tuned.using`."""
        return Tuned("a candidate", ("cuda", 0), {(self.op, *self.key): config})

    def candidates(self, target: Target) -> list[TileConfig]:
        """Return the default, then all others, those that differ in the fewest fields first."""
        default = self.default(target)
        used = {name: getattr(default, name) for name in config_fields(self.op)}
        values = {name: {*VALUES.get(name, ()), now} for name, now in used.items()}
        if self.op == "append":
            values["block_m"] |= {1, 2, 4, 8}
            values["num_warps"] |= {1, 2}
        elif self.op == "convert":
            values["num_warps"] |= {2}
        elif self.op == "extend":
            values["block_m"] |= {m for m in (16, 32, 64, 128) if m <= self.key[-1]}
        if "max_registers" in values:
            values["max_registers"] |= {None, 128, 168, 255} if target[0] == "cuda" else set()

        def distance(config: TileConfig) -> int:
            return sum(getattr(config, name) != now for name, now in used.items())

        orders = [sorted(values[name], key=str) for name in used]
        found = [
            tile_of(self.op, dict(zip(used, choice, strict=True)))
            for choice in itertools.product(*orders)
        ]
        return sorted(found, key=distance)


def jobs(ops_to_tune: list[str]) -> list[Job]:
    """Return what is tuned by default: the shapes of the common models."""
    chosen = []
    for block_d in BLOCK_D:
        keys = {
            "append": [(kv_heads, block_d) for kv_heads in (8, 32)],
            "convert": [(block_d,)],
            "decode": list(itertools.product([block_d], DTYPES, [1, 4, 8])),
            "extend": list(itertools.product([block_d], DTYPES, [16, 64, 512])),
        }
        chosen += [Job(op, key) for op in ops_to_tune for key in keys[op]]
    return chosen


def compile_reports(job: Job, config: TileConfig, arch: int | str) -> list[Report]:
    """Compile the job's kernels, with this tile, through their launchers."""
    from tuning_problems import launches  # it needs a process that may compile

    with tuned.using(job.with_tile(config)), ops.use_implementation("triton"):
        reports = aot.reports(arch, *launches(job, "cpu", tiny=True))
    reports = [r for r in reports if r.name != "_merge_splits_kernel"]  # it has no tile
    if any(report.num_warps != config.num_warps for report in reports):
        raise RuntimeError(f"{job}: the launcher did not use the candidate {config}")
    return reports


def objections(reports: list[Report], op: str) -> list[str]:
    """Say why a candidate need not be timed; an empty list says that it may be good."""
    found = []
    for report in reports:
        limit = SHARED_LIMIT[report.arch]
        if report.spills:
            found.append(f"{report.spills} spills")
        if report.shared > limit * 1024:
            found.append(f"{report.shared / 1024:.0f} KiB of shared memory, {limit} allowed")
        # float32 runs without tensor cores, and AMD's code has no such instruction to count.
        is_cuda = isinstance(report.arch, int)
        has_dots = op in ("decode", "extend") and is_cuda and report.tensor_core
        if has_dots and not report.async_copies.get(128):
            found.append("no 128-bit asynchronous copies")
    return list(dict.fromkeys(found))


class Finished:
    """Results of candidates, kept in a file of JSON lines while they come in.

    Lines that were written with other versions or at another commit are no results: they are
    ignored, and tried again. So are all lines where files differ from the commit ("+"): nobody
    knows what they were measured with.

    Args:
        path: the file; made on the first result.
        made_with: versions and commit of this run.
    """

    def __init__(self, path: Path, made_with: dict[str, str]) -> None:
        self.path, self.made_with = path, made_with
        self._lines: dict[str, dict] = {}
        for line in path.read_text().splitlines() if path.is_file() else ():
            try:
                result = json.loads(line)
            except ValueError:  # the line that an interrupt cut off
                continue
            same = result.pop("made_with") == made_with and not made_with["commit"].endswith("+")
            if same:
                self._lines[result.pop("candidate")] = result

    @staticmethod
    def _name(job: Job, config: TileConfig) -> str:
        return json.dumps([job.op, *job.key, asdict(config)])

    def get(self, job: Job, config: TileConfig) -> dict | None:
        """Return ``{"ms": ...}``, ``{"pruned": [...]}`` or ``{"failed": ...}``; None: not tried."""
        return self._lines.get(self._name(job, config))

    def put(self, job: Job, config: TileConfig, result: dict) -> None:
        """Keep a result, at once."""
        name = self._name(job, config)
        self._lines[name] = result
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            line = {"candidate": name, "made_with": self.made_with} | result
            file.write(json.dumps(line) + "\n")


def best(job: Job, target: Target, finished: Finished) -> tuple[TileConfig, float, float] | None:
    """Return the fastest tile, its and the default's ms; None before both have been timed."""
    times = {}
    for config in job.candidates(target):
        result = finished.get(job, config)
        if result and "ms" in result:
            times[config] = result["ms"]
    default = times.get(job.default(target))
    if default is None:
        return None
    fastest = min(times, key=times.get)
    return fastest, times[fastest], default


def entries(
    tuned_jobs: list[Job], target: Target, finished: Finished, workloads: dict[str, str]
) -> Iterator[dict]:
    """Yield the entries of the jobs that have a best tile."""
    for job in tuned_jobs:
        if result := best(job, target, finished):
            config, ms, default_ms = result
            names = [f.name for f in fields(TileConfig) if f.name in config_fields(job.op)]
            yield {
                "op": job.op,
                "key": dict(zip(KEYS[job.op], job.key, strict=True)),
                "config": {name: getattr(config, name) for name in names},
                "measured": {
                    "ms": ms,
                    "default_ms": default_ms,
                    "workload": workloads[job.op],
                },
            }


def content(gpu: str, target: Target, made_with: dict[str, str], found: list[dict]) -> dict:
    """Return what a tuned file holds."""
    return {
        "format": FORMAT,
        "gpu": gpu,
        "target": list(target),
        "made_with": made_with,
        "entries": found,
    }
