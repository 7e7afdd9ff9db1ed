"""Blocks on disk: one sealed file a block, in a directory that several processes may share.

What holds at every moment, whatever is killed or fails:

* `BlockFiles.put` returns True only when the block is on the disk, under its name, and `get` then
  finds it, in this process or the next, until it is evicted for a newer one.
* `get` returns what was put, or None. A file that is damaged, or another model's, is reported, set
  aside under another name and from then on a miss.
* The directory never holds more than ``max_bytes``, unfinished and set-aside files counted.
* A disk that is full, or a directory that can't be written to, is one warning; then `put` returns
  False, and what is there goes on being served.

A file's name is the hash of its key and fingerprint, so two processes that store one block store
the same. A file is written under a temporary name, which its writer keeps locked: a temporary file
that nobody has locked was left by a process that died, whatever the clocks say. The modification
time of a finished file isn't a time: it counts the uses of the directory's blocks, so that the one
unused for longest has the lowest, and no clock is asked.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from omlx_cache.storage.atomic import allocate, sync_directory
from omlx_cache.storage.codec import EncodedTensor, RawTensor, encode
from omlx_cache.storage.locks import is_abandoned, is_at, locked, try_lock
from omlx_cache.storage.sealed import SealedError, SealedReader, SealedWriter, sealed_size

logger = logging.getLogger(__name__)

T = TypeVar("T")

KIND = "omlx_cache block 1"
_BLOCK, _TEMPORARY, _DAMAGED = ".safetensors", ".tmp", ".damaged"
_PREFIX = "block-"
_NS_PER_STAMP = 1000  # file systems keep at least microseconds (or whole seconds: then all tie)
_MAX_STAMP = 2**52  # a file dated later than that was not stamped by us; it counts as the oldest


@dataclass(frozen=True)
class FoundBlock:
    """What `BlockFiles.get` found.

    Attributes:
        tensors: as they were put.
        metadata: as it was put.
    """

    tensors: dict[str, RawTensor]
    metadata: dict[str, str]


@dataclass(frozen=True)
class _Entry:
    """A file of the directory that is ours."""

    path: Path
    size: int
    stamp: int


class BlockFiles:
    """A directory of blocks, found by key.

    Args:
        directory: made if it isn't there.
        fingerprint: of what the blocks depend on (model, format); blocks of others are never
            returned, though they share the directory and its bound.
        max_bytes: bound on the directory's content; None is no bound.

    Raises:
        ValueError: when ``max_bytes`` is not positive.

    Example:
        >>> import tempfile
        >>> from omlx_cache.storage.codec import RawTensor
        >>> files = BlockFiles(tempfile.mkdtemp(), fingerprint=b"a model")
        >>> files.put(b"key", {"k": RawTensor("U8", (2, 2), b"1234")}, {"tier": "k8v8"})
        True
        >>> files.get(b"key").metadata, files.get(b"another key")
        ({'tier': 'k8v8'}, None)
    """

    def __init__(
        self, directory: str | os.PathLike[str], fingerprint: bytes, max_bytes: int | None = None
    ) -> None:
        if max_bytes is not None and max_bytes <= 0:
            raise ValueError(
                f"BlockFiles: max_bytes must be positive, got {max_bytes}; None is no bound"
            )
        self.directory = Path(directory)
        self.max_bytes = max_bytes
        self._fingerprint = fingerprint
        self._stamp = 0  # the highest that was seen or given
        self._warned: set[str] = set()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with locked(self.directory):
                self._scan()
        except OSError as error:
            self._warn("write", error)

    def put(
        self,
        key: bytes,
        tensors: Mapping[str, RawTensor],
        metadata: Mapping[str, str] | None = None,
    ) -> bool:
        """Store a block; one that was stored under this key is replaced.

        Args:
            key: what finds the block again: of any length, 16 bytes of a good hash or more.
            tensors: its content.
            metadata: strings to keep with it.

        Returns:
            Whether it is on the disk. False, after one warning, when it can't be stored.
        """
        metadata = {
            "fingerprint": self._fingerprint.hex(),
            "key": key.hex(),
            **{f"user.{name}": value for name, value in (metadata or {}).items()},
        }
        encoded = {name: encode(tensor) for name, tensor in tensors.items()}
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._write(self._path(key), metadata, encoded)
        except OSError as error:
            self._warn("write", error)
            return False
        return True

    def get(self, key: bytes) -> FoundBlock | None:
        """Return the block that was put under ``key``; None when it is not there, or not whole."""
        return self._open(key, self._read_whole)

    def peek(self, key: bytes) -> dict[str, str] | None:
        """Return the metadata of the block under ``key``; None when `get` would find none.

        The block's content isn't read, so it may turn out to be damaged.
        """
        return self._open(key, lambda sealed, file: _own_metadata(sealed))

    def touch(self, key: bytes) -> None:
        """Make a block, if it is there, the one that was used last."""
        with suppress(OSError):  # on a read-only disk the order of use can't be kept
            os.utime(self._path(key), ns=self._next_stamp())

    def _open(self, key: bytes, read: Callable[[SealedReader, BinaryIO], T]) -> T | None:
        path = self._path(key)
        try:
            with open(path, "rb") as file:
                try:
                    sealed = SealedReader(file, KIND)
                    self._check(sealed, key)
                    return read(sealed, file)
                except SealedError as error:
                    self._set_aside(path, file.fileno(), error)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._warn("read", error)
        return None

    def _read_whole(self, sealed: SealedReader, file: BinaryIO) -> FoundBlock:
        tensors = {name: sealed.read(name) for name in sealed.names}
        with suppress(OSError):
            os.utime(file.fileno(), ns=self._next_stamp())
        return FoundBlock(tensors, _own_metadata(sealed))

    def __contains__(self, key: bytes) -> bool:
        """Whether there is a file for ``key``; only `get` finds out whether it is whole."""
        return self._path(key).is_file()

    def discard(self, key: bytes) -> None:
        """Remove a block, if it is there."""
        try:
            self._path(key).unlink(missing_ok=True)
        except OSError as error:
            self._warn("write", error)

    def num_bytes(self) -> int:
        """Bytes of the directory's blocks, unfinished and set-aside files counted."""
        try:
            return sum(entry.size for entry in self._entries())
        except OSError:
            return 0

    def _path(self, key: bytes) -> Path:
        whole = len(key).to_bytes(8, "little") + key + self._fingerprint
        return self.directory / f"{_PREFIX}{hashlib.sha256(whole).hexdigest()[:40]}{_BLOCK}"

    def _check(self, sealed: SealedReader, key: bytes) -> None:
        for name, expected in (("fingerprint", self._fingerprint), ("key", key)):
            found = sealed.metadata.get(name)
            if found != expected.hex():
                raise SealedError(f"it must have the {name} {expected.hex()}, and has {found}")

    def _write(
        self, path: Path, metadata: dict[str, str], tensors: dict[str, EncodedTensor]
    ) -> None:
        size = sealed_size(KIND, metadata, tensors)
        temporary = path.with_name(f"{path.stem}.{os.getpid()}.{os.urandom(4).hex()}{_TEMPORARY}")
        try:
            with open(self._reserve(path, temporary, size), "wb") as file:
                writer = SealedWriter(file, KIND, metadata, tensors)
                for name, tensor in tensors.items():
                    writer.add(name, tensor)
                writer.finish()
                os.fsync(file.fileno())
                with locked(self.directory):  # so that nobody sets the new file aside for the old
                    os.utime(file.fileno(), ns=self._next_stamp())
                    os.replace(temporary, path)
            sync_directory(self.directory)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

    def _reserve(self, path: Path, temporary: Path, size: int) -> int:
        """Make a locked file of ``size`` bytes, evicting what must go for it; return it open.

        The bytes are taken from the disk before anything is written, so a disk that is full says
        so here.
        """
        with locked(self.directory):
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
        with os.scandir(self.directory) as listing:
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

    def _set_aside(self, path: Path, descriptor: int, error: SealedError) -> None:
        """Report a file that can't be trusted, and rename it, unless it has been replaced."""
        logger.warning("disk cache: %s is set aside and not used: %s", path, error)
        try:
            with locked(self.directory):
                if is_at(descriptor, path):
                    os.replace(path, path.with_name(path.name + _DAMAGED))
        except OSError as failure:
            self._warn("write", failure)

    def _warn(self, action: str, error: OSError) -> None:
        if action in self._warned:
            return
        self._warned.add(action)
        then = {
            "write": "blocks that can't be stored are not kept; those that are there stay in use",
            "read": "blocks that can't be read are computed again",
        }[action]
        logger.warning("disk cache: can't %s in %s: %s; %s", action, self.directory, error, then)


def _own_metadata(sealed: SealedReader) -> dict[str, str]:
    """Return what `BlockFiles.put` was given."""
    return {
        name.removeprefix("user."): value
        for name, value in sealed.metadata.items()
        if name.startswith("user.")
    }
