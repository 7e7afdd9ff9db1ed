"""Files that appear whole or not at all."""

from __future__ import annotations

import errno
import glob
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from omlx_cache.storage.locks import is_abandoned, is_at, try_lock


def sync_directory(directory: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write a file that takes the place of ``path`` once the block ends, and not when it raises.

    Afterwards it is on the disk, under its name. What a writer that was killed has left beside
    ``path`` is removed.

    Raises:
        OSError: it can't be written; ``path`` is as it was.
    """
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        if is_abandoned(leftover):
            leftover.unlink(missing_ok=True)
    temporary, file = _locked_temporary(path)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def _locked_temporary(path: Path) -> tuple[Path, BinaryIO]:
    while True:
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
        file = open(temporary, "xb")  # noqa: SIM115 -- closed by the caller
        # Before it was locked, another writer may have taken it for abandoned.
        if try_lock(file.fileno()) and is_at(file.fileno(), temporary):
            return temporary, file
        file.close()


def allocate(descriptor: int, size: int) -> None:
    """Take ``size`` bytes of the disk for a file; where that can't be, only set its length."""
    if not hasattr(os, "posix_fallocate"):  # macOS
        os.ftruncate(descriptor, size)
        return
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(descriptor, size)
