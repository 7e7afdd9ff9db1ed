"""Run calls of the C ABI in another process, built for another machine and emulated.

`Elsewhere.call` stands in for `library.call`: it dumps the argument struct and the tensors that the
struct points into, replays the call (native_replay.cpp) and copies what it wrote back.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

REPLAY = Path(__file__).with_name("native_replay.cpp")


class Elsewhere:
    """A library and the program that replays calls of it.

    Args:
        program: the command that runs native_replay, e.g. an emulator and the program.
        library: the shared library under test.
        scratch: a directory for dumps.

    Attributes:
        calls: names of the functions called so far.
        isas: instruction sets that they ran on.
    """

    def __init__(self, program: list[str], library: Path, scratch: Path) -> None:
        self.program, self.library, self.scratch = program, library, scratch
        self.calls: list[str] = []
        self.isas: set[str] = set()

    def call(self, function: str, arguments: bytes) -> None:
        """Replay a call; see `omlx_kernels.native.library.call`."""
        # Whoever packs the address of a tensor holds the tensor, so that it lives on.
        found = dict(_storages(list(sys._getframe(1).f_locals.values())))
        regions = sorted(found.items())
        name = function.encode()
        words = [np.uint64([len(name)]).tobytes(), name]
        words += [np.uint64([len(arguments) // 8]).tobytes(), arguments]
        words.append(np.uint64([len(regions)]).tobytes())
        for address, size in regions:
            words += [np.uint64([address, size]).tobytes(), ctypes.string_at(address, size)]
        dump, result = self.scratch / "dump", self.scratch / "result"
        dump.write_bytes(b"".join(words))
        done = subprocess.run(
            [*self.program, str(self.library), str(dump), str(result)],
            capture_output=True,
            text=True,
            timeout=300,
            # A sanitizer that this process runs under is not one of the other machine.
            env={name: x for name, x in os.environ.items() if name != "LD_PRELOAD"},
        )
        assert done.returncode == 0, f"{function}: {done.returncode} {done.stderr}"
        self.calls.append(function)
        self.isas.add(done.stdout.strip())
        rc, *_ = content = result.read_bytes()
        if rc:
            raise ValueError(content[1:].decode())
        at = 1
        for address, size in regions:
            ctypes.memmove(address, content[at : at + size], size)
            at += size


def _storages(values: list) -> Iterator[tuple[int, int]]:
    """Yield the address and bytes of the storage of every tensor in lists and dataclasses."""
    for value in values:
        if isinstance(value, torch.Tensor) and value.numel():
            storage = value.untyped_storage()
            yield storage.data_ptr(), storage.nbytes()
        elif isinstance(value, list | tuple):
            yield from _storages(list(value))
        elif dataclasses.is_dataclass(value):
            yield from _storages([getattr(value, f.name) for f in dataclasses.fields(value)])
