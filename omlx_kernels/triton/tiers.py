"""How a tile of queries attends to what one tier stores; decode and extend share these loops.

Every function walks the keys of one tier for the rows of ``q`` [BLOCK_M, BLOCK_D] and advances the
online softmax (``acc``, ``m_i``, ``l_i``), whose invariant is, with base-2 scores s_t::

    acc = sum_t 2**(s_t - m_i) v_t        l_i = sum_t 2**(s_t - m_i)

Row ``i`` stands at position ``row_pos[i]`` and sees the keys ``row_pos[i] - window < j <=
row_pos[i]``. Keys outside ``[key_first, key_stop)`` are seen by no row: their loads are predicated
off (no traffic, and poisoned memory reads as 0). One plain loop a tier, no branch inside: a branch
would end the asynchronous copies.

K8V8 keys become float16 (float32 for a float32 model) in registers. The value scale multiplies p,
not V, and m_i is the maximum of s_t + log2(scale_t): then p * scale is at most about 1, and keeps
float16's precision however small the values are. For the same reason the quantized tiers come
before the others within one accumulator.

K8V8 codes are read as int16 words of two channels (their scales as int32 words): 16-bit elements go
through 128-bit asynchronous copies and ldmatrix, where bytes would be fetched one by one, and both
halves of a word unpack in place.
"""

from __future__ import annotations

import triton
import triton.language as tl

from omlx_kernels.triton.common import (
    dot,
    mask_scores,
    narrow,
    online_softmax,
    rough_log2,
    tile_mask,
    unpack_halves,
    unpack_s8,
    unpack_u8,
)


@triton.jit
def attend_float_tile(
    q,
    acc,
    m_i,
    l_i,
    k_ptrs,
    v_ptrs,
    mask,
    key_pos,
    row_pos,
    window_size,
    sm_scale_log2,
    KEEP: tl.constexpr,
):
    """Attend to one tile of keys and values in the model's dtype."""
    k = tl.load(k_ptrs, mask=mask, other=0.0)
    scores = dot(q, tl.trans(k), tl.zeros([q.shape[0], k.shape[0]], tl.float32))
    scores = mask_scores(scores * sm_scale_log2, key_pos, row_pos, window_size, KEEP)
    p, alpha, m_i = online_softmax(scores, scores, m_i)
    l_i = l_i * alpha + tl.sum(p, 1)
    v = tl.load(v_ptrs, mask=mask, other=0.0)
    acc = dot(narrow(p, v.dtype), v, acc * alpha[:, None])
    return acc, m_i, l_i


@triton.jit
def attend_sink_page(
    q,
    acc,
    m_i,
    l_i,
    sink,
    page,
    kv_head,
    key_first,
    key_stop,
    row_pos,
    window_size,
    sm_scale_log2,
    KEEP_SINKS: tl.constexpr,
    SINK_TOKENS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend to the sequence's sink page: positions 0 .. SINK_TOKENS - 1, never quantized."""
    k_ptr, v_ptr = sink
    base = (page.to(tl.int64) * KV_HEADS + kv_head) * (SINK_TOKENS * HEAD_DIM)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    for offset in tl.range(0, SINK_TOKENS, BLOCK_N):
        key_pos = offset + offs_n
        wanted = (key_pos < SINK_TOKENS) & (key_pos < key_stop)
        if not KEEP_SINKS:
            wanted = wanted & (key_pos >= key_first)
        mask = tile_mask(wanted, offs_d, HEAD_DIM, BLOCK_D)
        inner = base + key_pos[:, None] * HEAD_DIM + offs_d[None, :]
        # Padding keys of the tile stand after every query.
        key_pos = tl.where(wanted, key_pos, key_stop)
        acc, m_i, l_i = attend_float_tile(
            q,
            acc,
            m_i,
            l_i,
            k_ptr + inner,
            v_ptr + inner,
            mask,
            key_pos,
            row_pos,
            window_size,
            sm_scale_log2,
            KEEP_SINKS,
        )
    return acc, m_i, l_i


@triton.jit
def attend_hot_tiles(
    q,
    acc,
    m_i,
    l_i,
    hot,
    table_ptr,
    starts_ptr,
    tile_first,
    tile_stop,
    kv_head,
    key_first,
    key_stop,
    row_pos,
    window_size,
    sm_scale_log2,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend to a run of tiles of HOT blocks; ``table_ptr`` and ``starts_ptr`` are one row."""
    k_ptr, v_ptr = hot
    TILES: tl.constexpr = BLOCK_SIZE // BLOCK_N
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    inner = offs_n[:, None] * HEAD_DIM + offs_d[None, :]
    for tile in tl.range(tile_first, tile_stop):
        entry = tile // TILES
        offset = tile % TILES * BLOCK_N
        block = tl.load(table_ptr + entry).to(tl.int64)
        key_pos = tl.load(starts_ptr + entry) + offset + offs_n
        base = ((block * KV_HEADS + kv_head) * BLOCK_SIZE + offset) * HEAD_DIM
        wanted = (key_pos >= key_first) & (key_pos < key_stop)
        acc, m_i, l_i = attend_float_tile(
            q,
            acc,
            m_i,
            l_i,
            k_ptr + base + inner,
            v_ptr + base + inner,
            tile_mask(wanted, offs_d, HEAD_DIM, BLOCK_D),
            key_pos,
            row_pos,
            window_size,
            sm_scale_log2,
            False,
        )
    return acc, m_i, l_i


@triton.jit
def attend_k8v8_tiles(
    q,
    k8v8,
    table_ptr,
    starts_ptr,
    tile_first,
    tile_stop,
    kv_head,
    key_first,
    key_stop,
    row_pos,
    window_size,
    sm_scale_log2,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUANT_GROUP: tl.constexpr,
    PLANAR: tl.constexpr,
):
    """Attend to a run of tiles of K8V8 blocks, as the first tier; a tile is one group of keys.

    ``PLANAR`` keeps even and odd channels apart up to the end: codes go from shared memory through
    registers into the dot, each by one warp. That is decode, whose warps share out the keys. Where
    the warps share out the rows, all of them need every code: the tile is put together first.
    """
    k_ptr, v_ptr, k_scale_ptr, k_zero_ptr, v_scale_ptr = k8v8
    k_ptr = k_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    v_ptr = v_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    k_scale_ptr = k_scale_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    k_zero_ptr = k_zero_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    DTYPE: tl.constexpr = tl.float32 if q.dtype == tl.float32 else tl.float16
    BLOCK_M: tl.constexpr = q.shape[0]
    BLOCK_W: tl.constexpr = BLOCK_D // 2
    WORDS: tl.constexpr = HEAD_DIM // 2
    TILES: tl.constexpr = BLOCK_SIZE // QUANT_GROUP
    q = narrow(q.to(tl.float32), DTYPE)
    q_even, q_odd = tl.split(tl.reshape(q, [BLOCK_M, BLOCK_W, 2]))
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    acc_even = tl.zeros([BLOCK_M, BLOCK_W], tl.float32)
    acc_odd = tl.zeros([BLOCK_M, BLOCK_W], tl.float32)
    offs_n = tl.arange(0, QUANT_GROUP)
    offs_w = tl.arange(0, BLOCK_W)
    inner = offs_n[:, None] * WORDS + offs_w[None, :]
    for tile in tl.range(tile_first, tile_stop):
        entry = tile // TILES
        group = tile % TILES
        block = tl.load(table_ptr + entry).to(tl.int64)
        tile_pos = tl.load(starts_ptr + entry) + group * QUANT_GROUP
        key_pos = tile_pos + offs_n
        row = (block * KV_HEADS + kv_head) * BLOCK_SIZE + group * QUANT_GROUP
        scale_row = ((block * KV_HEADS + kv_head) * TILES + group) * WORDS
        wanted = (key_pos >= key_first) & (key_pos < key_stop)
        mask = tile_mask(wanted, offs_w, WORDS, BLOCK_W)
        # The masks of scales are the same for a whole tile, so that they are copied ahead, too.
        any_wanted = (tile_pos + QUANT_GROUP > key_first) & (tile_pos < key_stop)
        scale_mask = (offs_w < WORDS) & any_wanted

        k = tl.load(k_ptr + row * WORDS + inner, mask=mask, other=0)
        k_scale = tl.load(k_scale_ptr + scale_row + offs_w, mask=scale_mask, other=0)
        k_zero = tl.load(k_zero_ptr + scale_row + offs_w, mask=scale_mask, other=0)
        k_even, k_odd = unpack_u8(k, DTYPE)
        scale_even, scale_odd = unpack_halves(k_scale, DTYPE)
        zero_even, zero_odd = unpack_halves(k_zero, DTYPE)
        k_even = k_even * scale_even[None, :] + zero_even[None, :]
        k_odd = k_odd * scale_odd[None, :] + zero_odd[None, :]
        zero = tl.zeros([BLOCK_M, QUANT_GROUP], tl.float32)
        if PLANAR:
            scores = (
                dot(q_odd, tl.trans(k_odd), dot(q_even, tl.trans(k_even), zero)) * sm_scale_log2
            )
        else:
            scores = dot(q, tl.trans(tl.interleave(k_even, k_odd)), zero) * sm_scale_log2
        scores = mask_scores(scores, key_pos, row_pos, window_size, False)

        v_scale = tl.load(v_scale_ptr + row + offs_n, mask=(offs_n >= 0) & any_wanted, other=1.0)
        v_scale = tl.where(wanted, v_scale.to(tl.float32), 1.0)
        weights = scores + rough_log2(v_scale)[None, :]
        p, alpha, m_i = online_softmax(scores, weights, m_i)
        l_i = l_i * alpha + tl.sum(p, 1)
        p = narrow(p * v_scale[None, :], DTYPE)
        v = tl.load(v_ptr + row * WORDS + inner, mask=mask, other=0)
        v_even, v_odd = unpack_s8(v, DTYPE)
        if PLANAR:
            acc_even = dot(p, v_even, acc_even * alpha[:, None])
            acc_odd = dot(p, v_odd, acc_odd * alpha[:, None])
        else:
            acc = dot(p, tl.interleave(v_even, v_odd), acc * alpha[:, None])
    if PLANAR:
        acc = tl.interleave(acc_even, acc_odd)
    return acc, m_i, l_i
