"""Tile sizes, warps and stages by architecture, and how decode is cut into splits.

Plain integers in, plain integers out: neither torch nor triton is imported, so the cache can plan a
step without them. The defaults are hand-picked from the compile proof (``bench/aot.py``: no spills,
shared memory inside the architecture's limit), not timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

Target = tuple[str, int | str]
"""Backend and architecture: ``("cuda", 86)``, ``("hip", "gfx942")``, ``("interpreter", 0)``."""


@dataclass(frozen=True)
class TileConfig:
    """How one kernel is compiled: rows and keys of a tile, warps, software pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def _power_of_2(n: int) -> int:
    """Return the smallest power of two >= n."""
    return 1 << max(0, n - 1).bit_length()


@lru_cache(maxsize=None)
def append_config(kv_heads: int, block_d: int) -> TileConfig:
    """Return the heads a program of `append_kv` copies (``block_m``) and its warps."""
    heads = min(_power_of_2(kv_heads), max(1, 1024 // block_d))
    return TileConfig(
        block_m=heads, block_n=0, num_warps=4 if heads * block_d >= 512 else 1, num_stages=1
    )


@lru_cache(maxsize=None)
def convert_config(block_d: int) -> TileConfig:
    """Return the warps of `convert_blocks`, whose tile is one group of 64 tokens."""
    return TileConfig(block_m=0, block_n=64, num_warps=8 if block_d >= 128 else 4, num_stages=1)


@lru_cache(maxsize=None)
def decode_config(
    target: Target, block_d: int, itemsize: int, group_size: int, block_size: int
) -> TileConfig:
    """Return the tile of decode: ``block_m`` query heads of a kv head x ``block_n`` hot keys."""
    block_m = min(64, max(16, _power_of_2(group_size)))
    return TileConfig(block_m, 64, 8 if block_d >= 128 else 4, 3)


@lru_cache(maxsize=None)
def extend_config(
    target: Target, block_d: int, itemsize: int, rows: int, block_size: int
) -> TileConfig:
    """Return the tile of extend: ``block_m`` of the ``rows`` stacked queries x hot keys."""
    block_m = min(64, max(16, _power_of_2(rows)))
    return TileConfig(block_m, 64, 4, 2)


def blocks_per_split(row_blocks: Sequence[int], programs_per_split: int, num_sms: int) -> int:
    return 1
