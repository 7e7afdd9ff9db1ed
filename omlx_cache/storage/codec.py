"""Lossless compression of a tensor at rest: byte planes, each with zstandard where that pays.

A tensor of ``n``-byte elements is split into ``n`` planes: plane ``i`` holds byte ``i`` of every
element. For codes (one byte) that is the tensor itself; for 16- and 32-bit floats it puts the
exponents, which repeat, apart from the mantissas, which don't. A plane is compressed where that
saves at least `MIN_SAVING`, and stored as it is where it doesn't.

Delta coding along the tokens, channel by channel, was measured against this on a real cache
(``bench/bench_codec.py``; ``bench/results/codec.json``) and is left out. It makes 8-bit keys, all
values and 16-bit floats larger: rotated keys differ from token to token in most channels, and codes
whose scale follows the data look like noise already. 4-bit keys and the scales of values get a
little smaller, which is less than 1 % of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import zstandard

LEVEL = 1
"""Of zstandard. There are next to no repetitions to be found, which is what higher levels look for:
they are slower and not smaller."""

MIN_SAVING = 1 / 32
"""Of a plane's bytes; below, reading it back would cost more than it saves."""

ITEM_SIZE = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F16": 2,
    "BF16": 2,
    "F32": 4,
    "I32": 4,
    "I64": 8,
}
"""Bytes of an element, by the name of its dtype in safetensors."""

Buffer = bytes | memoryview | np.ndarray


@dataclass(frozen=True)
class RawTensor:
    """A tensor as bytes.

    Attributes:
        dtype: a key of `ITEM_SIZE`.
        shape: elements of each axis.
        data: its bytes, row-major, little-endian.
    """

    dtype: str
    shape: tuple[int, ...]
    data: Buffer

    @property
    def num_bytes(self) -> int:
        """Bytes that dtype and shape ask for."""
        return prod(self.shape) * ITEM_SIZE[self.dtype]


@dataclass(frozen=True)
class EncodedTensor:
    """A tensor as it is stored.

    Attributes:
        dtype, shape: of the tensor.
        planes: (whether it is compressed, its bytes) of each plane; empty: stored as it is.
        chunks: what is stored, in this order.
    """

    dtype: str
    shape: tuple[int, ...]
    planes: tuple[tuple[bool, int], ...]
    chunks: tuple[Buffer, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that are stored."""
        return sum(memoryview(chunk).nbytes for chunk in self.chunks)


def encode(tensor: RawTensor, compress: bool = True) -> EncodedTensor:
    """Compress a tensor.

    Args:
        tensor: what to store.
        compress: False stores it as it is.

    Example:
        >>> zeros = RawTensor("F16", (2, 500), bytes(2000))
        >>> encoded = encode(zeros)
        >>> encoded.num_bytes < 100
        True
        >>> decode(encoded.dtype, encoded.shape, encoded.planes, b"".join(encoded.chunks)) == zeros
        True
    """
    if not compress or not tensor.num_bytes:
        return EncodedTensor(tensor.dtype, tensor.shape, (), (tensor.data,))
    elements = np.frombuffer(tensor.data, np.uint8).reshape(-1, ITEM_SIZE[tensor.dtype])
    compressor = zstandard.ZstdCompressor(level=LEVEL)
    planes: list[tuple[bool, int]] = []
    chunks: list[Buffer] = []
    for i in range(elements.shape[1]):
        plane = np.ascontiguousarray(elements[:, i])
        small = compressor.compress(plane.data)
        pays = bool(len(small) <= plane.nbytes * (1 - MIN_SAVING))
        chunks.append(small if pays else plane)
        planes.append((pays, len(small) if pays else plane.nbytes))
    if not any(is_compressed for is_compressed, _ in planes):
        return EncodedTensor(tensor.dtype, tensor.shape, (), (tensor.data,))
    return EncodedTensor(tensor.dtype, tensor.shape, tuple(planes), tuple(chunks))


def decode(
    dtype: str, shape: Sequence[int], planes: Sequence[Sequence[int]], data: Buffer
) -> RawTensor:
    """Undo `encode`.

    Args:
        dtype, shape, planes: of the `EncodedTensor`.
        data: its chunks, one after the other.

    Raises:
        ValueError: when the bytes can't be what `encode` made of such a tensor.
    """
    tensor = RawTensor(dtype, tuple(shape), data)
    view = memoryview(data).cast("B")
    stored = sum(size for _, size in planes) if planes else tensor.num_bytes
    if view.nbytes != stored or len(planes) not in (0, ITEM_SIZE[dtype]):
        raise ValueError(
            f"decode: the data of {dtype} {tuple(shape)} must be {stored} bytes in "
            f"{ITEM_SIZE[dtype]} planes, got {view.nbytes} in {len(planes)}"
        )
    if not planes:
        return tensor
    count = prod(shape)
    elements = np.empty((count, len(planes)), np.uint8)
    begin = 0
    for i, (is_compressed, size) in enumerate(planes):
        chunk = view[begin : begin + size]
        begin += size
        elements[:, i] = _plane(chunk, bool(is_compressed), count)
    return RawTensor(dtype, tuple(shape), elements.reshape(-1).data)


def _plane(chunk: memoryview | bytes, is_compressed: bool, count: int) -> np.ndarray:
    if is_compressed:
        try:
            chunk = zstandard.ZstdDecompressor().decompress(chunk, max_output_size=count)
        except zstandard.ZstdError as error:
            raise ValueError(f"decode: a plane can't be decompressed: {error}") from error
    if len(chunk) != count:
        raise ValueError(f"decode: a plane must have {count} bytes, got {len(chunk)}")
    return np.frombuffer(chunk, np.uint8)
