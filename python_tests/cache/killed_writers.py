"""Writers of `BlockFiles` that are killed, and what the next process finds: a program of its own.

It imports no torch and forks its writers, so a run takes milliseconds. Used by
test_block_files.py; prints one JSON object, or fails with what went wrong.

    python killed_writers.py kill DIRECTORY RANDOM_RUNS     (0 files are damaged or lost)
    python killed_writers.py write DIRECTORY TIMES MAX_BYTES (one of several writers at once)
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from omlx_cache.storage import locks
from omlx_cache.storage.block_files import BlockFiles
from omlx_cache.storage.codec import RawTensor
from omlx_cache.storage.sealed import SealedWriter

FINGERPRINT = b"a model and a format"
NUM_KEYS = 4
ALL = list(range(NUM_KEYS))
BLOCKS_THAT_FIT = 3
STEPS = ("open", "close", "fsync", "utime", "replace", "posix_fallocate", "unlink")


def content(key: int, generation: int) -> dict[str, RawTensor]:
    """Return a block whose every byte follows from key and generation."""
    noise = random.Random(1000 * key + generation).randbytes
    return {
        "k": RawTensor("U8", (4, 500), noise(2000)),
        "v": RawTensor("F16", (2, 500), noise(100) * 20),
    }


def key_of(key: int) -> bytes:
    """Return a key as the store takes it."""
    return key.to_bytes(16, "little")


def file_size(directory: Path) -> int:
    """Return the bytes of one block's file."""
    files = BlockFiles(directory / "probe", FINGERPRINT)
    assert files.put(key_of(0), content(0, 0))
    return files.num_bytes()


def write(directory: Path, acknowledged: int, generation: int, max_bytes: int | None) -> None:
    """Store every key; write a byte with its number for each that was acknowledged."""
    files = BlockFiles(directory, FINGERPRINT, max_bytes)
    for key in range(NUM_KEYS):
        if files.put(key_of(key), content(key, generation)):
            os.write(acknowledged, bytes([key]))


def die_at(step: int) -> None:
    """Kill this process at its ``step``-th step: before and after each call that counts."""
    left = [step]

    def count() -> None:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    def watched(call: Callable) -> Callable:
        def run(*args, **kwargs):
            count()
            result = call(*args, **kwargs)
            count()
            return result

        return run

    for name in STEPS:
        setattr(os, name, watched(getattr(os, name)))
    locks.fcntl.flock = watched(locks.fcntl.flock)
    Path.unlink = watched(Path.unlink)
    add, finish = SealedWriter.add, SealedWriter.finish

    def add_in_pieces(writer: SealedWriter, name: str, tensor) -> None:
        count()
        add(writer, name, tensor)
        writer._file.flush()  # the kernel has one tensor of two
        count()

    SealedWriter.add = add_in_pieces
    SealedWriter.finish = watched(finish)


def run(
    directory: Path, generation: int, max_bytes: int | None, step: int, delay: float
) -> list[int] | None:
    """Let a writer write until it is killed; return what it acknowledged, None if it got through.

    Args:
        directory: of the blocks.
        generation: of what it writes.
        max_bytes: bound on the directory.
        step: at which it kills itself; 0 is never.
        delay: seconds until it is killed from outside.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        if step:
            die_at(step)
        write(directory, writer, generation, max_bytes)
        os._exit(0)
    os.close(writer)
    if not step:
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
    with open(reader, "rb") as pipe:
        acknowledged = list(pipe.read())
    _, status = os.waitpid(child, 0)
    return acknowledged if os.WIFSIGNALED(status) else None


class Witness:
    """Remember what was acknowledged, and hold it against what the next process finds."""

    def __init__(self, directory: Path, max_bytes: int | None) -> None:
        self.directory, self.max_bytes = directory, max_bytes
        self.oldest = dict.fromkeys(range(NUM_KEYS), 0)  # generation that a block may still have
        self.found = self.acknowledged = 0

    def check(self, generation: int, acknowledged: list[int]) -> None:
        """Look at the directory after a writer of ``generation`` has died."""
        self.acknowledged += len(acknowledged)
        self.oldest |= dict.fromkeys(acknowledged, generation)
        files = BlockFiles(self.directory, FINGERPRINT, self.max_bytes)
        names = [path.name for path in self.directory.iterdir()]
        assert not [name for name in names if name.endswith(".tmp")], names
        assert self.max_bytes is None or files.num_bytes() <= self.max_bytes
        for key, oldest in self.oldest.items():
            block = files.get(key_of(key))
            if block is None:
                # One place is the block's that is being written, one its predecessor's.
                newest = acknowledged[-BLOCKS_THAT_FIT + 2 :]
                must_be_there = key in newest if self.max_bytes else oldest > 0
                assert not must_be_there, f"block {key} was acknowledged and is lost"
                continue
            self.found += 1
            possible = [as_bytes(content(key, g)) for g in range(oldest, generation + 1)]
            assert as_bytes(block.tensors) in possible, f"block {key} is wrong"
        names = [path.name for path in self.directory.iterdir()]
        assert not [name for name in names if name.endswith(".damaged")], names


def as_bytes(tensors: dict[str, RawTensor]) -> dict:
    """Return tensors in a form that can be compared."""
    return {name: (t.dtype, tuple(t.shape), bytes(t.data)) for name, t in tensors.items()}


def kill_writers(directory: Path, random_runs: int) -> None:
    """Kill writers at every step, then at random moments, without and with a bound."""
    choose = random.Random(0)
    bound = BLOCKS_THAT_FIT * (file_size(directory) + 50)  # they compress a little differently
    totals = {"killed_at_steps": 0, "killed_at_random": 0, "acknowledged": 0, "found": 0}
    for name, max_bytes in (("free", None), ("bounded", bound)):
        witness = Witness(directory / name, max_bytes)
        generation, acknowledged = 0, []
        while acknowledged is not None:  # each step of a whole life once
            generation += 1
            acknowledged = run(witness.directory, generation, max_bytes, generation, 0)
            witness.check(generation, ALL if acknowledged is None else acknowledged)
        totals["killed_at_steps"] += generation - 1
        began = time.monotonic()
        generation += 1
        assert run(witness.directory, generation, max_bytes, 10**9, 0) is None
        life = time.monotonic() - began
        killed = 0
        while killed < random_runs:
            generation += 1
            delay = choose.uniform(0, life)
            acknowledged = run(witness.directory, generation, max_bytes, 0, delay)
            witness.check(generation, ALL if acknowledged is None else acknowledged)
            if acknowledged is None:
                life *= 0.9  # it was measured when the machine was busier
            else:
                killed += 1
        totals["killed_at_random"] += killed
        totals["acknowledged"] += witness.acknowledged
        totals["found"] += witness.found
    print(json.dumps(totals))


def write_beside_others(directory: Path, times: int, max_bytes: int) -> None:
    """Write every block again and again; what is read back meanwhile is whole, or missing."""
    files = BlockFiles(directory, FINGERPRINT, max_bytes)
    for _ in range(times):
        for key in range(NUM_KEYS):
            assert files.put(key_of(key), content(key, 0))
            block = files.get(key_of(key))
            assert block is None or as_bytes(block.tensors) == as_bytes(content(key, 0))


if __name__ == "__main__":
    assert "torch" not in sys.modules, "the store must not need torch"
    action = {"kill": kill_writers, "write": write_beside_others}[sys.argv[1]]
    action(Path(sys.argv[2]), *map(int, sys.argv[3:]))
