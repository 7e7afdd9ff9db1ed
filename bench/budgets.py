"""What a compiled kernel must show: rules that hold everywhere, and the figures of last time.

Rules (`problems`) need no record: no spills, shared memory inside the architecture's limit, wide
loads, tensor cores where they are claimed. Budgets are the figures that a version of triton gave
when they were last accepted, in ``bench/budgets/triton-<version>.json``, one line a kernel; the
same version compiles the same code to the same figures, so `regressions` allows for little.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import triton
from compile_proof import SHARED_LIMIT, Report

FOLDER = Path(__file__).parent / "budgets"
TENSOR_CORES = ("_paged_decode_kernel", "_paged_extend_kernel")
"""Kernels that claim tensor cores for float16 and bfloat16 models."""
MORE_REGISTERS = 8
"""Registers a thread that a kernel may need beyond its budget: what they are allocated in."""


def problems(report: Report, workload: object) -> Iterator[str]:
    """Yield what a default configuration must not show; ``workload`` says head_dim and dtype."""
    if report.spills:
        yield f"{report.spills} spills"
    if report.shared > SHARED_LIMIT[report.arch] * 1024:
        yield f"{report.shared} bytes of shared memory, {SHARED_LIMIT[report.arch]} KiB allowed"
    if report.name not in TENSOR_CORES:
        if report.copies and max(report.copies) < 64:
            yield f"no load is wider than {max(report.copies)} bits"
        return
    if workload.dtype == "fp32":
        return
    if not report.tensor_core:
        yield "no tensor-core instruction"
    if not report.tiles:
        if not report.copies.get(128):  # AMD: no asynchronous copies
            yield "no 128-bit load"
        return
    if not report.async_copies.get(128):
        yield "no 128-bit asynchronous copy: the loop is not pipelined"
    for tile in set(report.tiles):
        if tile.bits < 64:
            yield f"a tile of {tile.num_bytes} bytes is copied {tile.bits} bits at once"
    if workload.head_dim & (workload.head_dim - 1) == 0 and max(t.bits for t in report.tiles) < 128:
        yield "no tile is copied 128 bits at once"
    if report.count(r"LDG\.E\.(U|S)?(8|16)"):
        yield "a synchronous load of 8 or 16 bits"
    if report.count(r"I2F\."):
        yield f"{report.count(r'I2F.')} slow integer-to-float conversions"


def figures(report: Report) -> dict[str, int | None]:
    """Return what a budget records of a kernel."""
    return {
        "warps": report.num_warps,
        "registers": report.registers,
        "spills": report.spills,
        "shared": report.shared,
        "occupancy": report.programs_per_sm,
        "mma": report.tensor_core,
        "loads128": report.copies.get(128, 0),
        "async128": report.async_copies.get(128, 0),
        "tile_bits": min((t.bits for t in report.tiles), default=0),
    }


def regressions(report: Report, budget: dict[str, int | None]) -> Iterator[str]:
    """Yield what is worse than the budget."""
    now = figures(report)
    if now["registers"] > budget["registers"] + MORE_REGISTERS:
        yield f"{now['registers']} registers, budget {budget['registers']}"
    if now["shared"] > budget["shared"]:
        yield f"{now['shared']} bytes of shared memory, budget {budget['shared']}"
    if (now["occupancy"] or 0) < (budget["occupancy"] or 0):
        yield f"{now['occupancy']} programs a multiprocessor, budget {budget['occupancy']}"
    if budget["mma"] and not now["mma"]:
        yield f"no tensor-core instruction, budget {budget['mma']}"
    for key in ("loads128", "async128"):
        if now[key] < budget[key] * 0.9:
            yield f"{key} {now[key]}, budget {budget[key]}"
    if now["tile_bits"] < budget["tile_bits"]:
        yield f"tiles are copied {now['tile_bits']} bits at once, budget {budget['tile_bits']}"


def path(version: str = triton.__version__) -> Path:
    """Return the file that holds the budgets of a version of triton."""
    return FOLDER / f"triton-{version}.json"


def read(version: str = triton.__version__) -> dict[str, dict] | None:
    """Return the budgets by kernel; None where that version has none."""
    file = path(version)
    return json.loads(file.read_text())["kernels"] if file.exists() else None


def write(kernels: dict[str, dict], version: str = triton.__version__) -> None:
    """Replace the budgets of the kernels that are named, keep the others, sort, one line each."""
    merged = (read(version) or {}) | kernels
    lines = (f"    {json.dumps(key)}: {json.dumps(merged[key])}" for key in sorted(merged))
    FOLDER.mkdir(exist_ok=True)
    head = f'{{\n  "triton": "{version}",\n  "kernels": {{\n'
    path(version).write_text(head + ",\n".join(lines) + "\n  }\n}\n")
