"""The bytes that a decode step moves, against the bytes that it cannot avoid.

    python bench/roofline.py                          # lengths x tiers x shapes; needs no GPU
    python bench/roofline.py --measure --tokens 8192  # and the time, beside a plain copy's

*Floor*: codes and scales of the visible tokens, once; computed from `omlx_kernels.layout`. *Moved*:
what must come from or go to DRAM, for that is what takes the time. The bar is the floor plus 3 %; a
row above it is marked. *Asked*: all that the two kernels ask of the memory system, as if nothing
were ever found in a cache. They differ in what a neighbour has just read or written:

| part | asked | moved |
|---|---|---|
| blocks | by each tile of query heads; scales by whole groups of 64 tokens | once |
| q | by each split | once |
| tables | by each split of each kv head, once a tile of 64 keys | once |
| partials | output and log-sum-exp (float32) of each split, written and read | - |
| out | once | once |

Partials are a few MiB, written when a program ends and read by the merge right after the last one,
so they are expected in L2. *Worst* is for an L2 that keeps only what was touched last. Programs run
in waves, two on each multiprocessor; where the waves after one read more blocks than L2 holds, its
partials are counted, too, both ways. What is in L2 when the step ends may be written back later, or
be overwritten by the next layer's: that is not counted.

A tile that is partly outside of the window asks only for its visible keys (predicated loads); that
DRAM moves sectors of 32 bytes changes nothing, since a token of a head has at least 32.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import typer
from measuring import copy_gb_per_s, median_ms
from problems import MIXES, Attention, Shape, Step
from rich.console import Console
from rich.table import Table

from omlx_kernels.launch import decode_config
from omlx_kernels.layout import QUANT_GROUP, BlockFormat, Tier
from omlx_kernels.triton.common import block_d

SHAPES = ["32/32/128", "32/8/128"]
TOKENS = [1024, 8192, 32768, 131072]
BATCHES = [1, 8, 32]
INT = 4
"""Bytes of a table entry."""


BAR = 0.03
"""By which part of the floor the moved bytes may be more."""


@dataclass(frozen=True)
class Device:
    """What decides which bytes stay in L2; by default a GeForce RTX 3090, whose L2 is small."""

    num_sms: int = 82
    l2_bytes: int = 6 * 2**20

    @classmethod
    def at_hand(cls) -> Device:
        """Return the GPU's numbers, the default's without a GPU."""
        if not torch.cuda.is_available():
            return cls()
        properties = torch.cuda.get_device_properties(0)
        return cls(properties.multi_processor_count, properties.L2_cache_size)


@dataclass(frozen=True)
class Traffic:
    """Bytes of a decode step; see the module's text.

    Attributes:
        floor: codes and scales of the visible tokens.
        blocks: codes and scales that are read, once.
        again: the same read by further tiles of query heads.
        q, tables, partials, out: what is asked for besides.
        unique: what q, tables and out occupy, each byte once.
        evicted: partials that leave L2 before they are merged at worst, written and read.
    """

    floor: float
    blocks: int
    again: int
    q: int
    tables: int
    partials: int
    out: int
    unique: int
    evicted: float

    @property
    def asked(self) -> float:
        """By which part of the floor the bytes that are asked for are more."""
        parts = self.blocks, self.again, self.q, self.tables, self.partials, self.out
        return sum(parts) / self.floor - 1

    @property
    def moved(self) -> float:
        """By which part of the floor the bytes that DRAM moves are more."""
        return (self.blocks + self.unique) / self.floor - 1

    @property
    def worst(self) -> float:
        """The same where L2 keeps only what was touched last."""
        return self.moved + self.evicted / self.floor


@cache
def visible_bytes(fmt: BlockFormat, tier: Tier, first: int, last: int) -> tuple[float, int]:
    """Return floor and read bytes of the tokens [first, last) of one block or page."""
    size = fmt.sink_tokens if tier is Tier.SINK else fmt.block_size
    floor, read = 0.0, 0
    for name, (shape, dtype) in fmt.parts(tier).items():
        heads, rows, *inner = shape
        row_bytes = heads * dtype.itemsize * int(torch.Size(inner).numel())
        tokens_per_row = size // rows
        floor += (last - first) / tokens_per_row * row_bytes
        lo, hi = first, last
        if "_" in name:  # a scale or zero
            lo, hi = first // QUANT_GROUP * QUANT_GROUP, -(-last // QUANT_GROUP) * QUANT_GROUP
        read += (hi - lo) // tokens_per_row * row_bytes
    return floor, read


def traffic(step: Step, device: Device | None = None) -> Traffic:
    """Count the bytes of a decode step, whose sinks stay visible."""
    device = device or Device(step.num_sms)
    if step.query_len != 1:
        raise ValueError(f"traffic: step.query_len must be 1 (decode), got {step.query_len}")
    fmt, floor, blocks, tiles = step.format, 0.0, 0, 0
    for length, row in zip(step.lengths, step.rows, strict=True):
        seen = 0 if step.window_size is None else max(0, length - step.window_size)
        if step.sink_tokens:
            page = visible_bytes(fmt, Tier.SINK, 0, min(step.sink_tokens, length))
            floor, blocks = floor + page[0], blocks + page[1]
        for block in row:
            first = max(0, seen - block.start)
            last = min(step.block_size, length - block.start)
            part = visible_bytes(fmt, block.tier, first, last)
            floor, blocks = floor + part[0], blocks + part[1]
            tiles += step.block_size // QUANT_GROUP
    tables = step.tables()
    splits, seqs = len(tables["splits"]), len(step.lengths)
    heads, kv_heads, dim = step.shape.num_q_heads, step.shape.num_kv_heads, step.shape.head_dim
    q = heads * dim * fmt.dtype.itemsize
    tile = decode_config(("cuda", 86), block_d(dim), step.dtype, heads // kv_heads).block_m
    head_tiles = -(-heads // kv_heads // tile)
    partials = 2 * splits * heads * (dim + 1) * torch.float32.itemsize
    waves = -(-splits * kv_heads * head_tiles // (2 * device.num_sms))
    lost = sum((waves - i) * blocks > waves * device.l2_bytes for i in range(1, waves))
    # A split's program reads its row of the work list, seq_len, its query's row (two bounds), and
    # for the sink page its number; the merge's, for each query head, four bounds.
    programs = kv_heads * (splits * (4 + 1 + 2) + seqs) + seqs * heads * 4
    return Traffic(
        floor=floor,
        blocks=blocks,
        again=(head_tiles - 1) * blocks,
        q=splits * q,
        tables=head_tiles * (programs + kv_heads * tiles * 2) * INT,
        partials=partials,
        out=seqs * q,
        unique=2 * seqs * q + sum(table.nbytes for table in tables.values()),
        evicted=partials * lost / waves,
    )


def measure(step: Step, device: torch.device) -> tuple[float, float]:
    """Return GB/s of the floor in the time of a decode step, and of a copy of as many bytes."""
    attention = Attention(step, device)
    ms = median_ms(attention.run, device)
    return traffic(step).floor / ms / 1e6, copy_gb_per_s(int(traffic(step).floor), device)


def steps(
    shapes: Iterable[str],
    tokens: Iterable[int],
    batches: Iterable[int],
    mixes: Iterable[str],
    window: int | None = None,
    dtype: str = "bfloat16",
    num_sms: int = 82,
) -> Iterator[Step]:
    """Yield the steps of the table."""
    for shape, length, batch, mix in itertools.product(shapes, tokens, batches, mixes):
        heads = Shape(*map(int, shape.split("/")))
        yield Step(heads, dtype, (length,) * batch, mix, 1, window, num_sms)


def main(
    tokens: list[int] = typer.Option(TOKENS, help="lengths of a sequence"),
    batch: list[int] = typer.Option(BATCHES, help="sequences"),
    mix: list[str] = typer.Option(list(MIXES), help="tiers of the old blocks"),
    shape: list[str] = typer.Option(SHAPES, help="q/kv heads/head_dim"),
    window: int = typer.Option(None, help="keys that a query sees"),
    dtype: str = typer.Option("bfloat16", help="of the model"),
    num_sms: int = typer.Option(None, help="multiprocessors; default: the GPU's, else 82"),
    l2_mib: float = typer.Option(None, help="size of L2; default: the GPU's, else 6"),
    measure_it: bool = typer.Option(False, "--measure", help="time it, here"),
) -> None:
    """Print the table; what moves more than the floor plus 3 % is marked."""
    found = Device.at_hand()
    l2 = found.l2_bytes if l2_mib is None else int(l2_mib * 2**20)
    gpu = Device(found.num_sms if num_sms is None else num_sms, l2)
    title = f"Decode, {dtype}, {gpu.num_sms} multiprocessors, L2 {gpu.l2_bytes / 2**20:.0f} MiB"
    table = Table(title=title, box=None)
    for column in ("shape", "tokens", "batch", "tiers", "splits", "floor MiB"):
        table.add_column(column, justify="left" if column in ("shape", "tiers") else "right")
    for column in ("blocks", "q", "tables", "partials", "out", "asked", "worst", "moved"):
        table.add_column(column, justify="right")
    if measure_it:
        table.add_column("GB/s", justify="right")
        table.add_column("of a copy", justify="right")
    for step in steps(shape, tokens, batch, mix, window, dtype, gpu.num_sms):
        bytes_of = traffic(step, gpu)
        read = bytes_of.blocks + bytes_of.again - bytes_of.floor
        parts = (read, bytes_of.q, bytes_of.tables, bytes_of.partials, bytes_of.out)
        cells = [f"{part / bytes_of.floor:.2%}" for part in parts]
        over = " !" if bytes_of.moved > BAR else ""
        cells += [f"{excess:+.2%}" for excess in (bytes_of.asked, bytes_of.worst, bytes_of.moved)]
        cells[-1] += over
        if measure_it:
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            rate, ceiling = measure(step, device)
            cells += [f"{rate:.1f}", f"{rate / ceiling:.0%}"]
        left = (str(step.shape), str(step.lengths[0]), str(len(step.lengths)), step.mix)
        splits = str(len(step.tables()["splits"]))
        table.add_row(*left, splits, f"{bytes_of.floor / 2**20:.1f}", *cells)
    Console(width=150).print(table)


if __name__ == "__main__":
    typer.run(main)
