"""How a tile of queries attends to what one tier stores; decode and extend share these loops.

Every function walks the keys of one tier for the rows of ``q`` [BLOCK_M, BLOCK_D] and advances the
online softmax (``acc``, ``m_i``, ``l_i``), whose invariant is, with base-2 scores s_t::

    acc = sum_t 2**(s_t - m_i) v_t        l_i = sum_t 2**(s_t - m_i)

Row ``i`` stands at position ``row_pos[i]`` and sees the keys ``row_pos[i] - window_size < j <=
row_pos[i]``. Keys outside ``[key_first, key_stop)`` are seen by no row: their loads are predicated
off (no traffic, and poisoned memory reads as 0). One plain loop a tier, no branch inside: a branch
would end the asynchronous copies.

What the loops share arrives in two tuples: ``seen = (row_pos, key_first, key_stop, window_size)``
and ``scoring = (score_scale, softcap)`` (`common.scale_scores`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from omlx_kernels.triton.common import (
    channels,
    dot,
    gated,
    mask_scores,
    narrow,
    online_softmax,
    scale_scores,
    tile_mask,
)


@triton.jit
def _attend_float_tile(
    q, sink_q, acc, m_i, l_i, k_ptrs, v_ptrs, mask, key_pos, seen, scoring, KEEP: tl.constexpr
):
    """Attend to one tile of keys and values in the model's dtype."""
    row_pos, _, _, window_size = seen
    k = tl.load(k_ptrs, mask=mask, other=0.0)
    zero = tl.zeros([q.shape[0], k.shape[0]], tl.float32)
    dots = dot(q, tl.trans(k), zero)
    if sink_q is not None:
        outside = row_pos[:, None] - key_pos[None, :] >= window_size
        dots = tl.where(outside, dot(sink_q, tl.trans(k), zero), dots)
    scores = scale_scores(dots, scoring[0], scoring[1])
    scores = mask_scores(scores, key_pos, row_pos, window_size, KEEP)
    p, alpha, m_i = online_softmax(scores, scores, m_i)
    l_i = l_i * alpha + tl.sum(p, 1)
    v = tl.load(v_ptrs, mask=mask, other=0.0)
    acc = dot(narrow(p, v.dtype), v, acc * alpha[:, None])
    return acc, m_i, l_i


@triton.jit
def attend_sink_page(
    q, sink_q, acc, m_i, l_i, sink, page, kv_head, seen, scoring, KEEP_SINKS: tl.constexpr,
    SINK_TOKENS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attend to the sequence's sink page: positions 0 .. SINK_TOKENS - 1, never quantized.

    A ``page`` of -1 is none: nothing is loaded and no row sees anything.
    ``sink_q`` (or None) is what scores the keys outside of a row's window.
    """
    _, key_first, key_stop, _ = seen
    k_ptr, v_ptr = sink
    base = (page.to(tl.int64) * KV_HEADS + kv_head) * (SINK_TOKENS * HEAD_DIM)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = channels(HEAD_DIM, BLOCK_D)
    for offset in tl.range(0, SINK_TOKENS, BLOCK_N):
        key_pos = offset + offs_n
        wanted = (key_pos < SINK_TOKENS) & (key_pos < key_stop)
        wanted = gated(wanted, page >= 0)
        if not KEEP_SINKS:
            wanted = wanted & (key_pos >= key_first)
        mask = tile_mask(wanted, HEAD_DIM, BLOCK_D)
        inner = base + key_pos[:, None] * HEAD_DIM + offs_d[None, :]
        # Padding keys of the tile stand after every query.
        key_pos = tl.where(wanted, key_pos, key_stop)
        acc, m_i, l_i = _attend_float_tile(
            q, sink_q, acc, m_i, l_i, k_ptr + inner, v_ptr + inner, mask, key_pos, seen, scoring,
            KEEP_SINKS,
        )  # fmt: skip
    return acc, m_i, l_i


@triton.jit
def attend_hot_tiles(
    q, acc, m_i, l_i, hot, table_ptr, starts_ptr, tile_first, tile_stop, kv_head, seen, scoring,
    KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attend to a run of tiles of HOT blocks; ``table_ptr`` and ``starts_ptr`` are one row."""
    _, key_first, key_stop, _ = seen
    k_ptr, v_ptr = hot
    TILES: tl.constexpr = BLOCK_SIZE // BLOCK_N
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = channels(HEAD_DIM, BLOCK_D)
    inner = offs_n[:, None] * HEAD_DIM + offs_d[None, :]
    for tile in tl.range(tile_first, tile_stop):
        entry = tile // TILES
        offset = tile % TILES * BLOCK_N
        block = tl.load(table_ptr + entry).to(tl.int64)
        key_pos = tl.load(starts_ptr + entry) + offset + offs_n
        base = ((block * KV_HEADS + kv_head) * BLOCK_SIZE + offset) * HEAD_DIM
        wanted = (key_pos >= key_first) & (key_pos < key_stop)
        acc, m_i, l_i = _attend_float_tile(
            q, None, acc, m_i, l_i, k_ptr + base + inner, v_ptr + base + inner,
            tile_mask(wanted, HEAD_DIM, BLOCK_D), key_pos, seen, scoring, False,
        )  # fmt: skip
    return acc, m_i, l_i
