"""Prove, without a GPU, what the kernels compile to: ``python bench/aot.py [--full] [...]``.

Every op goes through its launcher, with its real arguments, for each architecture, head_dim and
dtype; nothing runs. Prints a table and checks it (`budgets`): against rules that hold everywhere,
and against the figures that this version of triton gave last time. Exits with 1 when a check fails.

    python bench/aot.py                      the matrix of CI: what differs most, in two minutes
    python bench/aot.py --full               everything, in about an hour
    python bench/aot.py --full --arch 86     ... for one architecture
    python bench/aot.py --full --accept      ... and make its figures the budgets
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import budgets
import torch
import triton
from budgets import problems
from compile_proof import Report, inspect, recording

import omlx_kernels.triton as kernels
from omlx_kernels.layout import BLOCK_TIERS, BlockFormat, LayerBlocks, Tier
from omlx_kernels.metadata import AttentionMetadata

ARCHS = (80, 86, 89, 90, 100, 120, "gfx942")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
HEAD_DIMS = (64, 80, 96, 112, 128, 256)
HEADS = {"mha": (32, 32), "gqa": (32, 8), "mqa": (64, 1)}


@dataclass(frozen=True)
class Workload:
    """The shapes that a set of kernels is compiled for."""

    head_dim: int
    dtype: str
    heads: str = "gqa"
    block_size: int = 256
    sink_tokens: int = 4
    options: bool = False
    """Ask `paged_attention` for everything that it can be asked for, or for nothing."""

    def blocks(self) -> LayerBlocks:
        """Return a layer's blocks in every tier."""
        kv_heads, dtype = HEADS[self.heads][1], DTYPES[self.dtype]
        fmt = BlockFormat(self.block_size, self.sink_tokens, kv_heads, self.head_dim, dtype)
        return LayerBlocks(*(fmt.allocate(tier, 2, "cpu") for tier in Tier))

    def write(self) -> None:
        """Call the launchers that fill blocks: append, and convert between every pair of tiers."""
        blocks = self.blocks()
        new = torch.zeros(512, HEADS[self.heads][1], self.head_dim, dtype=DTYPES[self.dtype])
        slots = torch.zeros(512, dtype=torch.int64)
        ids = torch.zeros(1, dtype=torch.int32)
        for rotated in (False, True):
            kernels.append_kv(new, new, blocks.hot, slots, rotate_v=rotated)
        for source, target in itertools.combinations(BLOCK_TIERS, 2):
            kernels.convert_blocks(
                blocks.tier(source), blocks.tier(target), source, target, ids, ids
            )

    def copy(self) -> None:
        """Call the launcher that copies blocks, for the tier with the most parts."""
        ids = torch.zeros(1, dtype=torch.int32)
        kernels.copy_blocks(self.blocks().k8v4, ids, ids)

    def attend(self, *query_lens: int) -> None:
        """Call decode (1) and extend over all tiers in one launch: by default of 1 and of 512."""
        blocks = self.blocks()
        for query_len in query_lens or (1, 512):
            q = torch.zeros(
                query_len, HEADS[self.heads][0], self.head_dim, dtype=DTYPES[self.dtype]
            )
            options = self.all_options(q) if self.options else {}
            if self.options and query_len == 1:
                options["split_mass"] = torch.zeros(len(tables(1).splits), q.shape[1])
            kernels.paged_attention(
                q, blocks, tables(query_len), sm_scale=1.0, window_size=1024, **options
            )

    @staticmethod
    def all_options(q: torch.Tensor) -> dict:
        """Return everything that `paged_attention` may be asked for."""
        return {
            "rotated_v": True,
            "sink_q": q.clone(),
            "softcap": 50.0,
            "sink_logits": torch.zeros(q.shape[1]),  # float32: `problems` looks for narrow loads
        }


def tables(query_len: int) -> AttentionMetadata:
    """Return tables of the right shapes; nothing is launched, so nobody reads them."""

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    return AttentionMetadata(
        block_table=zeros(1, 40),
        block_starts=zeros(1, 40),
        tier_starts=zeros(1, len(BLOCK_TIERS) + 1),
        sink_pages=zeros(1),
        seq_lens=zeros(1),
        query_start_loc=zeros(2),
        splits=zeros(9, 4),
        split_starts=zeros(2),
        max_query_len=query_len,
    )


def reports(arch: int | str, *launches: Callable[[], None]) -> list[Report]:
    """Compile every kernel that the calls launch, for an architecture."""
    with recording(arch) as compiled:
        for launch in launches:
            launch()
    return [inspect(kernel, arch) for kernel in compiled]


@dataclass(frozen=True)
class Job:
    """What one entry of the matrix compiles."""

    arch: int | str
    workload: Workload
    query_lens: tuple[int, ...] = ()
    """Of `paged_attention`; empty for the ops that write."""

    def run(self) -> list[tuple[str, Report]]:
        """Compile; return the kernels with the keys of their budgets."""
        w = self.workload
        if self.query_lens:
            found = reports(self.arch, lambda: w.attend(*self.query_lens))
            labels = []
            for length in self.query_lens:
                labels += ["decode", "decode"] if length == 1 else [f"extend {length}"]
        else:
            found = reports(self.arch, w.write, w.copy)
            pairs = [f"{a.name}-{b.name}" for a, b in itertools.combinations(BLOCK_TIERS, 2)]
            labels = ["append", "append rotated", *(f"convert {p}" for p in pairs)]
            labels += [f"copy {part}" for part in w.blocks().k8v4.tensors()]
        options = " options" if w.options else ""
        what = f"{self.arch} {w.heads} D={w.head_dim} {w.dtype}{options}"
        return [
            (f"{what} | {label} | {r.name.strip('_')}", r)
            for label, r in zip(labels, found, strict=True)
        ]


def ci_matrix() -> Iterator[Job]:
    """Yield what differs most: every architecture, and each kind of everything else once."""
    for arch in ARCHS:
        yield Job(arch, Workload(128, "fp16", options=True), (1, 512))
    for arch in (86, 120):
        yield Job(arch, Workload(64, "bf16", options=True), (1, 512))
    yield Job(86, Workload(128, "bf16", "mha"), (1, 512))
    yield Job(90, Workload(64, "fp16"), (1, 16))
    yield Job(80, Workload(80, "bf16", options=True), (1, 512))
    yield Job(89, Workload(256, "bf16", options=True), (1, 512))
    yield Job(120, Workload(112, "fp16", "mqa", options=True), (1, 512))
    yield Job(80, Workload(128, "fp32", options=True), (1, 512))
    for arch, head_dim, dtype in ((86, 128, "fp16"), (90, 80, "bf16"), ("gfx942", 64, "fp32")):
        yield Job(arch, Workload(head_dim, dtype))


def full_matrix() -> Iterator[Job]:
    """Yield every op x tier x architecture x head_dim x dtype; the rest where it matters most."""
    for arch, dim, dtype in itertools.product(ARCHS, HEAD_DIMS, DTYPES):
        yield Job(arch, Workload(dim, dtype, options=True), (1, 512))
    for arch, dim, dtype in itertools.product(ARCHS, (64, 128), ("fp16", "bf16")):
        yield Job(arch, Workload(dim, dtype), (1, 512))
        yield Job(arch, Workload(dim, dtype, options=True), (4, 8, 16))  # 16, 32 and 64 rows
    for arch, heads in itertools.product(ARCHS, ("mha", "mqa")):
        yield Job(arch, Workload(128, "bf16", heads, options=True), (1, 512))
    for arch, dim, dtype in itertools.product(ARCHS, HEAD_DIMS, ("bf16", "fp32")):
        yield Job(arch, Workload(dim, dtype))


def _format(widths: dict[int, int]) -> str:
    return " ".join(f"{n}x{width}" for width, n in sorted(widths.items(), reverse=True)) or "-"


def _row(key: str, r: Report) -> str:
    return (
        f"{key:62}{r.num_warps:5}{r.num_stages:7}{r.registers:5}{r.spills:7}"
        f"{r.shared / 1024:9.1f}{r.programs_per_sm or '-':>4}{r.tensor_core:5}"
        f"  {_format(r.async_copies):22}{_format(r.copies)}"
    )


def _run(job: Job) -> list[tuple[str, Report, list[str]]]:
    return [(key, r, list(problems(r, job.workload))) for key, r in job.run()]


def main() -> int:
    """Print the table; return how the process shall exit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="the whole matrix")
    parser.add_argument("--arch", nargs="*", help="only these architectures: 80 90 gfx942")
    parser.add_argument("--head-dim", nargs="*", type=int, help="only these head_dims")
    parser.add_argument("--dtype", nargs="*", choices=DTYPES, help="only these dtypes")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--accept", action="store_true", help="make the figures the budgets")
    args = parser.parse_args()
    jobs = [
        job
        for job in dict.fromkeys(full_matrix() if args.full else ci_matrix())
        if (args.arch is None or str(job.arch) in args.arch)
        and (args.head_dim is None or job.workload.head_dim in args.head_dim)
        and (args.dtype is None or job.workload.dtype in args.dtype)
    ]
    known = budgets.read()
    print(f"triton {triton.__version__}, {len(jobs)} workloads")
    if known is None and not args.accept:
        print(f"NO BUDGETS for this version ({budgets.path().name}): only fixed rules are checked")
    print(
        f"{'arch heads head_dim dtype | launch | kernel':62}{'warps':>5}{'stages':>7}{'regs':>5}"
        f"{'spills':>7}{'smem KiB':>9}{'occ':>4}{'mma':>5}  {'async copies':22}loads"
    )
    failed, unknown, accepted = 0, 0, {}
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        for key, r, wrong in itertools.chain.from_iterable(pool.imap(_run, jobs)):
            accepted[key] = budgets.figures(r)
            if known is not None and not args.accept:
                if key in known:
                    wrong += budgets.regressions(r, known[key])
                else:
                    unknown += 1
            failed += bool(wrong)
            print(_row(key, r) + (f"  FAILS: {'; '.join(wrong)}" if wrong else ""), flush=True)
    if args.accept:
        budgets.write(accepted)
        print(f"{len(accepted)} budgets written to {budgets.path()}")
    if unknown:
        print(f"{unknown} kernels have no budget; --accept writes them")
    print(
        f"{failed} of {len(accepted)} kernels fail" if failed else f"{len(accepted)} kernels pass"
    )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
