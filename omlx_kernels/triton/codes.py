"""Reading codes: from the words of a block to float tiles, in registers.

Codes are read as int16 words (their scales as int32 words of two float16): 16-bit elements go
through 128-bit asynchronous copies and ldmatrix, where bytes would be fetched one by one, and all
parts of a word unpack in place. So a tile arrives in *planes*::

    8 bits   word w = codes of the channels 2w and 2w + 1
             planes (even, odd), [BLOCK_N, BLOCK_D / 2]
    4 bits   word w = codes of 2w, 2w + half, 2w + 1 and 2w + 1 + half, half = HEAD_DIM / 2
             planes (low even, low odd, high even, high odd), [BLOCK_N, BLOCK_D / 4]

`planes_of` cuts a float tile into the same planes, `assemble` undoes it. Keys leave here as values
(code * scale + zero), 4-bit values too; 8-bit values leave as codes, whose scale multiplies p.

``DTYPE`` is float16, also for bfloat16 models (bfloat16 has too few bits), or float32 for float32
models. Rows outside ``wanted`` read as code 0, and so do the scales of a tile without any.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq, is_cuda

from omlx_kernels.triton.common import INTERPRET, channels, gated, tile_mask

PERMUTE_BYTES = tl.constexpr(
    "prmt.b32 $0, $2, 0x64646464, 0x4240; prmt.b32 $1, $2, 0x64646464, 0x4341;"
)
"""PTX: two 16-bit words in, the low bytes and the high bytes out, each below a byte 0x64."""
SPREAD_NIBBLES = tl.constexpr(
    "{ .reg .b32 high; shr.u32 high, $4, 8;"
    " lop3.b32 $0, $4, 0x000F000F, 0x64006400, 0xEA;"
    " lop3.b32 $1, $4, 0x00F000F0, 0x64006400, 0xEA;"
    " lop3.b32 $2, high, 0x000F000F, 0x64006400, 0xEA;"
    " lop3.b32 $3, high, 0x00F000F0, 0x64006400, 0xEA; }"
)
"""PTX: two 16-bit words in; per nibble the two words ``0x6400 | (word & mask)`` out."""


@triton.jit
def _unpack_u8(words, DTYPE: tl.constexpr, OFFSET: tl.constexpr):
    """Return the low and the high uint8 of int16 words, minus ``OFFSET``.

    The float16 with the bits ``0x6400 | byte`` is 1024 + byte, exactly, so a byte permutation (one
    instruction for two words) and a subtraction replace every conversion.
    """
    bits = words.to(tl.uint16, bitcast=True)
    if tl.float16 != DTYPE:
        low, high = (bits & 0xFF).to(DTYPE) - OFFSET, (bits >> 8).to(DTYPE) - OFFSET
    else:
        if not INTERPRET and is_cuda():
            low, high = tl.inline_asm_elementwise(
                PERMUTE_BYTES, "=r,=r,r", [bits], dtype=(tl.float16, tl.float16),
                is_pure=True, pack=2,
            )  # fmt: skip
        else:
            low = ((bits & 0xFF) | 0x6400).to(tl.float16, bitcast=True)
            high = ((bits >> 8) | 0x6400).to(tl.float16, bitcast=True)
        low, high = low - (OFFSET + 1024.0), high - (OFFSET + 1024.0)
    return low, high


@triton.jit
def _unpack_s8(words, DTYPE: tl.constexpr):
    """Return the low and the high int8 of int16 words: flip the sign bits, subtract 128."""
    return _unpack_u8(words ^ -32640, DTYPE, 128.0)  # 0x8080


@triton.jit
def _unpack_u4(words, DTYPE: tl.constexpr):
    """Return the four nibbles of int16 words, from the lowest to the highest.

    As for bytes, ``0x6400 | nibble`` is 1024 + nibble. A nibble left four bits further up stands
    for 1024 + 16 * nibble: one multiply-add brings it down, exactly.
    """
    bits = words.to(tl.uint16, bitcast=True)
    if tl.float16 != DTYPE:
        a, b = (bits & 15).to(DTYPE), ((bits >> 4) & 15).to(DTYPE)
        c, d = ((bits >> 8) & 15).to(DTYPE), (bits >> 12).to(DTYPE)
    else:
        if not INTERPRET and is_cuda():
            a, b, c, d = tl.inline_asm_elementwise(
                SPREAD_NIBBLES, "=r,=r,=r,=r,r", [bits],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
            )  # fmt: skip
        else:
            a = ((bits & 0x0F) | 0x6400).to(tl.float16, bitcast=True)
            b = ((bits & 0xF0) | 0x6400).to(tl.float16, bitcast=True)
            c = (((bits >> 8) & 0x0F) | 0x6400).to(tl.float16, bitcast=True)
            d = (((bits >> 8) & 0xF0) | 0x6400).to(tl.float16, bitcast=True)
        a, b, c, d = a - 1024.0, b * 0.0625 - 64.0, c - 1024.0, d * 0.0625 - 64.0
    return a, b, c, d


@triton.jit
def _unpack_halves(words, DTYPE: tl.constexpr):
    """Return the low and the high float16 of int32 words."""
    low = words.to(tl.int16).to(tl.float16, bitcast=True)
    high = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return low.to(DTYPE), high.to(DTYPE)


@triton.jit
def _load_words(
    ptr, row, wanted, WORDS: tl.constexpr, BLOCK_W: tl.constexpr, IS_SPLIT: tl.constexpr
):
    """Load a tile of int16 words; ``IS_SPLIT`` pads each half of a row to half of the tile."""
    ptr = ptr.to(tl.pointer_type(tl.int16), bitcast=True) + row * WORDS
    offs_n = tl.arange(0, wanted.shape[0])
    if IS_SPLIT:
        offs_w = channels(WORDS, BLOCK_W)
        mask = tile_mask(wanted, WORDS, BLOCK_W)
    else:
        offs_w = tl.arange(0, BLOCK_W)
        mask = wanted[:, None] if WORDS == BLOCK_W else wanted[:, None] & (offs_w < WORDS)[None, :]
    return tl.load(ptr + (offs_n[:, None] * WORDS + offs_w[None, :]), mask=mask, other=0)


@triton.jit
def _scaled(codes, scale, zero):
    """Return code * scale + zero of keys, whose scales [channels] hold for the whole tile."""
    return codes * scale[None, :] + zero[None, :]


@triton.jit
def load_k8(
    k_ptr, scale_ptr, zero_ptr, row, scale_row, wanted, any_wanted,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Return the two planes of a group of 8-bit keys."""
    WORDS: tl.constexpr = HEAD_DIM // 2
    BLOCK_W: tl.constexpr = BLOCK_D // 2
    scale_ptr = scale_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + scale_row * WORDS
    zero_ptr = zero_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + scale_row * WORDS
    even, odd = _unpack_u8(_load_words(k_ptr, row, wanted, WORDS, BLOCK_W, True), DTYPE, 0.0)
    offs_w = channels(WORDS, BLOCK_W)
    # One mask for all scales of a tile, so that they are copied ahead, too.
    mask = gated(tl.arange(0, BLOCK_W) % (BLOCK_W // 2) < WORDS // 2, any_wanted)
    scale = _unpack_halves(tl.load(scale_ptr + offs_w, mask=mask, other=0), DTYPE)
    zero = _unpack_halves(tl.load(zero_ptr + offs_w, mask=mask, other=0), DTYPE)
    return _scaled(even, scale[0], zero[0]), _scaled(odd, scale[1], zero[1])


@triton.jit
def load_k4(
    k_ptr, scale_ptr, zero_ptr, row, scale_row, wanted, any_wanted,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Return the four planes of a group of 4-bit keys."""
    WORDS: tl.constexpr = HEAD_DIM // 4
    BLOCK_W: tl.constexpr = BLOCK_D // 4
    scale_ptr = scale_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + scale_row * (2 * WORDS)
    zero_ptr = zero_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + scale_row * (2 * WORDS)
    codes = _unpack_u4(_load_words(k_ptr, row, wanted, WORDS, BLOCK_W, False), DTYPE)
    offs_w = tl.arange(0, BLOCK_W)
    mask = gated(offs_w < WORDS, any_wanted)
    s = _unpack_halves(tl.load(scale_ptr + offs_w, mask=mask, other=0), DTYPE)
    z = _unpack_halves(tl.load(zero_ptr + offs_w, mask=mask, other=0), DTYPE)
    s_high = _unpack_halves(tl.load(scale_ptr + (offs_w + WORDS), mask=mask, other=0), DTYPE)
    z_high = _unpack_halves(tl.load(zero_ptr + (offs_w + WORDS), mask=mask, other=0), DTYPE)
    return (
        _scaled(codes[0], s[0], z[0]),
        _scaled(codes[2], s[1], z[1]),
        _scaled(codes[1], s_high[0], z_high[0]),
        _scaled(codes[3], s_high[1], z_high[1]),
    )


@triton.jit
def load_v8(
    v_ptr, row, wanted, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """Return the two planes of 8-bit values as plain codes, -127 .. 127."""
    return _unpack_s8(_load_words(v_ptr, row, wanted, HEAD_DIM // 2, BLOCK_D // 2, True), DTYPE)


@triton.jit
def _v4_factors(
    ptr, row, any_wanted, FIRST: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_N: tl.constexpr, DTYPE: tl.constexpr,
    PLANAR: tl.constexpr,
):  # fmt: skip
    """Return the scales (or zeros) of half the channels, [BLOCK_N, 1 or BLOCK_W].

    A token has one float16 for each 64 channels. Column ``w`` stands for the channels 2w and 2w + 1
    after ``FIRST``.
    """
    GROUPS: tl.constexpr = (HEAD_DIM + 63) // 64
    LOW: tl.constexpr = FIRST // 64
    HIGH: tl.constexpr = (FIRST + HEAD_DIM // 2 - 1) // 64
    offs_n = tl.arange(0, BLOCK_N)
    channel = FIRST + 2 * tl.arange(0, BLOCK_W)
    if GROUPS == 1:
        if PLANAR:
            factor = tl.load(ptr + row + offs_n, mask=gated(offs_n >= 0, any_wanted), other=0.0)
            factor = factor.to(DTYPE)[:, None]
        else:  # whose threads hold one row each: 16 bits would be no asynchronous copy
            offs_w = tl.arange(0, BLOCK_N // 2)
            words = ptr.to(tl.pointer_type(tl.int32), bitcast=True) + row // 2
            words = tl.load(words + offs_w, mask=gated(offs_w >= 0, any_wanted), other=0)
            even, odd = _unpack_halves(words, DTYPE)
            factor = tl.interleave(even, odd)[:, None]
    elif GROUPS % 2 == 0 and LOW // 2 == HIGH // 2:
        words = ptr.to(tl.pointer_type(tl.int32), bitcast=True) + row * (GROUPS // 2) + LOW // 2
        words = words + offs_n * (GROUPS // 2)
        words = tl.load(words, mask=gated(offs_n >= 0, any_wanted), other=0)
        even, odd = _unpack_halves(words, DTYPE)
        if LOW == HIGH:
            factor = even[:, None] if LOW % 2 == 0 else odd[:, None]
        else:
            factor = tl.where((channel < 64 * HIGH)[None, :], even[:, None], odd[:, None])
    else:  # head_dims like 160 or 224: fetch them one by one
        ptr = ptr + row * GROUPS + (offs_n[:, None] * GROUPS + channel[None, :] // 64)
        inside = (offs_n >= 0)[:, None] & (channel < FIRST + HEAD_DIM // 2)[None, :]
        mask = gated(inside, any_wanted)
        factor = tl.load(ptr, mask=mask, other=0.0).to(DTYPE)
    return factor


@triton.jit
def load_v4(
    v_ptr, scale_ptr, zero_ptr, row, wanted, any_wanted, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, DTYPE: tl.constexpr, PLANAR: tl.constexpr,
):  # fmt: skip
    """Return the four planes of 4-bit values.

    Turning codes into values costs a multiply-add for two of them. Folding the scale into p, as for
    8 bits, would leave the zeros: a sum over p for each group, across warps.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    BLOCK_W: tl.constexpr = BLOCK_D // 4
    N: tl.constexpr = wanted.shape[0]
    codes = _unpack_u4(_load_words(v_ptr, row, wanted, HEAD_DIM // 4, BLOCK_W, False), DTYPE)
    s = _v4_factors(scale_ptr, row, any_wanted, 0, HEAD_DIM, BLOCK_W, N, DTYPE, PLANAR)
    z = _v4_factors(zero_ptr, row, any_wanted, 0, HEAD_DIM, BLOCK_W, N, DTYPE, PLANAR)
    low_even, low_odd = codes[0] * s + z, codes[2] * s + z
    s = _v4_factors(scale_ptr, row, any_wanted, HALF, HEAD_DIM, BLOCK_W, N, DTYPE, PLANAR)
    z = _v4_factors(zero_ptr, row, any_wanted, HALF, HEAD_DIM, BLOCK_W, N, DTYPE, PLANAR)
    return low_even, low_odd, codes[1] * s + z, codes[3] * s + z


@triton.jit
def _halves_of(x):
    """Cut [rows, channels] into its left and its right half."""
    halves = tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2])
    return tl.split(tl.permute(halves, (0, 2, 1)))


@triton.jit
def _pairs_of(x):
    """Cut [rows, channels] into its even and its odd columns."""
    return tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))


@triton.jit
def planes_of(x, BITS: tl.constexpr):
    """Cut a float tile [rows, BLOCK_D] into the planes in which codes of ``BITS`` arrive."""
    if BITS == 8:
        planes = _pairs_of(x)
    else:
        low, high = _halves_of(x)
        planes = _pairs_of(low) + _pairs_of(high)
    return planes


@triton.jit
def assemble(planes, BITS: tl.constexpr):
    """Put the planes of a tile together again: [rows, BLOCK_D]."""
    x = tl.interleave(planes[0], planes[1])
    if BITS == 4:
        halves = tl.join(x, tl.interleave(planes[2], planes[3]))
        x = tl.reshape(tl.permute(halves, (0, 2, 1)), [x.shape[0], 2 * x.shape[1]])
    return x


@triton.jit
def settle(x):
    """Return ``x`` unchanged, and keep the compiler from computing it once for each warp.

    Where every warp needs a whole tile, triton moves its layout of dot operands up to the loads:
    each warp unpacks all codes and holds all values in registers. An instruction that it must not
    touch (there is none: the assembly is empty) leaves the tile shared out, to go through shared
    memory. sm_100 brings the tile to its tensor cores in a way of its own, which this would break.
    """
    if not INTERPRET and is_cuda() and x.dtype.primitive_bitwidth == 16:
        IS_SM100: tl.constexpr = cuda_capability_geq(10, 0) and not cuda_capability_geq(12, 0)
        if not IS_SM100:
            x = tl.inline_asm_elementwise("", "=r,0", [x], dtype=x.dtype, is_pure=False, pack=2)
    return x
