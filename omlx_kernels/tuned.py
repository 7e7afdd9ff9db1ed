"""Tiles that were measured on this model of GPU: find its file, look tiles up in it.

``bench/autotune.py`` writes the file (`omlx_kernels.tuned_file`); the launchers ask `lookup`, and
take the default of the architecture (`omlx_kernels.launch`) where nothing was tuned. It is
``<gpu>.json`` in

1. ``$OMLX_TUNED_DIR``, by default ``$XDG_CONFIG_HOME/omlx_cache/tuned`` (``~/.config`` where that
   is not set): what this user tuned;
2. ``omlx_kernels/tuned_configs``, which ships with the package (``configs/tuned`` in the
   repository, of which it is a link).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path

import torch

from omlx_kernels.launch import Target, TileConfig
from omlx_kernels.tuned_file import Tuned, load, row_bucket, wrong

SHIPPED = Path(__file__).parent / "tuned_configs"

_forced: ContextVar[Tuned | None] = ContextVar("omlx_forced_tiles", default=None)


def lookup(op: str, device: torch.device, *key: int | str) -> TileConfig | None:
    """Return the tuned tile of an op on ``device``; None where the default serves.

    Args:
        op: a key of `omlx_kernels.tuned_file.KEYS`.
        device: where the launch runs.
        key: the values of ``KEYS[op]``; for extend, rows of any number.

    Raises:
        ValueError: for a file that is found but wrong. A right one is read once a process.
    """
    tuned = _forced.get()
    if tuned is None:
        tuned = _of_device(device.index) if device.type == "cuda" else None
    if tuned is None:
        return None
    if op == "extend":
        key = (*key[:-1], row_bucket(int(key[-1])))
    return tuned.tiles.get((op, *key))


@contextmanager
def using(tuned: Tuned) -> Iterator[None]:
    """Use these tiles in the current thread or task, whatever the device.

    So a machine without the GPU compiles with the GPU's tiles, and tuning tries a candidate.
    """
    token = _forced.set(tuned)
    try:
        yield
    finally:
        _forced.reset(token)


def file_name(gpu: str) -> str:
    """Return the name of a GPU's file.

    Example:
        >>> file_name("NVIDIA A100-SXM4-80GB")
        'nvidia-a100-sxm4-80gb.json'
    """
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json"


def user_directory() -> Path:
    """Return where this user's tuned files are; it need not exist."""
    if chosen := os.environ.get("OMLX_TUNED_DIR"):
        return Path(chosen)
    config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(config) / "omlx_cache" / "tuned"


def find(gpu: str, target: Target) -> Tuned | None:
    """Load the file of a GPU: the user's, else the package's; None where neither exists.

    Raises:
        ValueError: for a wrong file, or one that another GPU or architecture has made.
    """
    for directory in (user_directory(), SHIPPED):
        path = directory / file_name(gpu)
        if path.is_file():
            tuned = load(path)
            if tuned.gpu != gpu:
                raise wrong(path, "gpu", f"{gpu!r} like the device", repr(tuned.gpu))
            if tuned.target != target:
                raise wrong(path, "target", f"{target} like the device", repr(tuned.target))
            return tuned
    return None


def identify(index: int) -> tuple[str, Target]:
    """Return the name of a device and what its kernels are compiled for."""
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return properties.name, ("hip", properties.gcnArchName.split(":")[0])
    return properties.name, ("cuda", properties.major * 10 + properties.minor)


@cache
def _of_device(index: int) -> Tuned | None:
    return find(*identify(index))
