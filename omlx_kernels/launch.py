"""Tile sizes, warps and stages by architecture, and how decode is cut into splits.

Plain numbers and names in, plain numbers out: neither torch nor triton is imported, so the cache
can plan a step without them. The defaults are hand-picked from the compile proof (``bench/aot.py``:
no spills, pipelined 128-bit copies, shared memory inside the architecture's limit), not timed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

Target = tuple[str, int | str]
"""Backend and architecture: ``("cuda", 86)``, ``("hip", "gfx942")``, ``("interpreter", 0)``."""

BIG_SHARED = (80, 90, 100, 103)
"""NVIDIA architectures with 163 KiB or more of shared memory a program; the others have 99."""
WGMMA = (90, 100, 103)
"""NVIDIA architectures whose dots take their operands from shared memory."""
ALL_REGISTERS = 255
"""As many as a thread can have. A bound that is said aloud keeps ptxas from setting one of its own,
for the sake of occupancy, and spilling a few registers to keep it."""


@dataclass(frozen=True)
class TileConfig:
    """How one kernel is compiled: rows and keys of a tile, warps, software pipeline stages.

    Triton halves the stages of a load whose address comes from another load (the block table), so
    5 stages keep two tiles in flight and 3 stages one.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    """The most registers a thread may have, None for the compiler's choice; NVIDIA only."""

    def options(self) -> dict[str, int]:
        """Return what a launch passes to the compiler."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if self.max_registers is None else options | {"maxnreg": self.max_registers}


def _power_of_2(n: int) -> int:
    """Return the smallest power of two >= n."""
    return 1 << max(0, n - 1).bit_length()


@cache
def append_config(kv_heads: int, block_d: int) -> TileConfig:
    """Return the heads that a program of `append_kv` copies (``block_m``) and its warps."""
    heads = min(_power_of_2(kv_heads), max(1, 1024 // block_d))
    return TileConfig(heads, 0, num_warps=4 if heads * block_d >= 512 else 1, num_stages=1)


@cache
def convert_config(block_d: int) -> TileConfig:
    """Return the warps of `convert_blocks`, whose tile is one group of 64 tokens."""
    return TileConfig(0, 64, num_warps=8 if block_d >= 128 else 4, num_stages=1)


@cache
def decode_config(target: Target, block_d: int, dtype: str, group_size: int) -> TileConfig:
    """Return the tile of decode: ``block_m`` query heads of one kv head x ``block_n`` hot keys.

    Args:
        target: what the kernel is compiled for.
        block_d: channels of a tile (head_dim padded to a power of two).
        dtype: the model's dtype: ``"float16"``, ``"bfloat16"`` or ``"float32"``.
        group_size: query heads that share a kv head.
    """
    backend, arch = target
    # Above 64 channels more than 16 rows spill; a larger group takes several tiles.
    most = 64 if block_d <= 64 or backend == "interpreter" else 16
    block_m = min(most, max(16, _power_of_2(group_size)))
    if backend == "interpreter":
        return TileConfig(block_m, 32, num_warps=4, num_stages=1)
    if backend == "hip":
        return TileConfig(block_m, 32, num_warps=8 if block_d > 128 else 4, num_stages=2)
    if dtype == "float32":
        return TileConfig(block_m, 16, 8, num_stages=1, max_registers=ALL_REGISTERS)
    if block_d > 128:
        return TileConfig(block_m, 32, 8, num_stages=2, max_registers=ALL_REGISTERS)
    warps = 8 if block_m > 32 else 4
    # 168 registers let three programs of four warps share a multiprocessor; elsewhere they spill.
    few = block_d <= 64 and block_m == 16 and arch in (86, 89)
    registers = 168 if few else ALL_REGISTERS
    return TileConfig(block_m, 64, warps, 5 if arch in BIG_SHARED else 3, registers)


@cache
def extend_config(
    target: Target, block_d: int, dtype: str, rows: int, padded: bool = False
) -> TileConfig:
    """Return the tile of extend: ``block_m`` stacked rows (queries x heads) x ``block_n`` hot keys.

    A tile of at least as many rows as channels is shared out by rows, 16 to a warp: more warps than
    that would compute the same rows again.

    Args:
        target, block_d, dtype: as for `decode_config`.
        rows: the most rows that a sequence has; smaller steps get smaller tiles.
        padded: whether head_dim is less than ``block_d``: masks take registers, too.
    """
    backend, arch = target
    block_m = max(16, _power_of_2(rows))
    if backend == "interpreter":
        return TileConfig(min(64, block_m), 32, num_warps=4, num_stages=1)
    if backend == "hip":
        return TileConfig(min(64, block_m), 32, num_warps=4, num_stages=1)
    if dtype == "float32":
        return TileConfig(16, 16, 8, num_stages=1, max_registers=ALL_REGISTERS)
    if block_d > 128:
        return TileConfig(16, 32, 8, num_stages=2, max_registers=ALL_REGISTERS)
    if arch in WGMMA:
        block_m = min(128, block_m)
        return TileConfig(block_m, 64, 8 if block_m == 128 else 4, 2, ALL_REGISTERS)
    # 128 rows of 128 channels spill on sm_80 ... sm_89, up to 32 instructions outside of the loops;
    # with 64 rows, fewer than channels, the warps share out the keys instead.
    most = 128 if block_d <= 64 else 32 if arch == 120 and padded else 64
    block_m = min(most, block_m)
    warps = 8 if block_m * block_d > 64 * 64 and block_m > 32 else 4
    return TileConfig(block_m, 64, warps, num_stages=2, max_registers=ALL_REGISTERS)


SPLIT_OVERHEAD = 0.5
"""What starting and merging a split costs, in blocks read."""
SPLIT_SIZES = (*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)


def blocks_per_split(row_blocks: Sequence[int], programs_per_split: int, num_sms: int) -> int:
    """Choose how many blocks a decode split reads, from the real lengths and the device.

    Small splits fill the device when there are few sequences; large ones start and merge less. The
    cost of a size is the longest program where all programs run at once, else the work over the
    programs that do, plus half a program for the tail.

    Args:
        row_blocks: listed blocks of each sequence and tier; zeros are fine.
        programs_per_split: programs that read one split: kv heads, times the tiles of query heads
            where a tile does not hold all that share a kv head (`decode_config`).
        num_sms: multiprocessors of the device; two programs run on each.

    Returns:
        Blocks a split, at least 1.

    Example:
        >>> blocks_per_split([1, 31], programs_per_split=32, num_sms=82)  # one chat of 8192 tokens
        8
        >>> blocks_per_split([1, 31] * 32, programs_per_split=32, num_sms=82)  # 32 of them
        16
    """
    rows = Counter(row_blocks)
    longest = max(rows, default=0)
    slots = 2 * num_sms

    def cost(size: int) -> float:
        splits = sum(count * -(-blocks // size) for blocks, count in rows.items())
        program = min(size, longest) + SPLIT_OVERHEAD
        if splits * programs_per_split <= slots:
            return program
        work = sum(blocks * count for blocks, count in rows.items()) + splits * SPLIT_OVERHEAD
        return work * programs_per_split / slots + program / 2

    return min(SPLIT_SIZES, key=cost)
