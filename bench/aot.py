"""Prove, without a GPU, what the kernels compile to: ``python bench/aot.py [--arch 80 90] [...]``.

Every op goes through its launcher, with its real arguments, for each architecture, head_dim and
dtype. Prints a table; exits with 1 when a check fails (`problems`).
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from compile_proof import SHARED_LIMIT, Report, inspect, recording

import omlx_kernels.triton as kernels
from omlx_kernels.layout import BLOCK_TIERS, BlockFormat, LayerBlocks, Tier
from omlx_kernels.metadata import AttentionMetadata

ARCHS = (80, 86, 89, 90, 100, 120, "gfx942")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
HEADS = {"mha": (32, 32), "gqa": (32, 8)}
TENSOR_CORES = ("_paged_decode_kernel", "_paged_extend_kernel")
"""Kernels that claim tensor cores for float16 and bfloat16 models."""


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

    def attend(self) -> None:
        """Call decode and extend, over all tiers in one launch."""
        blocks = self.blocks()
        for query_len in (1, 512):
            q = torch.zeros(
                query_len, HEADS[self.heads][0], self.head_dim, dtype=DTYPES[self.dtype]
            )
            options = self.all_options(q) if self.options else {}
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


def problems(report: Report, workload: Workload) -> Iterator[str]:
    """Yield what a default configuration must not show."""
    if report.spills:
        yield f"{report.spills} spills"
    if report.shared > SHARED_LIMIT[report.arch] * 1024:
        yield f"{report.shared} bytes of shared memory, {SHARED_LIMIT[report.arch]} KiB allowed"
    if not report.instructions or workload.dtype == "fp32":
        return
    if report.name in TENSOR_CORES:
        if not report.tensor_core:
            yield "no tensor-core instruction"
        if not report.async_copies.get(128):
            yield "no 128-bit asynchronous copy: the loop is not pipelined"
        if report.count(r"LDG\.E\.(U|S)?(8|16)"):
            yield "a synchronous load of 8 or 16 bits"
        if report.count(r"I2F\."):
            yield f"{report.count(r'I2F.')} slow integer-to-float conversions"


def _format(widths: dict[int, int]) -> str:
    return " ".join(f"{n}x{width}" for width, n in sorted(widths.items(), reverse=True)) or "-"


def main() -> int:
    """Print the table; return how the process shall exit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", nargs="*", default=[str(a) for a in ARCHS])
    parser.add_argument("--head-dim", nargs="*", type=int, default=[64, 128])
    parser.add_argument("--dtype", nargs="*", choices=DTYPES, default=["fp16", "bf16"])
    parser.add_argument("--heads", nargs="*", choices=HEADS, default=["gqa"])
    args = parser.parse_args()
    print(
        f"{'arch':7}{'kernel':22}{'heads':6}{'D':>4} {'dtype':6}{'warps':>5}{'stages':>7}"
        f"{'regs':>5}{'spills':>7}{'smem KiB':>9}{'occ':>4}{'mma':>5}  {'async copies':22}{'loads'}"
    )
    failed = 0
    for arch in (int(a) if a.isdigit() else a for a in args.arch):
        for heads in args.heads:
            for dim in args.head_dim:
                for dtype in args.dtype:
                    workload = Workload(dim, dtype, heads)
                    full = replace(workload, options=True)
                    for r in reports(arch, workload.write, workload.attend, full.attend):
                        bad = "; ".join(problems(r, workload))
                        failed += bool(bad)
                        print(
                            f"{arch!s:7}{r.name.strip('_'):22}{heads:6}{dim:4} {dtype:6}"
                            f"{r.num_warps:5}{r.num_stages:7}{r.registers:5}{r.spills:7}"
                            f"{r.shared / 1024:9.1f}{r.programs_per_sm or '-':>4}"
                            f"{r.tensor_core:5}  {_format(r.async_copies):22}{_format(r.copies)}"
                            f"{'  FAILS: ' + bad if bad else ''}",
                            flush=True,
                        )
    print(f"{failed} kernels fail" if failed else "all checks pass")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
