"""The launch policy: plain numbers, no torch; and the byte permutation that only PTX runs."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlx_kernels.launch import (
    SPLIT_SIZES,
    TileConfig,
    blocks_per_split,
    decode_config,
    extend_config,
)


def test_needs_neither_torch_nor_triton():
    source = (
        "import sys, importlib.util as u\n"
        "s = u.find_spec('omlx_kernels.launch'); m = u.module_from_spec(s)\n"
        "sys.modules[s.name] = m; s.loader.exec_module(m)\n"
        "assert 'torch' not in sys.modules and 'triton' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", source], check=True)


def test_importing_touches_no_driver():
    pytest.importorskip("triton", reason="no triton for this platform")
    source = (
        "import sys, omlx_kernels, omlx_kernels.ops\n"
        "assert 'triton' not in sys.modules\n"
        "import omlx_kernels.triton\n"
        "from triton.runtime.driver import driver\n"
        "assert driver._default is None and driver._active is None\n"
    )
    subprocess.run([sys.executable, "-c", source], check=True)


@given(st.lists(st.integers(0, 600), max_size=40), st.integers(1, 64), st.integers(1, 200))
def test_split_size_is_legal(rows, programs, sms):
    assert blocks_per_split(rows, programs, sms) in SPLIT_SIZES


def test_a_long_chat_fills_the_device_and_a_large_batch_splits_little():
    one = blocks_per_split([1, 127], programs_per_split=8, num_sms=132)
    many = blocks_per_split([1, 127] * 64, programs_per_split=8, num_sms=132)
    assert 8 * (127 / one) > 132
    assert many > one


@pytest.mark.parametrize(
    "target", [("cuda", 80), ("cuda", 90), ("hip", "gfx942"), ("interpreter", 0)]
)
@pytest.mark.parametrize("block_d", [32, 64, 128, 256])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_tiles_divide_blocks(target, block_d, dtype):
    for config in (
        decode_config(target, block_d, dtype, 4),
        extend_config(target, block_d, dtype, 4096),
        extend_config(target, block_d, dtype, 2),
    ):
        assert 64 % config.block_n == 0
        assert config.block_m >= 16


@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("block_d", [64, 128, 256])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("rows", [1, 16, 20, 64, 4096])
def test_extend_does_not_compute_rows_twice(arch, block_d, padded, rows):
    config = extend_config(("cuda", arch), block_d, "bfloat16", rows, padded)
    assert config.block_m <= max(16, 2 * rows)
    if config.block_m >= block_d:  # warps share out the rows, 16 each
        assert config.num_warps * 16 <= config.block_m


def test_options_leave_out_what_is_not_set():
    assert TileConfig(16, 32, 4, 2).options() == {"num_warps": 4, "num_stages": 2}
    assert TileConfig(16, 32, 4, 2, 168).options()["maxnreg"] == 168
    # AMD's compiler does not know the option.
    assert "maxnreg" not in decode_config(("hip", "gfx942"), 128, "float32", 4).options()


def test_byte_permutation_equals_the_portable_path():
    codes = pytest.importorskip("omlx_kernels.triton.codes")
    halves = {}
    for register, selector in re.findall(
        r"prmt\.b32 \$(\d), \$2, 0x64646464, 0x([0-9a-f]{4});", codes.PERMUTE_BYTES.value
    ):
        halves[register] = [int(digit, 16) for digit in reversed(selector)]
    assert halves.keys() == {"0", "1"}
    words = (0x12AB, 0xFF00)
    source = b"".join(w.to_bytes(2, "little") for w in words) + b"\x64" * 4
    for register, shift in (("0", 0), ("1", 8)):
        permuted = bytes(source[i] for i in halves[register])
        got = [int.from_bytes(permuted[i : i + 2], "little") for i in (0, 2)]
        assert got == [0x6400 | (w >> shift & 0xFF) for w in words]


def test_nibbles_are_spread_as_on_the_portable_path():
    codes = pytest.importorskip("omlx_kernels.triton.codes")
    operations = re.findall(
        r"lop3\.b32 \$(\d), (\$4|high), 0x([0-9A-F]{8}), 0x([0-9A-F]{8}), 0xEA;",
        codes.SPREAD_NIBBLES.value,
    )
    assert "shr.u32 high, $4, 8;" in codes.SPREAD_NIBBLES.value
    assert [op[0] for op in operations] == ["0", "1", "2", "3"]
    words = 0x12AB, 0xF7E0
    pair = words[0] | words[1] << 16
    for (_, source, mask, bits), shift in zip(operations, (0, 4, 8, 12), strict=True):
        # 0xEA is the truth table of (a & b) | c.
        got = ((pair >> 8 if source == "high" else pair) & int(mask, 16)) | int(bits, 16)
        for i, word in enumerate(words):
            nibble = word >> shift & 15
            assert got >> 16 * i & 0xFFFF == 0x6400 | nibble << (shift % 8)
