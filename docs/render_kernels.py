"""Render the tables of ``docs/kernels.md``: bytes of a token, and bytes of a decode step.

::

    python docs/render_kernels.py

Bytes come from ``omlx_kernels/layout.py``, traffic from ``bench/roofline.py``: nothing is timed.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from problems import Shape, Step
from rendering import FOLDER, markdown, update
from roofline import traffic

from omlx_kernels.layout import BLOCK_TIERS, BlockFormat

DOCUMENT = FOLDER / "kernels.md"
HEAD_DIMS = (64, 128, 256)
SHAPES = ("32/32/128", "32/8/128")
LENGTHS = (1024, 8192, 131072)
TIERS = ("hot", "k8v8", "k4v4")
MULTIPROCESSORS = 82


def bytes_of_a_token() -> str:
    """Return the table of bytes by tier and head_dim."""
    rows = []
    for tier in BLOCK_TIERS:
        cells = [tier.name]
        for dim in HEAD_DIMS:
            f = BlockFormat(256, 4, num_kv_heads=1, head_dim=dim, dtype=torch.float16)
            cells.append(f"{f.bytes_per_block(tier) / f.block_size:g}")
        rows.append(cells)
    return markdown(["tier", *(f"D = {dim}" for dim in HEAD_DIMS)], rows)


def bytes_of_a_step() -> str:
    """Return the table of the traffic of decode, one sequence."""
    rows = []
    for name in SHAPES:
        for length in LENGTHS:
            for mix in TIERS:
                shape = Shape(*map(int, name.split("/")))
                step = Step(shape, "bfloat16", (length,), mix, 1, None, MULTIPROCESSORS)
                moved = traffic(step)
                splits = len(step.tables()["splits"])
                floor = f"{moved.floor / 2**20:.1f}"
                more = [f"{moved.asked:+.2%}", f"{moved.moved:+.2%}"]
                rows.append([name, str(length), mix, str(splits), floor, *more])
    head = ["heads q/kv/D", "tokens", "old blocks", "splits", "floor, MiB", "asked for", "DRAM"]
    return markdown(head, rows)


def render() -> str:
    """Return the document."""
    tables = {"bytes of a token": bytes_of_a_token(), "bytes of a step": bytes_of_a_step()}
    return update(DOCUMENT, tables)


if __name__ == "__main__":
    DOCUMENT.write_text(render(), encoding="utf-8")
    print(DOCUMENT)
