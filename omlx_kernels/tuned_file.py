"""The file of tiles that were tuned on one GPU model: its format, and every check it must pass.

Whatever is not understood is refused, naming file and field. A tile decides only how a kernel is
compiled, and the values allowed here keep it so: a bad one is slow, or does not compile or launch,
but never gives another result. One file is::

    {"format": 1, "gpu": "NVIDIA GeForce RTX 3090", "target": ["cuda", 86],
     "made_with": {"triton": "3.7.1", "torch": "2.13.0", "commit": "a5c413f"},
     "entries": [{"op": "decode",
                  "key": {"block_d": 128, "dtype": "float16", "group_size": 4},
                  "config": {"block_m": 16, "block_n": 64, "num_warps": 4, "num_stages": 3},
                  "measured": {"ms": 0.5, "default_ms": 0.6, "workload": "8 x 8192 tokens"}}]}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from omlx_kernels.errors import describe
from omlx_kernels.launch import Target, TileConfig

FORMAT = 1
MAX_ROWS = 512
"""Extend steps of this many rows and more share an entry; see `row_bucket`."""

KEYS = {
    "append": ("kv_heads", "block_d"),
    "convert": ("block_d",),
    "decode": ("block_d", "dtype", "group_size"),
    "extend": ("block_d", "dtype", "rows"),
}
"""What a tile of each op depends on: the arguments of its default in `omlx_kernels.launch`."""
FIXED: dict[str, dict[str, Any]] = {
    "append": {"block_n": 0, "num_stages": 1, "max_registers": None},
    "convert": {"block_m": 0, "block_n": 64, "num_stages": 1, "max_registers": None},
    "decode": {},
    "extend": {},
}
"""The fields of `TileConfig` that an op does not use: never in a file, always so."""
OPTIONAL = ("max_registers",)

Allowed = tuple[Callable[[object], bool], str]
"""Whether a value is allowed, and how to say what is."""


def _one_of(*values: object) -> Allowed:
    kinds = [(type(v), v) for v in values]  # by type too: True is not 1
    return lambda x: (type(x), x) in kinds, f"one of {', '.join(map(str, values))}"


def _whole(low: int, high: int) -> Allowed:
    def is_allowed(x: object) -> bool:
        return isinstance(x, int) and type(x) is int and low <= x <= high

    return is_allowed, f"a whole number from {low} to {high}"


_POWERS = [2**i for i in range(12)]
_TEXT: Allowed = (lambda x: isinstance(x, str) and bool(x), "text")
_MILLISECONDS: Allowed = (
    lambda x: isinstance(x, int | float) and type(x) is not bool and 0 < x < float("inf"),
    "a positive number of milliseconds",
)
_KEY: dict[str, Allowed] = {
    "block_d": _one_of(*_POWERS[6:10]),
    "dtype": _one_of("float16", "bfloat16", "float32"),
    "group_size": _whole(1, 1024),
    "kv_heads": _whole(1, 1024),
    "rows": _one_of(*_POWERS[4 : MAX_ROWS.bit_length()]),
}
_CONFIG: dict[str, Allowed] = {
    "block_m": _one_of(*_POWERS[4:9]),
    "block_n": _one_of(16, 32, 64),  # divides 64, so a tile of keys never leaves its block
    "num_warps": _one_of(1, 2, 4, 8, 16),
    "num_stages": _whole(1, 8),
    "max_registers": _one_of(None, *range(32, 249, 8), 255),
}
_BLOCK_M_OF_APPEND = _one_of(*_POWERS[:9])
_MEASURED = {"ms": _MILLISECONDS, "default_ms": _MILLISECONDS, "workload": _TEXT}


@dataclass(frozen=True)
class Tuned:
    """The tuned tiles of one GPU.

    Attributes:
        gpu: the name that the driver gives the device.
        target: what its kernels are compiled for.
        tiles: (op, *key in the order of `KEYS`) -> tile.
    """

    gpu: str
    target: Target
    tiles: dict[tuple[int | str, ...], TileConfig]


def row_bucket(rows: int) -> int:
    """Return the number of rows under which an extend step of ``rows`` rows is tuned.

    Example:
        >>> [row_bucket(rows) for rows in (1, 17, 64, 4096)]
        [16, 32, 64, 512]
    """
    return min(MAX_ROWS, max(16, 1 << max(0, rows - 1).bit_length()))


def config_fields(op: str) -> list[str]:
    """Return the fields of `TileConfig` that ``op`` uses."""
    return [f.name for f in fields(TileConfig) if f.name not in FIXED[op]]


def tile_of(op: str, config: dict[str, Any]) -> TileConfig:
    """Return the tile with these fields, and the op's fixed values for the others."""
    return TileConfig(**FIXED[op] | config)


def load(path: Path) -> Tuned:
    """Read a tuned file and check every field.

    Raises:
        ValueError: naming the file, the field, what is allowed there and what stands there.
        OSError: where the file cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # neither UTF-8 nor JSON
        raise wrong(path, "content", "JSON", str(error)) from error
    return parse(content, path)


def parse(content: object, path: Path) -> Tuned:
    """Check the content of a tuned file; see `load`."""
    top = _object(path, "content", content, ("format", "gpu", "target", "made_with", "entries"))
    _check(path, "format", top["format"], _one_of(FORMAT))
    _check(path, "gpu", top["gpu"], _TEXT)
    target = top["target"]
    if not isinstance(target, list) or [type(x) for x in target] not in ([str, int], [str, str]):
        raise wrong(path, "target", '["cuda", 86] or ["hip", "gfx942"]', repr(target))
    if type(target[1]) is not {"cuda": int, "hip": str}.get(target[0]):
        raise wrong(path, "target", '["cuda", 86] or ["hip", "gfx942"]', repr(target))
    made_with = _object(path, "made_with", top["made_with"], ("triton", "torch", "commit"))
    for name, version in made_with.items():
        _check(path, f"made_with.{name}", version, _TEXT)
    if not isinstance(top["entries"], list):
        raise wrong(path, "entries", "a list", repr(top["entries"]))
    tiles: dict[tuple[int | str, ...], TileConfig] = {}
    for i, entry in enumerate(top["entries"]):
        key, tile = _entry(path, f"entries[{i}]", entry)
        if key in tiles:
            raise wrong(path, f"entries[{i}]", "an entry of its own", f"{key} for a second time")
        tiles[key] = tile
    return Tuned(top["gpu"], tuple(target), tiles)


def _entry(path: Path, where: str, entry: object) -> tuple[tuple[int | str, ...], TileConfig]:
    parts = _object(path, where, entry, ("op", "key", "config", "measured"))
    op = parts["op"]
    _check(path, f"{where}.op", op, _one_of(*KEYS))
    key = _object(path, f"{where}.key", parts["key"], KEYS[op])
    for name, value in key.items():
        _check(path, f"{where}.key.{name}", value, _KEY[name])
    required = [name for name in config_fields(op) if name not in OPTIONAL]
    optional = [name for name in config_fields(op) if name in OPTIONAL]
    config = _object(path, f"{where}.config", parts["config"], required, optional)
    for name, value in config.items():
        is_heads = (op, name) == ("append", "block_m")
        allowed = _BLOCK_M_OF_APPEND if is_heads else _CONFIG[name]
        _check(path, f"{where}.config.{name}", value, allowed)
    measured = _object(path, f"{where}.measured", parts["measured"], _MEASURED)
    for name, value in measured.items():
        _check(path, f"{where}.measured.{name}", value, _MEASURED[name])
    return (op, *(key[name] for name in KEYS[op])), tile_of(op, config)


def _object(
    path: Path,
    where: str,
    value: object,
    required: Collection[str],
    optional: Collection[str] = (),
) -> dict:
    """Return ``value`` if it is an object with these fields and no other."""
    names = ", ".join((*required, *optional))
    if not isinstance(value, dict):
        raise wrong(path, where, f"an object with {names}", repr(value))
    missing = [name for name in required if name not in value]
    unknown = [name for name in value if name not in (*required, *optional)]
    if missing or unknown:
        got = [f"no {name!r}" for name in missing] + [f"unknown {name!r}" for name in unknown]
        raise wrong(path, where, f"an object with {names}", ", ".join(got))
    return value


def _check(path: Path, where: str, value: object, allowed: Allowed) -> None:
    is_allowed, description = allowed
    if not is_allowed(value):
        raise wrong(path, where, description, repr(value))


def wrong(path: Path, where: str, expected: str, got: str) -> ValueError:
    """Compose the error about one field of a file."""
    remedy = "tune again with bench/autotune.py, or remove the file to use the defaults"
    return ValueError(describe(f"tuned tiles {path}", where, expected, got, remedy))
