"""The codec gives back every bit, stores no more than it was given, and notices what is no code."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omlx_cache.storage.codec import ITEM_SIZE, LEVEL, RawTensor, decode, encode
from omlx_cache.storage.tensors import DTYPES, from_raw, to_raw


def round_trip(tensor: RawTensor, compress: bool = True) -> RawTensor:
    encoded = encode(tensor, compress)
    assert encoded.num_bytes <= tensor.num_bytes
    if encoded.planes:
        assert sum(size for _, size in encoded.planes) == encoded.num_bytes
    data = b"".join(map(bytes, encoded.chunks))
    return decode(encoded.dtype, encoded.shape, encoded.planes, data)


@given(
    st.sampled_from(sorted(ITEM_SIZE)),
    st.lists(st.integers(0, 9), max_size=4),
    st.sampled_from(["noise", "zeros", "few values"]),
    st.booleans(),
)
def test_every_bit_comes_back(dtype, shape, content, compress):
    size = ITEM_SIZE[dtype] * int(np.prod(shape))
    noise = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    data = {"noise": noise, "zeros": noise * 0, "few values": noise % 3}[content].tobytes()
    tensor = RawTensor(dtype, tuple(shape), data)
    back = round_trip(tensor, compress)
    assert (back.dtype, back.shape, bytes(back.data)) == (dtype, tuple(shape), data)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_torch_come_back(dtype):
    tensor = torch.randn(3, 5, 64).mul(3).to(dtype)
    if dtype.is_floating_point:
        tensor[0, 0, :4] = torch.tensor([torch.inf, -torch.inf, -0.0, torch.nan])
    back = from_raw(round_trip(to_raw(tensor.transpose(0, 1)))).transpose(0, 1)
    assert back.dtype == dtype
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))
    assert from_raw(round_trip(to_raw(tensor[:0]))).shape == (0, 5, 64)


def test_exponents_are_compressed_and_mantissas_are_not():
    values = torch.randn(256, 64).bfloat16()
    encoded = encode(to_raw(values))
    assert [is_compressed for is_compressed, _ in encoded.planes] == [False, True]
    assert values.numel() * 2 / encoded.num_bytes > 1.3


def test_what_gets_no_smaller_is_stored_as_it_is_without_a_copy():
    codes = torch.randint(0, 256, (64, 64), dtype=torch.uint8)
    raw = to_raw(codes)
    encoded = encode(raw)
    assert not encoded.planes
    assert encoded.chunks[0] is raw.data
    narrow = torch.randn(256, 64).mul(10).round().to(torch.int8)
    assert encode(to_raw(narrow)).num_bytes < 0.8 * narrow.numel()


def test_what_encode_did_not_make_is_refused():
    tensor = to_raw(torch.zeros(100, dtype=torch.float16))
    encoded = encode(tensor)
    data = b"".join(map(bytes, encoded.chunks))
    with pytest.raises(ValueError, match="must be"):
        decode("F16", (100,), encoded.planes, data + b"\0")
    with pytest.raises(ValueError, match="planes"):
        decode("U8", (100,), encoded.planes, data)
    with pytest.raises(ValueError, match="200 bytes"):
        decode("F16", (100,), (), data)
    with pytest.raises(ValueError, match="a plane"):
        decode("F16", (99,), encoded.planes, data)
    with pytest.raises(ValueError, match="a plane"):
        decode("F16", (101,), encoded.planes, data)
    with pytest.raises(ValueError, match="can't be decompressed"):
        decode("F16", (100,), encoded.planes, b"x" + data[1:])


def test_a_higher_level_would_not_help():
    """What zstandard's level looks for, repetitions, codes don't have: the reason for `LEVEL`."""
    import zstandard

    codes = torch.randn(256, 192).mul(20).round().clamp(-128, 127).to(torch.int8).numpy().tobytes()
    sizes = [len(zstandard.ZstdCompressor(level=n).compress(codes)) for n in (LEVEL, 9)]
    assert sizes[0] <= 1.02 * sizes[1]
