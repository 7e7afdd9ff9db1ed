"""Blocks on disk: one sealed file a block, in a directory that several processes may share.

What holds at every moment, whatever is killed or fails:

* `BlockFiles.put` returns True only when the block is on the disk, under its name, and `get` then
  finds it, in this process or the next, until it is evicted for a newer one.
* `get` returns what was put, or None. A file that is damaged, or another model's, is reported, set
  aside under another name and from then on a miss.
* The directory never holds more than ``max_bytes``; see `BoundedDirectory`.
* A disk that is full, or a directory that can't be written to, is one warning; then `put` returns
  False, and what is there goes on being served.

A file's name is the hash of its key and fingerprint, so two processes that store one block store
the same.
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

from omlx_cache.storage.bounded_directory import BoundedDirectory
from omlx_cache.storage.codec import RawTensor, encode
from omlx_cache.storage.sealed import SealedError, SealedReader, SealedWriter, sealed_size

logger = logging.getLogger(__name__)

T = TypeVar("T")

KIND = "omlx_cache block 1"


@dataclass(frozen=True)
class FoundBlock:
    """What `BlockFiles.get` found.

    Attributes:
        tensors: as they were put.
        metadata: as it was put.
    """

    tensors: dict[str, RawTensor]
    metadata: dict[str, str]


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
        self._directory = BoundedDirectory(Path(directory), max_bytes)
        self._fingerprint = fingerprint
        self._warned: set[str] = set()
        try:
            self._directory.open()
        except OSError as error:
            self._warn("write", error)

    @property
    def directory(self) -> Path:
        """Where the blocks are."""
        return self._directory.path

    @property
    def max_bytes(self) -> int | None:
        """Bound on the directory's content; None is no bound."""
        return self._directory.max_bytes

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
        size = sealed_size(KIND, metadata, encoded)
        try:
            with self._directory.replacing(self._path(key), size) as file:
                writer = SealedWriter(file, KIND, metadata, encoded)
                for name, tensor in encoded.items():
                    writer.add(name, tensor)
                writer.finish()
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
            self._directory.mark_used(self._path(key))

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
            self._directory.mark_used(file.fileno())
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
            return self._directory.num_bytes()
        except OSError:
            return 0

    def _path(self, key: bytes) -> Path:
        whole = len(key).to_bytes(8, "little") + key + self._fingerprint
        return self._directory.path_of(hashlib.sha256(whole).hexdigest()[:40])

    def _check(self, sealed: SealedReader, key: bytes) -> None:
        for name, expected in (("fingerprint", self._fingerprint), ("key", key)):
            found = sealed.metadata.get(name)
            if found != expected.hex():
                raise SealedError(f"it must have the {name} {expected.hex()}, and has {found}")

    def _set_aside(self, path: Path, descriptor: int, error: SealedError) -> None:
        """Report a file that can't be trusted, and rename it, unless it has been replaced."""
        logger.warning("disk cache: %s is set aside and not used: %s", path, error)
        try:
            self._directory.set_aside(path, descriptor)
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
