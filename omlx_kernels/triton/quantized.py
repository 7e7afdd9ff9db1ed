"""How a tile of queries attends to the blocks of a quantized tier; see `tiers` for the terms.

Keys become float16 (float32 for a float32 model) in registers. So do 4-bit values. The scale of an
8-bit value multiplies p instead, and m_i is the maximum of s_t + log2(scale_t): then p * scale is
at most about 1, and keeps float16's precision however small the values are. For the same reason
K8V8 comes before the other tiers within one accumulator.
"""

from __future__ import annotations

import triton
import triton.language as tl

from omlx_kernels.triton.codes import (
    assemble,
    load_k4,
    load_k8,
    load_v4,
    load_v8,
    planes_of,
    settle,
)
from omlx_kernels.triton.common import (
    dot,
    gated,
    mask_scores,
    narrow,
    online_softmax,
    rough_log2,
    scale_scores,
)


@triton.jit
def _dot_planes(q, k):
    """Return q @ k.T, summed over the planes that both are cut into."""
    dots = tl.zeros([q[0].shape[0], k[0].shape[0]], tl.float32)
    for i in tl.static_range(len(k)):
        dots = dot(q[i], tl.trans(k[i]), dots)
    return dots


@triton.jit
def _add_planes(acc, alpha, p, v):
    """Return acc * alpha + p @ v, plane by plane."""
    sums = (dot(p, v[0], acc[0] * alpha[:, None]),)
    for i in tl.static_range(1, len(v)):
        sums += (dot(p, v[i], acc[i] * alpha[:, None]),)
    return sums


@triton.jit
def attend_quantized_tiles(
    q, acc, m_i, l_i, blocks, table_ptr, starts_ptr, tile_first, tile_stop, kv_head, seen, scoring,
    K_BITS: tl.constexpr, V_BITS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, QUANT_GROUP: tl.constexpr, PLANAR: tl.constexpr,
):  # fmt: skip
    """Attend to a run of tiles of quantized blocks; a tile is one group of keys.

    ``PLANAR`` keeps the planes of the codes apart up to the end: codes go from shared memory
    through registers into the dot, each by one warp. That is decode, whose warps share out the
    keys. Where the warps share out the rows, all of them need every code: the tile is put together
    first.
    """
    row_pos, key_first, key_stop, window_size = seen
    DTYPE: tl.constexpr = tl.float32 if q.dtype == tl.float32 else tl.float16
    TILES: tl.constexpr = BLOCK_SIZE // QUANT_GROUP
    IS_CAST: tl.constexpr = q.dtype != DTYPE
    if IS_CAST:
        q = narrow(q.to(tl.float32), DTYPE)
    if not PLANAR and (IS_CAST or q.shape[0] < q.shape[1]):
        q = settle(q)  # else it would stay in registers, not in shared memory
    q_planes = planes_of(q, K_BITS) if PLANAR else (q,)
    acc_planes = planes_of(acc, V_BITS) if PLANAR else (acc,)
    offs_n = tl.arange(0, QUANT_GROUP)
    for tile in tl.range(tile_first, tile_stop):
        entry = tile // TILES
        group = tile % TILES
        block = tl.load(table_ptr + entry).to(tl.int64)
        tile_pos = tl.load(starts_ptr + entry) + group * QUANT_GROUP
        key_pos = tile_pos + offs_n
        row = (block * KV_HEADS + kv_head) * BLOCK_SIZE + group * QUANT_GROUP
        scale_row = (block * KV_HEADS + kv_head) * TILES + group
        wanted = (key_pos >= key_first) & (key_pos < key_stop)
        any_wanted = (tile_pos + QUANT_GROUP > key_first) & (tile_pos < key_stop)

        if K_BITS == 8:
            k = load_k8(
                blocks[0], blocks[2], blocks[3], row, scale_row, wanted, any_wanted, HEAD_DIM,
                BLOCK_D, DTYPE,
            )  # fmt: skip
        else:
            k = load_k4(
                blocks[0], blocks[2], blocks[3], row, scale_row, wanted, any_wanted, HEAD_DIM,
                BLOCK_D, DTYPE,
            )  # fmt: skip
        if not PLANAR:
            k = (assemble(k, K_BITS),)
            if q.shape[0] >= q.shape[1]:  # triton then gives each warp rows of its own
                k = (settle(k[0]),)
        dots = _dot_planes(q_planes, k)
        scores = scale_scores(dots, scoring[0], scoring[1])
        scores = mask_scores(scores, key_pos, row_pos, window_size, False)

        if V_BITS == 8:
            scale = tl.load(
                blocks[4] + row + offs_n, mask=gated(offs_n >= 0, any_wanted), other=1.0
            )
            scale = tl.where(wanted, scale.to(tl.float32), 1.0)
            weights = scores + rough_log2(scale)[None, :]
            p, alpha, m_i = online_softmax(scores, weights, m_i)
            l_i = l_i * alpha + tl.sum(p, 1)
            p = p * scale[None, :]
            v = load_v8(blocks[1], row, wanted, HEAD_DIM, BLOCK_D, DTYPE)
        else:
            p, alpha, m_i = online_softmax(scores, scores, m_i)
            l_i = l_i * alpha + tl.sum(p, 1)
            v = load_v4(
                blocks[1], blocks[4], blocks[5], row, wanted, any_wanted, HEAD_DIM, BLOCK_D, DTYPE,
                PLANAR,
            )  # fmt: skip
        v = v if PLANAR else (assemble(v, V_BITS),)
        acc_planes = _add_planes(acc_planes, alpha, narrow(p, DTYPE), v)
    acc = assemble(acc_planes, V_BITS) if PLANAR else acc_planes[0]
    return acc, m_i, l_i
