"""Quantize full hot blocks into K8V8 blocks, exactly as `omlx_kernels.quantization` does.

Grid: (blocks, kv heads, groups of 64 tokens). Moves: a hot block is read once, a K8V8 block written
once. The arithmetic is torch's, operation by operation: IEEE division, no fused multiply-add
(`enable_fp_fusion=False`: triton 3.10 flips the default), rounding to nearest even.
Contract: `omlx_kernels.ops.convert_blocks`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from omlx_kernels.launch import convert_config
from omlx_kernels.layout import QUANT_GROUP, TierBlocks
from omlx_kernels.quantization import FLOAT16_MAX, RANGE_SLACK, TINY
from omlx_kernels.triton.common import block_d, tile_mask

_SLACK = tl.constexpr(RANGE_SLACK)
_TINY = tl.constexpr(TINY)
_HALF_MAX = tl.constexpr(FLOAT16_MAX)
_K_STEP = tl.constexpr((1 + RANGE_SLACK) / 255)
_V_STEP = tl.constexpr((1 + RANGE_SLACK) / 127)


@triton.jit
def _round_half_even(x):
    """Round float32 below 2**22 to an integer: adding 1.5 * 2**23 leaves no fraction bits."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _clamp(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def _convert_k8v8_kernel(
    hot_k_ptr,
    hot_v_ptr,
    k_ptr,
    k_scale_ptr,
    k_zero_ptr,
    v_ptr,
    v_scale_ptr,
    src_ids_ptr,
    dst_ids_ptr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUANT_GROUP: tl.constexpr,
):
    GROUPS: tl.constexpr = BLOCK_SIZE // QUANT_GROUP
    head = tl.program_id(1)
    group = tl.program_id(2)
    src = tl.load(src_ids_ptr + tl.program_id(0)).to(tl.int64) * KV_HEADS + head
    dst = tl.load(dst_ids_ptr + tl.program_id(0)).to(tl.int64) * KV_HEADS + head
    offs_n = tl.arange(0, QUANT_GROUP)
    offs_d = tl.arange(0, BLOCK_D)
    mask = tile_mask(offs_n < QUANT_GROUP, offs_d, HEAD_DIM, BLOCK_D)
    inner = offs_n[:, None] * HEAD_DIM + offs_d[None, :]
    src_row = src * BLOCK_SIZE + group * QUANT_GROUP
    dst_row = dst * BLOCK_SIZE + group * QUANT_GROUP

    # A padding channel reads 0: it has its own column of K, and is neutral for V's maximum.
    k = tl.load(hot_k_ptr + src_row * HEAD_DIM + inner, mask=mask, other=0.0).to(tl.float32)
    low, high = tl.min(k, 0), tl.max(k, 0)
    zero = _clamp(low - _SLACK * tl.abs(low) - _TINY, -_HALF_MAX, _HALF_MAX).to(tl.float16)
    zero32 = zero.to(tl.float32)
    scale = tl.minimum((high - zero32) * _K_STEP + _TINY, _HALF_MAX).to(tl.float16)
    codes = tl.div_rn(k - zero32[None, :], tl.broadcast_to(scale.to(tl.float32)[None, :], k.shape))
    codes = _round_half_even(_clamp(codes, 0.0, 255.0)).to(tl.uint8)
    tl.store(k_ptr + dst_row * HEAD_DIM + inner, codes, mask=mask)
    scales = (dst * GROUPS + group) * HEAD_DIM + offs_d
    tl.store(k_scale_ptr + scales, scale, mask=offs_d < HEAD_DIM)
    tl.store(k_zero_ptr + scales, zero, mask=offs_d < HEAD_DIM)

    v = tl.load(hot_v_ptr + src_row * HEAD_DIM + inner, mask=mask, other=0.0).to(tl.float32)
    v_scale = tl.minimum(tl.max(tl.abs(v), 1) * _V_STEP + _TINY, _HALF_MAX).to(tl.float16)
    codes = tl.div_rn(v, tl.broadcast_to(v_scale.to(tl.float32)[:, None], v.shape))
    codes = _round_half_even(_clamp(codes, -127.0, 127.0)).to(tl.int8)
    tl.store(v_ptr + dst_row * HEAD_DIM + inner, codes, mask=mask)
    tl.store(v_scale_ptr + dst_row + offs_n, v_scale)  # whole groups only: always in bounds


def convert_blocks(
    src: TierBlocks, dst: TierBlocks, src_ids: torch.Tensor, dst_ids: torch.Tensor
) -> None:
    """Quantize the listed blocks; see `omlx_kernels.ops.convert_blocks`."""
    _, heads, size, dim = src.k.shape
    tile_d = block_d(dim)
    grid = (src_ids.shape[0], heads, size // QUANT_GROUP)
    with torch.cuda.device_of(src.k):
        _convert_k8v8_kernel[grid](
            src.k,
            src.v,
            dst.k,
            dst.k_scale,
            dst.k_zero,
            dst.v,
            dst.v_scale,
            src_ids,
            dst_ids,
            KV_HEADS=heads,
            BLOCK_SIZE=size,
            HEAD_DIM=dim,
            BLOCK_D=tile_d,
            QUANT_GROUP=QUANT_GROUP,
            num_warps=convert_config(tile_d).num_warps,
            enable_fp_fusion=False,
        )
