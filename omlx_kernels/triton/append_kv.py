"""Scatter the newest tokens' keys and values into their slots.

Values are rotated on the way where the cache stores them rotated.

Grid: (tokens, tiles of kv heads). Moves: each key and value is read once and written once, plus
8 bytes of slot a program. The sources keep their strides (a transposed projection is read where it
lies); the destination is contiguous. Contract: `omlx_kernels.ops.append_kv`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from omlx_kernels import tuned
from omlx_kernels.launch import append_config
from omlx_kernels.layout import TierBlocks
from omlx_kernels.triton.common import block_d, narrow
from omlx_kernels.triton.rotation import rotate


@triton.jit
def _append_kv_kernel(
    k_ptr,
    v_ptr,
    dst_k_ptr,
    dst_v_ptr,
    slot_ptr,
    stride_k_token,
    stride_k_head,
    stride_k_dim,
    stride_v_token,
    stride_v_head,
    stride_v_dim,
    ROTATE_V: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    if slot < 0:
        return
    heads = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    h, d = heads[:, None], offs_d[None, :].to(tl.int64)
    mask = (h < KV_HEADS) & (d < HEAD_DIM)

    row = (slot // SIZE * KV_HEADS + h) * SIZE + slot % SIZE
    dst = row * HEAD_DIM + d
    k_src = k_ptr + token * stride_k_token + h * stride_k_head + d * stride_k_dim
    v_src = v_ptr + token * stride_v_token + h * stride_v_head + d * stride_v_dim
    tl.store(dst_k_ptr + dst, tl.load(k_src, mask=mask, other=0.0), mask=mask)
    v = tl.load(v_src, mask=mask, other=0.0)
    if ROTATE_V:
        v = narrow(rotate(v.to(tl.float32), HEAD_DIM), v.dtype)
    tl.store(dst_v_ptr + dst, v, mask=mask)


def append_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    dst: TierBlocks,
    slot_mapping: torch.Tensor,
    *,
    rotate_v: bool = False,
) -> None:
    """Write each token's key and value into its slot; see `omlx_kernels.ops.append_kv`."""
    tokens, heads, dim = k.shape
    tile_d = block_d(dim)
    config = tuned.lookup("append", k.device, heads, tile_d) or append_config(heads, tile_d)
    grid = (tokens, triton.cdiv(heads, config.block_m))
    with torch.cuda.device_of(k):
        _append_kv_kernel[grid](
            k,
            v,
            dst.k,
            dst.v,
            slot_mapping,
            *k.stride(),
            *v.stride(),
            ROTATE_V=rotate_v,
            KV_HEADS=heads,
            SIZE=dst.k.shape[2],
            HEAD_DIM=dim,
            BLOCK_D=tile_d,
            BLOCK_H=config.block_m,
            num_warps=config.num_warps,
        )
