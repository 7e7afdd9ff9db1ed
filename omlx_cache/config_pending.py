"""The keys and values of `CacheConfig` whose features have not landed yet: one table, one error.

To land a feature, delete its row (or add the value to `landed`); where the row names a section,
add the field to `CacheConfig`. A value outside `landed` raises NotImplementedError: none is
ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omlx_cache.config_errors import Given, listed, spell


@dataclass(frozen=True)
class NotLanded:
    """One row.

    Args:
        feature: what is missing.
        landed: the key's values that work now; the first is suggested. None for a new key.
        section: where a key belongs that is no field of CacheConfig yet.
    """

    feature: str
    landed: tuple[Any, ...] = ()
    section: str = ""


NOT_LANDED: dict[str, NotLanded] = {
    "cpu_offload": NotLanded("moving blocks to CPU memory", landed=(False,)),
    "pruning": NotLanded("choosing the block that leaves a full pool", landed=("oldest",)),
    "max_cpu_blocks": NotLanded("bounding the blocks in CPU memory", section="kv_cache"),
    "recall": NotLanded("attending to offloaded blocks", section="kv_cache"),
    "prune_ratio": NotLanded("dropping a share of the cache by attention", section="attention"),
}


def is_landed(key: str, value: Any) -> bool:
    """Return whether a legal value of a known key works today."""
    return key not in NOT_LANDED or value in NOT_LANDED[key].landed


def today(key: str) -> tuple[Any, ...]:
    """Return the values of a field that work now, () where all do."""
    return NOT_LANDED[key].landed if key in NOT_LANDED else ()


def not_landed_line(key: str, given: Given) -> str:
    """Return the line for a key or value that can't be used yet, with what can."""
    row = NOT_LANDED[key]
    now = " or ".join(spell(value, yaml=bool(given.file)) for value in row.landed)
    until_then = f"use {now}" if now else "delete the key"
    return (
        f"{given.path}: {given.shown()}{given.place} has not landed yet ({row.feature}); "
        f"until then {until_then}"
    )


def not_landed_error(early: Mapping[str, Given]) -> NotImplementedError:
    """Return one error for all of them, and for a file the overrides that make it work."""
    text = listed("keys have not landed yet", [not_landed_line(k, g) for k, g in early.items()])
    files = {given.file for given in early.values()}
    if len(files) == 1 and all(files) and all(NOT_LANDED[key].landed for key in early):
        changes = ", ".join(f"{key}={NOT_LANDED[key].landed[0]!r}" for key in early)
        text += f"\n  or keep the file and give patch or CacheConfig.resolve, too: {changes}"
    return NotImplementedError(text)
