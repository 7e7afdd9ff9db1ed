"""The bytes that a decode step moves, against the bytes that it cannot avoid.

    python bench/roofline.py                          # lengths x tiers x shapes; needs no GPU
    python bench/roofline.py --measure --tokens 8192  # and the time, beside a plain copy's

*Floor*: codes and scales of the visible tokens, once; computed from `omlx_kernels.layout`. *Moved*:
everything that the two kernels ask of the memory system, as if nothing were found in a cache:

| part | why it is more than the floor |
|---|---|
| blocks | scales are read by whole groups of 64 tokens, also where one token is visible |
| q | each split reads its query heads again |
| tables | each split of each kv head reads where its blocks are, once a tile of 64 keys |
| partials | each split writes its output and log-sum-exp (float32), the merge reads them back |
| out | written once |

q, tables and partials are small and have just been written or read: on a GPU most of it is served
by L2 and never reaches DRAM. *DRAM* counts each of those bytes once, and no partials. A tile that
is partly outside of the window asks only for its visible keys (predicated loads); that DRAM moves
sectors of 32 bytes changes nothing, since a token of a head has at least 32.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import typer
from measuring import copy_gb_per_s, median_ms
from problems import MIXES, Attention, Shape, Step
from rich.console import Console
from rich.table import Table

from omlx_kernels.layout import QUANT_GROUP, Tier

INT = 4
"""Bytes of a table entry."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that a decode step asks for; see the module's text.

    Attributes:
        floor: codes and scales of the visible tokens.
        blocks: codes and scales that are read.
        q, tables, partials, out: the rest.
        unique: what q, tables and out occupy, each byte once.
    """

    floor: float
    blocks: int
    q: int
    tables: int
    partials: int
    out: int
    unique: int

    @property
    def moved(self) -> int:
        """All bytes that are asked for."""
        return self.blocks + self.q + self.tables + self.partials + self.out

    @property
    def excess(self) -> float:
        """By which part of the floor `moved` is more."""
        return self.moved / self.floor - 1

    @property
    def dram_excess(self) -> float:
        """The same of the bytes that must come from or go to DRAM."""
        return (self.blocks + self.unique) / self.floor - 1


def visible_bytes(step: Step, tier: Tier, first: int, last: int) -> tuple[float, int]:
    """Return floor and read bytes of the tokens [first, last) of one block or page."""
    size = step.sink_tokens if tier is Tier.SINK else step.block_size
    floor, read = 0.0, 0
    for name, (shape, dtype) in step.format.parts(tier).items():
        heads, rows, *inner = shape
        row_bytes = heads * dtype.itemsize * int(torch.Size(inner).numel())
        tokens_per_row = size // rows
        floor += (last - first) / tokens_per_row * row_bytes
        lo, hi = first, last
        if "_" in name:  # a scale or zero
            lo, hi = first // QUANT_GROUP * QUANT_GROUP, -(-last // QUANT_GROUP) * QUANT_GROUP
        read += (hi - lo) // tokens_per_row * row_bytes
    return floor, read


def traffic(step: Step) -> Traffic:
    """Count the bytes of a decode step, whose sinks stay visible."""
    if step.query_len != 1:
        raise ValueError(f"traffic: step.query_len must be 1 (decode), got {step.query_len}")
    floor, blocks, tiles = 0.0, 0, 0
    for length, row in zip(step.lengths, step.rows, strict=True):
        seen = 0 if step.window_size is None else max(0, length - step.window_size)
        if step.sink_tokens:
            page = visible_bytes(step, Tier.SINK, 0, min(step.sink_tokens, length))
            floor, blocks = floor + page[0], blocks + page[1]
        for block in row:
            first = max(0, seen - block.start)
            last = min(step.block_size, length - block.start)
            part = visible_bytes(step, block.tier, first, last)
            floor, blocks = floor + part[0], blocks + part[1]
            tiles += step.block_size // QUANT_GROUP
    tables = step.tables()
    splits, seqs = len(tables["splits"]), len(step.lengths)
    heads, kv_heads, dim = step.shape.num_q_heads, step.shape.num_kv_heads, step.shape.head_dim
    q = heads * dim * step.format.dtype.itemsize
    # A split's program reads its row of the work list, seq_len, its query's row (two bounds), and
    # for the sink page its number; the merge's, for each query head, four bounds.
    programs = kv_heads * (splits * (4 + 1 + 2) + seqs) + seqs * heads * 4
    return Traffic(
        floor=floor,
        blocks=blocks,
        q=splits * q,
        tables=(programs + kv_heads * tiles * 2) * INT,
        partials=2 * splits * heads * (dim + 1) * torch.float32.itemsize,
        out=seqs * q,
        unique=2 * seqs * q + sum(table.nbytes for table in tables.values()),
    )


def measure(step: Step, device: torch.device) -> tuple[float, float]:
    """Return GB/s of the floor in the time of a decode step, and of a copy of as many bytes."""
    attention = Attention(step, device)
    ms = median_ms(attention.run, device)
    return traffic(step).floor / ms / 1e6, copy_gb_per_s(int(traffic(step).floor), device)


def main(
    tokens: list[int] = typer.Option([1024, 8192, 32768, 131072], help="lengths of a sequence"),
    batch: list[int] = typer.Option([1, 8], help="sequences"),
    mix: list[str] = typer.Option(list(MIXES), help="tiers of the old blocks"),
    shape: list[str] = typer.Option(["32/32/128", "32/8/128"], help="q/kv heads/head_dim"),
    window: int = typer.Option(None, help="keys that a query sees"),
    dtype: str = typer.Option("bfloat16", help="of the model"),
    num_sms: int = typer.Option(82, help="multiprocessors, which the splits are cut for"),
    measure_it: bool = typer.Option(False, "--measure", help="time it, here"),
) -> None:
    """Print the table; more than 3 % over the floor is marked."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    table = Table(title=f"Decode, {dtype}, splits for {num_sms} multiprocessors", box=None)
    for column in ("shape", "tokens", "batch", "tiers", "splits", "floor MiB"):
        table.add_column(column, justify="left" if column in ("shape", "tiers") else "right")
    for column in ("blocks", "q", "tables", "partials", "out", "moved", "DRAM"):
        table.add_column(column, justify="right")
    if measure_it:
        table.add_column("GB/s", justify="right")
        table.add_column("of a copy", justify="right")
    for name in shape:
        for length in tokens:
            for sequences in batch:
                for tiers in mix:
                    heads = Shape(*map(int, name.split("/")))
                    step = Step(heads, dtype, (length,) * sequences, tiers, 1, window, num_sms)
                    moved = traffic(step)
                    parts = (moved.blocks - moved.floor, moved.q, moved.tables, moved.partials)
                    cells = [f"{part / moved.floor:.2%}" for part in (*parts, moved.out)]
                    over = "" if moved.excess <= 0.03 else " !"
                    cells += [f"{moved.excess:+.2%}{over}", f"{moved.dram_excess:+.2%}"]
                    if measure_it:
                        rate, ceiling = measure(step, device)
                        cells += [f"{rate:.1f}", f"{rate / ceiling:.0%}"]
                    splits = str(len(step.tables()["splits"]))
                    left = (name, str(length), str(sequences), tiers, splits)
                    table.add_row(*left, f"{moved.floor / 2**20:.1f}", *cells)
    Console(width=150).print(table)


if __name__ == "__main__":
    typer.run(main)
