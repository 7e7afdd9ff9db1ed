"""Measure contenders against the unquantized cache; rows are kept as they come, never repeated."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from omlx_cache.tools.divergence import compare
from omlx_cache.tools.errors import WrongSettingError
from omlx_cache.tools.machine import machine, versions
from omlx_cache.tools.output import write_text
from omlx_cache.tools.progress import Progress, silent
from omlx_cache.tools.quality_contenders import Contender, reference
from omlx_cache.tools.quality_tasks import Task

Logits = dict[str, torch.Tensor]


class Results:
    """The rows of a comparison, in a file where one is given.

    Args:
        setup: what must be the same for rows to be comparable, as plain data.
        path: a JSON file, read where it exists and written after each row; None keeps nothing.

    Raises:
        WrongSettingError: the file is no such file, or of another setup.
    """

    def __init__(self, setup: dict, path: Path | None = None) -> None:
        self._path = path
        self.data = {"setup": setup, "machine": machine(), "versions": versions(), "results": {}}
        if path is None or not path.exists():
            return
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
            there, rows = before["setup"], before["results"]
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise WrongSettingError(
                f"{path} must hold results of this tool, got something else; give another file"
            ) from error
        other = [key for key in setup if there.get(key) != setup[key]]
        if other:
            key = other[0]
            raise WrongSettingError(
                f"{path} holds results with {key} {there.get(key)!r}, asked for {setup[key]!r}; "
                f"give another file, or delete it"
            )
        self.data["results"] = rows

    def has(self, contender: Contender) -> bool:
        """Whether the contender's row is there, for the very same setting."""
        row = self.data["results"].get(contender.name)
        return row is not None and row["setting"] == contender.setting

    def add(self, contender: Contender, row: dict) -> None:
        """Add a row, and write the file whole or not at all."""
        self.data["results"][contender.name] = {
            "setting": contender.setting,
            "is_peer": contender.is_peer,
            **row,
        }
        if self._path is not None:
            write_text(self._path, json.dumps(self.data, indent=1) + "\n")


def measure_all(
    model,
    tasks: Sequence[Task],
    contenders: Sequence[Contender],
    results: Results,
    progress: Progress = silent,
) -> None:
    """Add a row to ``results`` for each contender that has none yet.

    A peer that this version of transformers doesn't have, or that can't serve the model, gets a row
    with ``error`` alone.

    Raises:
        OutOfBlocksError, NotImplementedError, ValueError: of a configuration of omlx_cache.
    """
    missing = [c for c in contenders if not results.has(c)]
    if not missing:
        return
    stock = reference()
    base, full = run(model, tasks, stock, progress)
    results.add(stock, _row(tasks, base, base, full, full))
    for contender in missing:
        try:
            found, num_bytes = run(model, tasks, contender, progress)
        except (ValueError, TypeError, NotImplementedError, ImportError, RuntimeError) as error:
            if not contender.is_peer or isinstance(error, torch.OutOfMemoryError):
                raise
            results.add(contender, {"error": str(error).splitlines()[0]})
            continue
        results.add(contender, _row(tasks, base, found, num_bytes, full))


@torch.no_grad()
def run(
    model, tasks: Sequence[Task], contender: Contender, progress: Progress = silent
) -> tuple[Logits, int]:
    """Read every task with a contender.

    Returns:
        Part name -> float32 logits [positions, vocabulary], and the bytes of the cache at the end
        of the first task, as in a 16-bit model.
    """
    device = next(model.parameters()).device
    logits: Logits = {}
    num_bytes, done, total = 0, 0, sum(len(task.ids) for task in tasks)
    for task in tasks:
        asked, found = task.positions(), []
        with contender.open(model) as session:
            chunk = session.chunk or len(task.ids)
            for first in range(0, len(task.ids), chunk):
                ids = torch.tensor([task.ids[first : first + chunk]], device=device)
                here = [p - first for p in asked if first <= p < first + chunk]
                kept = torch.tensor(here, dtype=torch.long, device=device)
                found.append(session.feed(ids, kept))
                done += ids.shape[1]
                progress(contender.name, done, total)
            if task is tasks[0]:
                num_bytes = session.num_bytes()
        rows = torch.cat(found)
        where = {position: i for i, position in enumerate(asked)}
        for part, positions in task.asked.items():
            logits[part] = rows[[where[p] for p in positions]]
    return logits, num_bytes


def _row(tasks: Sequence[Task], base: Logits, found: Logits, num_bytes: int, full: int) -> dict:
    """Put a row together.

    ``perplexity`` is of the text, ``needle`` and ``recall`` are the shares of tokens that were
    retrieved; ``saved`` is against the stock cache of the same tokens.
    """
    agreement = compare(base["text"], found["text"], _text_ids(tasks, base["text"].device))
    right = {p: t for task in tasks for p, t in targets_of(task).items() if p in found}
    truth = right.pop("text")[:-1, None].to(found["text"].device)  # the last one is no text's
    loss = -found["text"][:-1].log_softmax(-1).gather(1, truth).mean().item()
    retrieved = {
        part: (found[part].argmax(-1).cpu() == targets).float().mean().item()
        for part, targets in right.items()
    }
    return {
        **asdict(agreement),
        "saved": 1 - num_bytes / full,
        "num_bytes": num_bytes,
        "perplexity": math.exp(loss),
        **retrieved,
    }


def _text_ids(tasks: Sequence[Task], device: torch.device) -> torch.Tensor:
    """Return [1, tokens] ids up to the last position of the part ``text``."""
    task = next(task for task in tasks if "text" in task.asked)
    return torch.tensor([task.ids[: task.asked["text"][-1] + 1]], device=device)


def targets_of(task: Task) -> dict[str, torch.Tensor]:
    """Return part name -> [positions] int64, the token that is right at each asked position."""
    return {
        part: torch.tensor([task.ids[p + 1] for p in positions])
        for part, positions in task.asked.items()
    }
