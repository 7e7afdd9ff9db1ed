"""Turn blocks of one tier into blocks of a colder one, exactly as `omlx_kernels.quantization` does.

Grid: (blocks, kv heads, groups of 64 tokens). Moves: a block is read once, the colder one written
once. Keys or values whose format stays are copied bit for bit. The arithmetic is torch's, operation
by operation: IEEE division, no fused multiply-add (`enable_fp_fusion=False`: triton 3.10 flips the
default), rounding to nearest even.

A program holds its keys, then its values, as two tiles of half the channels each, because a byte of
4-bit codes holds one of each half. Contract: `omlx_kernels.ops.convert_blocks`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from omlx_kernels import tuned
from omlx_kernels.launch import convert_config
from omlx_kernels.layout import QUANT_GROUP, Tier, TierBlocks
from omlx_kernels.quantization import FLOAT16_MAX, RANGE_SLACK, SMALLEST_NORMAL, TINY
from omlx_kernels.triton.common import block_d

_SLACK = tl.constexpr(RANGE_SLACK)
_TINY = tl.constexpr(TINY)
_HALF_MAX = tl.constexpr(FLOAT16_MAX)
_SMALLEST_NORMAL = tl.constexpr(SMALLEST_NORMAL)
_GROUP = tl.constexpr(QUANT_GROUP)


@triton.jit
def _clamp(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def _codes(x, scale, low: tl.constexpr, high: tl.constexpr):
    """Return x / scale, clamped and rounded half to even, as float32."""
    codes = _clamp(tl.div_rn(x, tl.broadcast_to(scale.to(tl.float32), x.shape)), low, high)
    return (codes + 12582912.0) - 12582912.0  # 1.5 * 2**23 leaves no fraction bits


@triton.jit
def _scale(step):
    """Round a step between codes to a float16 that still reaches the end of the range."""
    step = tl.where(step < _SMALLEST_NORMAL, step + _TINY, step)
    return tl.minimum(step, _HALF_MAX).to(tl.float16)


@triton.jit
def _asymmetric(low, high, LEVELS: tl.constexpr):
    """Return the float16 (scale, zero) with which codes 0 .. LEVELS reach from low to high."""
    nearest = _clamp(low, -_HALF_MAX, _HALF_MAX).to(tl.float16)
    below = _clamp(low - _SLACK * tl.abs(low) - _TINY, -_HALF_MAX, _HALF_MAX).to(tl.float16)
    zero = tl.where(nearest.to(tl.float32) > low, below, nearest)
    STEP: tl.constexpr = 1 / LEVELS
    return _scale((high - zero.to(tl.float32)) * STEP), zero


@triton.jit
def _copy_run(src_ptr, dst_ptr, src_run, dst_run, LENGTH: tl.constexpr):
    """Copy run ``src_run`` of ``LENGTH`` elements to run ``dst_run``, bit for bit."""
    for first in tl.static_range(0, LENGTH, 1024):
        offs = first + tl.arange(0, 1024)
        x = tl.load(src_ptr + src_run * LENGTH + offs, mask=offs < LENGTH)
        tl.store(dst_ptr + dst_run * LENGTH + offs, x, mask=offs < LENGTH)


@triton.jit
def _convert_k(
    src, dst, src_run, dst_run, SRC_BITS: tl.constexpr, DST_BITS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Convert the keys of a group of tokens; scales are found per channel."""
    HALF: tl.constexpr = HEAD_DIM // 2
    offs_n = tl.arange(0, _GROUP)[:, None]
    offs_h = tl.arange(0, BLOCK_H)
    mask = (offs_n < _GROUP) & (offs_h < HALF)[None, :]
    packed = tl.zeros([_GROUP, BLOCK_H], tl.uint8)
    for half in tl.static_range(2):
        channel = half * HALF + offs_h
        inner = offs_n * HEAD_DIM + channel[None, :]
        k = tl.load(src[0] + src_run * (_GROUP * HEAD_DIM) + inner, mask=mask, other=0)
        k = k.to(tl.float32)
        if SRC_BITS == 8:
            scales = src_run * HEAD_DIM + channel
            scale = tl.load(src[2] + scales, mask=offs_h < HALF, other=0.0).to(tl.float32)
            zero = tl.load(src[3] + scales, mask=offs_h < HALF, other=0.0).to(tl.float32)
            k = k * scale[None, :] + zero[None, :]
        scale, zero = _asymmetric(tl.min(k, 0), tl.max(k, 0), 2**DST_BITS - 1)
        codes = _codes(k - zero.to(tl.float32)[None, :], scale[None, :], 0.0, 2.0**DST_BITS - 1)
        if DST_BITS == 8:
            rows = dst_run * (_GROUP * HEAD_DIM) + inner
            tl.store(dst[0] + rows, codes.to(tl.uint8), mask=mask)
        else:
            packed = packed | (codes.to(tl.uint8) << (4 * half))
        scales = dst_run * HEAD_DIM + channel
        tl.store(dst[2] + scales, scale, mask=offs_h < HALF)
        tl.store(dst[3] + scales, zero, mask=offs_h < HALF)
    if DST_BITS == 4:
        rows = dst_run * (_GROUP * HALF) + offs_n * HALF + offs_h[None, :]
        tl.store(dst[0] + rows, packed, mask=mask)


@triton.jit
def _convert_v(
    src, dst, src_run, dst_run, SRC_BITS: tl.constexpr, DST_BITS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Convert the values of a group of tokens; scales are found per token."""
    HALF: tl.constexpr = HEAD_DIM // 2
    offs_n = tl.arange(0, _GROUP)
    offs_h = tl.arange(0, BLOCK_H)
    mask = (offs_n < _GROUP)[:, None] & (offs_h < HALF)[None, :]
    inner = offs_n[:, None] * HEAD_DIM + offs_h[None, :]
    src_ptr = src[1] + src_run * (_GROUP * HEAD_DIM) + inner
    low = tl.load(src_ptr, mask=mask, other=0).to(tl.float32)
    high = tl.load(src_ptr + HALF, mask=mask, other=0).to(tl.float32)
    if SRC_BITS == 8:
        scale = tl.load(src[4] + src_run * _GROUP + offs_n).to(tl.float32)[:, None]
        low, high = low * scale, high * scale
    if DST_BITS == 8:
        largest = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))
        STEP: tl.constexpr = 1 / 127
        scale = _scale(largest * STEP)
        dst_ptr = dst[1] + dst_run * (_GROUP * HEAD_DIM) + inner
        codes = _codes(low, scale[:, None], -127.0, 127.0).to(tl.int8)
        tl.store(dst_ptr, codes, mask=mask)
        codes = _codes(high, scale[:, None], -127.0, 127.0).to(tl.int8)
        tl.store(dst_ptr + HALF, codes, mask=mask)
        tl.store(dst[4] + dst_run * _GROUP + offs_n, scale)
    else:
        GROUPS: tl.constexpr = (HEAD_DIM + _GROUP - 1) // _GROUP
        low_scale, low_zero = tl.zeros_like(low) + 1.0, tl.zeros_like(low)
        high_scale, high_zero = low_scale, low_zero
        for group in tl.static_range(GROUPS):
            in_low = mask & (offs_h // _GROUP == group)[None, :]
            in_high = mask & ((offs_h + HALF) // _GROUP == group)[None, :]
            smallest = tl.minimum(
                tl.min(tl.where(in_low, low, float("inf")), 1),
                tl.min(tl.where(in_high, high, float("inf")), 1),
            )
            largest = tl.maximum(
                tl.max(tl.where(in_low, low, float("-inf")), 1),
                tl.max(tl.where(in_high, high, float("-inf")), 1),
            )
            scale, zero = _asymmetric(smallest, largest, 15)
            scales = (dst_run * _GROUP + offs_n) * GROUPS + group
            tl.store(dst[4] + scales, scale)
            tl.store(dst[5] + scales, zero)
            scale, zero = scale.to(tl.float32)[:, None], zero.to(tl.float32)[:, None]
            low_scale = tl.where(in_low, scale, low_scale)
            low_zero = tl.where(in_low, zero, low_zero)
            high_scale = tl.where(in_high, scale, high_scale)
            high_zero = tl.where(in_high, zero, high_zero)
        low = _codes(low - low_zero, low_scale, 0.0, 15.0).to(tl.uint8)
        high = _codes(high - high_zero, high_scale, 0.0, 15.0).to(tl.uint8)
        rows = dst_run * (_GROUP * HALF) + offs_n[:, None] * HALF + offs_h[None, :]
        tl.store(dst[1] + rows, low | (high << 4), mask=mask)


@triton.jit
def _convert_blocks_kernel(
    src,
    dst,
    src_ids_ptr,
    dst_ids_ptr,
    SRC_K_BITS: tl.constexpr,
    SRC_V_BITS: tl.constexpr,
    DST_K_BITS: tl.constexpr,
    DST_V_BITS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    # A *run* is what a (block, head, group of tokens) owns of a part: contiguous in every part.
    src_block = tl.load(src_ids_ptr + tl.program_id(0)).to(tl.int64)
    dst_block = tl.load(dst_ids_ptr + tl.program_id(0)).to(tl.int64)
    src_run = (src_block * KV_HEADS + tl.program_id(1)) * GROUPS + tl.program_id(2)
    dst_run = (dst_block * KV_HEADS + tl.program_id(1)) * GROUPS + tl.program_id(2)
    if SRC_K_BITS == DST_K_BITS:
        _copy_run(src[0], dst[0], src_run, dst_run, _GROUP * HEAD_DIM * DST_K_BITS // 8)
        _copy_run(src[2], dst[2], src_run, dst_run, HEAD_DIM)
        _copy_run(src[3], dst[3], src_run, dst_run, HEAD_DIM)
    else:
        _convert_k(src, dst, src_run, dst_run, SRC_K_BITS, DST_K_BITS, HEAD_DIM, BLOCK_H)
    if SRC_V_BITS == DST_V_BITS:
        V_GROUPS: tl.constexpr = (HEAD_DIM + _GROUP - 1) // _GROUP  # only 4-bit values are copied
        _copy_run(src[1], dst[1], src_run, dst_run, _GROUP * HEAD_DIM // 2)
        _copy_run(src[4], dst[4], src_run, dst_run, _GROUP * V_GROUPS)
        _copy_run(src[5], dst[5], src_run, dst_run, _GROUP * V_GROUPS)
    else:
        _convert_v(src, dst, src_run, dst_run, SRC_V_BITS, DST_V_BITS, HEAD_DIM, BLOCK_H)


def convert_blocks(
    src: TierBlocks,
    dst: TierBlocks,
    src_tier: Tier,
    dst_tier: Tier,
    src_ids: torch.Tensor,
    dst_ids: torch.Tensor,
) -> None:
    """Convert the listed blocks; see `omlx_kernels.ops.convert_blocks`."""
    _, heads, size, dim = src.k.shape
    tile_d = block_d(dim)
    config = tuned.lookup("convert", src.k.device, tile_d) or convert_config(tile_d)
    src_bits = src_tier.bits or (16, 16)
    with torch.cuda.device_of(src.k):
        _convert_blocks_kernel[(src_ids.shape[0], heads, size // QUANT_GROUP)](
            tuple(src.tensors().values()),
            tuple(dst.tensors().values()),
            src_ids,
            dst_ids,
            SRC_K_BITS=src_bits[0],
            SRC_V_BITS=src_bits[1],
            DST_K_BITS=dst_tier.bits[0],
            DST_V_BITS=dst_tier.bits[1],
            KV_HEADS=heads,
            GROUPS=size // QUANT_GROUP,
            HEAD_DIM=dim,
            BLOCK_H=tile_d // 2,
            num_warps=config.num_warps,
            enable_fp_fusion=False,
        )
