"""Sealed files: safetensors files in which no changed bit goes unnoticed.

The header of a safetensors file is JSON and has room for strings of one's own. There, in this
order, a sealed file keeps::

    checksum   SHA-256 of the length and the header, these 64 digits taken as zeros
    kind       what the file is, with the version of its format: "omlx_cache block 1"
    tensors    JSON: each tensor's SHA-256, as stored, and how it was encoded
    ...        what the writer adds

so that the header vouches for every tensor. Nothing lies between or behind the tensors. Any reader
of safetensors can open the file, and finds compressed tensors as bytes (U8).

The seal guards against accidents: truncation, bits that flip, another program's file. It is no
signature. Reading runs no code from the file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from typing import BinaryIO

from omlx_cache.storage.codec import EncodedTensor, RawTensor, decode

_BEFORE_CHECKSUM = b'{"__metadata__":{"checksum":"'
_ZEROS = b"0" * 64
_LENGTH = 8  # bytes of the header's length, little-endian
_MAX_HEADER = 64 * 2**20
_ROOM_PER_TENSOR = 512  # for one tensor's numbers, digits and quotes


class SealedError(ValueError):
    """A file is not what it should be; the message says in which way."""


class SealedWriter:
    """Write a sealed file, one tensor after the other.

    Args:
        file: opened for writing, empty, seekable.
        kind: what the file is, and the version of its format.
        metadata: strings to keep in the header.
        names: of the tensors that will be added; the header's room is set aside for them.

    Raises:
        ValueError: the metadata leaves no room, or has a name that the header itself uses.
    """

    def __init__(
        self, file: BinaryIO, kind: str, metadata: Mapping[str, str], names: Collection[str]
    ) -> None:
        if {"checksum", "kind", "tensors"} & set(metadata):
            raise ValueError("SealedWriter: metadata must not be named checksum, kind or tensors")
        self._file, self._kind, self._metadata = file, kind, dict(metadata)
        self._room = header_room(kind, metadata, names)
        if self._room > _MAX_HEADER:
            raise ValueError(
                f"SealedWriter: metadata must fit into a header of {_MAX_HEADER} bytes, got "
                f"{self._room}"
            )
        self._entries: dict[str, dict] = {}
        self._notes: dict[str, dict] = {}
        self._end = 0  # of the tensors so far
        file.seek(_LENGTH + self._room)

    def add(self, name: str, tensor: EncodedTensor) -> None:
        """Write the next tensor."""
        digest = hashlib.sha256()
        for chunk in tensor.chunks:
            digest.update(chunk)
            self._file.write(chunk)
        begin, self._end = self._end, self._end + tensor.num_bytes
        plain = not tensor.planes
        self._entries[name] = {
            "dtype": tensor.dtype if plain else "U8",
            "shape": list(tensor.shape) if plain else [tensor.num_bytes],
            "data_offsets": [begin, self._end],
        }
        self._notes[name] = {"sha256": digest.hexdigest()}
        if not plain:
            planes = [[int(compressed), size] for compressed, size in tensor.planes]
            self._notes[name] |= {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "planes": planes,
            }

    def finish(self) -> None:
        """Write the header; then the file is whole, and its content on its way to the disk."""
        metadata = {
            "checksum": _ZEROS.decode(),
            "kind": self._kind,
            "tensors": _json(self._notes),
            **self._metadata,
        }
        header = _json({"__metadata__": metadata, **self._entries}).encode()
        if len(header) > self._room:
            raise ValueError("SealedWriter: the tensors must be the ones that room was made for")
        length = self._room.to_bytes(_LENGTH, "little")
        header = header.ljust(self._room)
        digest = hashlib.sha256(length + header).hexdigest().encode()
        self._file.seek(0)
        self._file.write(length + header.replace(_ZEROS, digest, 1))
        self._file.flush()


def header_room(kind: str, metadata: Mapping[str, str], names: Collection[str]) -> int:
    """Return the bytes that a file's header takes, behind its length."""
    own = len(_json([kind, dict(metadata)]).encode()) + 256
    # In the notes, which are JSON in a string in JSON, a name's own escapes are escaped again.
    listed = sum(4 * len(_json(name)) + _ROOM_PER_TENSOR for name in names)
    return -(-(own + listed) // 8) * 8


def sealed_size(
    kind: str, metadata: Mapping[str, str], tensors: Mapping[str, EncodedTensor]
) -> int:
    """Return the bytes of the file that a `SealedWriter` makes."""
    content = sum(tensor.num_bytes for tensor in tensors.values())
    return _LENGTH + header_room(kind, metadata, tensors) + content


class SealedReader:
    """Read a sealed file; everything that it returns has been checked.

    Args:
        file: opened for reading, unbuffered or not, seekable.
        kind: what the file must be.

    Attributes:
        metadata: the strings that the writer added.
        names: of the tensors.

    Raises:
        SealedError: the file is another one, or damaged.
        OSError: it can't be read.
    """

    def __init__(self, file: BinaryIO, kind: str) -> None:
        self._file = file
        header = _checked_header(file)
        metadata = header.pop("__metadata__")
        if metadata["kind"] != kind:
            raise SealedError(f"it must be {kind!r}, and is {metadata['kind']!r}")
        self._notes = json.loads(metadata["tensors"])
        self._entries = header
        self.names = list(header)
        self.metadata = {
            name: value
            for name, value in metadata.items()
            if name not in ("checksum", "kind", "tensors")
        }
        self._begin = file.tell()
        content = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        size = os.fstat(file.fileno()).st_size
        if size != self._begin + content:
            raise SealedError(f"it must have {self._begin + content} bytes, and has {size}")

    def read(self, name: str) -> RawTensor:
        """Read and decode one tensor.

        Raises:
            KeyError: there is none of this name.
            SealedError: its bytes are not those that were written.
            OSError: it can't be read.
        """
        entry, note = self._entries[name], self._notes[name]
        begin, end = entry["data_offsets"]
        self._file.seek(self._begin + begin)
        data = self._file.read(end - begin)
        if hashlib.sha256(data).hexdigest() != note["sha256"]:
            raise SealedError(f"the content of tensor {name!r} has changed")
        dtype, shape = note.get("dtype", entry["dtype"]), note.get("shape", entry["shape"])
        try:
            return decode(dtype, shape, note.get("planes", ()), data)
        except ValueError as error:
            raise SealedError(f"tensor {name!r}: {error}") from error


def _checked_header(file: BinaryIO) -> dict:
    length = file.read(_LENGTH)
    room = int.from_bytes(length, "little")
    size = os.fstat(file.fileno()).st_size
    if len(length) < _LENGTH or room > min(_MAX_HEADER, size - _LENGTH):
        raise SealedError(f"it is truncated, or no file of omlx_cache ({size} bytes)")
    header = file.read(room)
    begin = len(_BEFORE_CHECKSUM)
    if not header.startswith(_BEFORE_CHECKSUM):
        raise SealedError("it is no file of omlx_cache")
    found = header[begin : begin + len(_ZEROS)]
    zeroed = header[:begin] + _ZEROS + header[begin + len(_ZEROS) :]
    if hashlib.sha256(length + zeroed).hexdigest().encode() != found:
        raise SealedError("its header has changed")
    return json.loads(header)


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
