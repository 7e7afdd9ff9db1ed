"""Locks that die with their holder: on a directory, and on a file that is being written."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK_NAME = ".omlx_cache.lock"
LOCK_SECONDS = 5.0
"""How long to wait for a directory's lock. Its holders do a few system calls; one that was stopped
in the middle must not stop everybody else."""


def try_lock(descriptor: int) -> bool:
    """Lock an open file against everybody else, if nobody else has; closing it unlocks it.

    The kernel lets go for a process that ends, however it ends.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Keep other threads and processes out of a directory for the length of the block.

    Raises:
        TimeoutError: (an OSError) somebody else has held it for `LOCK_SECONDS`.
        OSError: the lock file can't be made, or the file system has no locks.
    """
    path = directory / LOCK_NAME
    descriptor = _take(path)
    try:
        yield
    finally:
        # Not only closed: a process forked meanwhile has the same file open, and would keep it.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _take(path: Path) -> int:
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            while not try_lock(descriptor):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{path} has been locked for {LOCK_SECONDS:g} s")
                time.sleep(0.002)
            if is_at(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # somebody deleted the file while we waited: lock its successor


def is_at(descriptor: int, path: Path) -> bool:
    """Whether ``path`` names the file that is open."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def is_abandoned(path: Path) -> bool:
    """Whether the writer of a temporary file has died."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # gone by now, or another user's
        return False
    try:
        return try_lock(descriptor)
    finally:
        os.close(descriptor)
