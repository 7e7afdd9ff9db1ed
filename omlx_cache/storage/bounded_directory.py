"""A directory that several processes fill with files, and that never holds more than its bound.

A file is written under a temporary name, which its writer keeps locked: a temporary file that
nobody has locked was left by a process that died, whatever the clocks say. Its bytes are taken from
the disk, and what must go for it is evicted, before anything is written. Unfinished and set-aside
files count.

The modification time of a finished file isn't a time: it counts the uses of the directory's files,
so that the one unused for longest has the lowest, and no clock is asked.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from omlx_cache.storage.atomic import allocate, sync_directory
from omlx_cache.storage.locks import is_abandoned, is_at, locked, try_lock

_BLOCK, _TEMPORARY, _DAMAGED = ".safetensors", ".tmp", ".damaged"
_PREFIX = "block-"
_NS_PER_STAMP = 1000  # file systems keep at least microseconds (or whole seconds: then all tie)
_MAX_STAMP = 2**52  # a file dated later than that was not stamped by us; it counts as the oldest


@dataclass(frozen=True)
class _Entry:
    """A file of the directory that is ours."""

    path: Path
    size: int
    stamp: int


class BoundedDirectory:
    """The files of one directory that are named as ours; all others are none of our business.

    Every method may raise OSError.

    Args:
        path: of the directory.
        max_bytes: bound on its content; None is no bound.
    """

    def __init__(self, path: Path, max_bytes: int | None) -> None:
        self.path, self.max_bytes = path, max_bytes
        self._stamp = 0  # the highest that was seen or given

    def open(self) -> None:
        """Make the directory if it isn't there, and remove what dead writers left."""
        self.path.mkdir(parents=True, exist_ok=True)
        with locked(self.path):
            self._scan()

    def path_of(self, name: str) -> Path:
        """Return the path of a finished file."""
        return self.path / f"{_PREFIX}{name}{_BLOCK}"

    def num_bytes(self) -> int:
        """Return the bytes of all files, unfinished and set-aside ones counted."""
        return sum(entry.size for entry in self._entries())

    def mark_used(self, file: Path | int) -> None:
        """Make a finished file, a path or a descriptor, the one that was used last."""
        os.utime(file, ns=self._next_stamp())

    def set_aside(self, path: Path, descriptor: int) -> None:
        """Rename a finished file that can't be trusted, unless it has been replaced.

        Args:
            path: of the file.
            descriptor: of the file as it was read.
        """
        with locked(self.path):
            if is_at(descriptor, path):
                os.replace(path, path.with_name(path.name + _DAMAGED))

    @contextmanager
    def replacing(self, path: Path, size: int) -> Iterator[BinaryIO]:
        """Write a file that is at ``path``, on the disk, when the block ends.

        Until then, and when the block raises, what was there is as it was.

        Args:
            path: of the finished file.
            size: bytes that will be written.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.stem}.{os.getpid()}.{os.urandom(4).hex()}{_TEMPORARY}")
        try:
            with open(self._reserve(path, temporary, size), "wb") as file:
                yield file
                os.fsync(file.fileno())
                with locked(self.path):  # so that nobody sets the new file aside for the old
                    self.mark_used(file.fileno())
                    os.replace(temporary, path)
            sync_directory(self.path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

    def _reserve(self, path: Path, temporary: Path, size: int) -> int:
        """Make a locked file of ``size`` bytes, evicting what must go for it; return it open.

        The bytes are taken from the disk before anything is written, so a disk that is full says
        so here.
        """
        with locked(self.path):
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            descriptor = os.open(temporary, flags, 0o666)
            try:
                if not try_lock(descriptor):
                    raise OSError(f"{temporary} was locked by somebody else")
                self._make_room(path, size)
                allocate(descriptor, size)
            except BaseException:
                os.close(descriptor)
                raise
        return descriptor

    def _make_room(self, path: Path, size: int) -> None:
        """Evict files until ``size`` bytes more fit under the bound; called under the lock."""
        if self.max_bytes is None:
            return
        if size > self.max_bytes:
            raise OSError(f"a block of {size} bytes is larger than max_bytes={self.max_bytes}")
        entries = self._scan()
        total = sum(entry.size for entry in entries)
        # What was set aside goes first; what is about to be replaced, last.
        entries = [entry for entry in entries if entry.path.suffix != _TEMPORARY]
        if total - sum(entry.size for entry in entries) + size > self.max_bytes:
            raise OSError(f"what others are writing leaves no {size} bytes of {self.max_bytes}")
        entries.sort(key=lambda e: (e.path.suffix != _DAMAGED, e.path == path, e.stamp, e.path))
        for entry in entries:
            if total + size <= self.max_bytes:
                return
            entry.path.unlink(missing_ok=True)
            total -= entry.size

    def _scan(self) -> list[_Entry]:
        """List our files, catch up with others' stamps, and remove what dead writers left.

        Called under the lock: a new temporary file is made and locked under it.
        """
        entries = []
        for entry in self._entries():
            if entry.path.suffix == _TEMPORARY:
                if is_abandoned(entry.path):
                    entry.path.unlink(missing_ok=True)
                    continue
            else:  # a temporary file has no stamp yet: it is dated by the clock
                self._stamp = max(self._stamp, entry.stamp)
            entries.append(entry)
        return entries

    def _entries(self) -> list[_Entry]:
        entries = []
        with os.scandir(self.path) as listing:
            for item in listing:
                ours = item.name.startswith(_PREFIX)
                if not ours or not item.name.endswith((_BLOCK, _TEMPORARY, _DAMAGED)):
                    continue
                try:
                    status = item.stat(follow_symlinks=False)
                except FileNotFoundError:  # another process was faster
                    continue
                stamp = status.st_mtime_ns // _NS_PER_STAMP
                entries.append(
                    _Entry(Path(item.path), status.st_size, stamp if stamp <= _MAX_STAMP else 0)
                )
        return entries

    def _next_stamp(self) -> tuple[int, int]:
        """Return the access and modification time that mark a file as the last one used."""
        self._stamp += 1
        return (self._stamp * _NS_PER_STAMP,) * 2
