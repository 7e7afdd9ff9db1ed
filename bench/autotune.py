"""Tune tiles for the GPU at hand: prune by the compile proof, check, time, keep the fastest.

    python bench/autotune.py                              # every op, at most half an hour
    python bench/autotune.py --op decode --budget-s 600
    python bench/autotune.py --dry-run --arch 86          # compile and prune only; needs no GPU

Every job's default comes first, then the nearest tile of each job, and so on: whenever the budget
runs out, all jobs have been tried alike. Results are kept as they come in, in
``build/autotune``; the same command goes on from there while versions and commit stay the same.
The tuned file holds every job whose default was timed; what other code measured is replaced.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import triton
import typer
from measuring import ROOT, commit
from tuning import Finished, Job, compile_reports, content, entries, jobs, objections

from omlx_kernels import tuned
from omlx_kernels.launch import Target, TileConfig
from omlx_kernels.tuned_file import KEYS, parse

Candidate = tuple[Job, TileConfig]


def in_turn(chosen: list[Job], target: Target) -> list[Candidate]:
    """Return the candidates of all jobs: each job's first, each job's second ..."""
    rounds = itertools.zip_longest(*(job.candidates(target) for job in chosen))
    return [
        (job, config)
        for configs in rounds
        for job, config in zip(chosen, configs, strict=True)
        if config is not None
    ]


def prune(task: tuple[Job, TileConfig, int | str]) -> list[str]:
    """Say why a candidate is not timed, from what it compiles to; empty: it is."""
    job, config, arch = task
    try:
        return objections(compile_reports(job, config, arch), job.op)
    except Exception as error:  # a tile that does not compile is a finding, not a fault
        return [f"does not compile: {type(error).__name__}: {error}"[:200]]


def pruned(candidates: list[Candidate], arch: int | str, processes: int) -> Iterator[list[str]]:
    """Yield `prune` of each candidate, in order, computed ahead by some processes."""
    tasks = [(job, config, arch) for job, config in candidates]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap(prune, tasks)


def tune(
    candidates: list[Candidate],
    verdicts: Iterable[list[str]],
    try_out: Callable[[Job, TileConfig], float],
    finished: Finished,
    deadline: float,
) -> int:
    """Try candidates until ``deadline`` (`time.monotonic`), keeping each result.

    Args:
        candidates: in the order in which they are tried; none has a result.
        verdicts: of each candidate, what the compile proof has against it.
        try_out: checks a candidate (AssertionError where it is wrong) and returns its ms.
        finished: where results go.

    Returns:
        How many candidates were tried.

    Raises:
        RuntimeError: where a candidate has left the device unusable; its failure is kept, so the
            same command goes on behind it.
    """
    for i, ((job, config), against) in enumerate(zip(candidates, verdicts, strict=False)):
        if time.monotonic() > deadline:
            return i
        if against:
            result = {"pruned": against}
        else:
            try:
                result = {"ms": try_out(job, config)}
            except Exception as error:  # a wrong or unlaunchable tile is a finding, not a fault
                result = {"failed": f"{type(error).__name__}: {error}"[:500]}
        finished.put(job, config, result)
        show(job, config, result)
        if "failed" in result and torch.cuda.is_initialized():
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:
                raise RuntimeError(
                    f"autotune: {job} with {config} broke the device ({error}); "
                    "run the same command again, it goes on behind this candidate"
                ) from error
    return len(candidates)


def show(job: Job, config: TileConfig, result: dict) -> None:
    """Print what was found of a candidate."""
    [(kind, value)] = result.items()
    text = f"{value:.4f} ms" if kind == "ms" else value if kind == "failed" else "; ".join(value)
    tile = (
        f"{config.block_m}x{config.block_n} warps={config.num_warps} "
        f"stages={config.num_stages} registers={config.max_registers or '-'}"
    )
    print(f"{job!s:52} {tile:40} {'' if kind == 'ms' else kind + ': '}{text}", flush=True)


def dry_run(candidates: list[Candidate], arch: int | str, processes: int, budget_s: int) -> None:
    """Print what the compile proof leaves of the candidates."""
    deadline, left, seen = time.monotonic() + budget_s, 0, 0
    for (job, config), against in zip(candidates, pruned(candidates, arch, processes), strict=True):
        left, seen = left + (not against), seen + 1
        show(job, config, {"pruned": against} if against else {"would": ["be checked and timed"]})
        if time.monotonic() > deadline:
            break
    print(f"{left} of {seen} candidates would be timed; {len(candidates) - seen} not compiled")


def write(path: Path, found: dict) -> None:
    """Write a tuned file at once, if the package would read it."""
    parse(found, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    draft.replace(path)


def main(
    op: list[str] = typer.Option(list(KEYS), help="what to tune, each once"),
    device: int = typer.Option(0, help="index of the GPU"),
    budget_s: int = typer.Option(1800, help="seconds after which no candidate is begun"),
    out: Path = typer.Option(ROOT / "configs" / "tuned", help="folder of the tuned file"),
    processes: int = typer.Option(os.cpu_count() or 1, help="that compile ahead"),
    dry: bool = typer.Option(False, "--dry-run", help="compile, prune and print; no GPU"),
    arch: str = typer.Option("86", help="for --dry-run: 80, 86, 89, 90, 100, 120 or gfx942"),
) -> None:
    """Tune the GPU at hand, or see what would be tried."""
    if triton.knobs.runtime.interpret:
        raise typer.BadParameter("autotune compiles kernels: unset TRITON_INTERPRET")
    if unknown := sorted(set(op) - set(KEYS)):
        raise typer.BadParameter(f"--op: one of {', '.join(KEYS)} expected, got {unknown}")
    if dry:
        target: Target = ("cuda", int(arch)) if arch.isdigit() else ("hip", arch)
        dry_run(in_turn(jobs(op), target), target[1], processes, budget_s)
        return
    if not torch.cuda.is_available():
        raise typer.BadParameter("no GPU at hand; --dry-run needs none")
    deadline = time.monotonic() + budget_s
    torch.cuda.set_device(device)
    gpu, target = tuned.identify(device)
    made_with = {"triton": triton.__version__, "torch": torch.__version__, "commit": commit()}
    path = out / tuned.file_name(gpu)
    finished = Finished(ROOT / "build" / "autotune" / f"{path.stem}.jsonl", made_with)
    todo = [c for c in in_turn(jobs(op), target) if finished.get(*c) is None]

    from tuning_problems import WORKLOADS, check, measure  # these need the device

    def try_out(job: Job, config: TileConfig) -> float:
        check(job, config, torch.device("cuda", device))
        return measure(job, config, torch.device("cuda", device))

    print(f"{gpu}: {len(todo)} candidates to try, {budget_s} s")
    try:
        verdicts = pruned(todo, target[1], processes)
        tried = tune(todo, verdicts, try_out, finished, deadline)
        print(f"{tried} tried, {len(todo) - tried} left")
    finally:
        found = list(entries(jobs(list(KEYS)), target, finished, WORKLOADS))
        if found:
            write(path, content(gpu, target, made_with, found))
            print(f"{len(found)} tiles in {path}")


if __name__ == "__main__":
    typer.run(main)
