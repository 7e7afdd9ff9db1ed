"""Time a call, and say on what it was timed."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]


def median_ms(run: Callable[[], object], device: torch.device) -> float:
    """Return the median milliseconds of a call.

    On a GPU by `triton.testing.do_bench`, which empties the L2 cache before each repetition; the
    time that takes also hides the host's work. On a CPU the median of three calls, cache warm; of
    one in Triton's interpreter, whose time means nothing.
    """
    if device.type == "cuda":
        from triton.testing import do_bench

        return do_bench(run, warmup=10, rep=50, return_mode="median")
    times = []
    for _ in range(1 if os.environ.get("TRITON_INTERPRET", "0") != "0" else 3):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def copy_gb_per_s(num_bytes: int, device: torch.device) -> float:
    """Return the bandwidth of a plain copy that reads half of ``num_bytes`` and writes the rest."""
    source = torch.empty(max(1, num_bytes // 2), dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    return 2 * source.numel() / median_ms(lambda: target.copy_(source), device) / 1e6


def commit() -> str:
    """Return the commit of the repository, with ``+`` where files differ from it."""
    git = ["git", "-C", str(ROOT)]
    try:
        name = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changes = subprocess.run(
            [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name + ("+" if changes.strip() else "")


def version(distribution: str) -> str:
    """Return the installed version of a distribution, or "not installed"."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def machine(device: torch.device) -> dict[str, object]:
    """Describe what is measured on: device, versions, commit."""
    names = ("torch", "triton", "transformers", "gptqmodel", "flash-attn")
    found: dict[str, object] = {name: version(name) for name in names}
    found |= {"commit": commit(), "python": platform.python_version()}
    if device.type != "cuda":
        return found | {"device": "cpu", "memory_gib": None}
    properties = torch.cuda.get_device_properties(device)
    return found | {
        "device": properties.name,
        "arch": f"sm_{properties.major}{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "cuda": torch.version.cuda or torch.version.hip,
    }
