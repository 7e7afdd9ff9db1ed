"""Blocks for the tests of the disk to store, and what they leave in a directory."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np

from omlx_cache.storage.codec import RawTensor

MODEL = b"fingerprint of a model"


def block(seed: int = 0, num_bytes: int = 600) -> dict[str, RawTensor]:
    """Return tensors of which one can be compressed and the other can't."""
    noise = np.random.default_rng(seed).bytes(num_bytes)
    return {
        "k": RawTensor("U8", (1, num_bytes), noise),
        "v": RawTensor("BF16", (2, 150), noise[:100] * 6),
    }


def same(found, tensors: dict[str, RawTensor]) -> bool:
    """Whether `BlockFiles.get` found exactly these tensors."""
    assert found is not None
    return {n: (t.dtype, t.shape, bytes(t.data)) for n, t in found.tensors.items()} == {
        n: (t.dtype, t.shape, bytes(t.data)) for n, t in tensors.items()
    }


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def the_file(directory: Path) -> Path:
    (path,) = directory.glob("*.safetensors")
    return path


def warnings(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def leftovers(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.name.endswith(".tmp")]


def fails(code: int):
    def call(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    return call
