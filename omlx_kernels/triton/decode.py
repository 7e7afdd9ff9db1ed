"""Decode: one query a sequence, split over the keys (split-KV), then merged by log-sum-exp.

    split s:  m_s = max_t s_t,  l_s = sum_t 2**(s_t - m_s),  o_s = sum_t 2**(s_t - m_s) v_t / l_s,
              lse_s = m_s + log2(l_s)      (base 2; -inf where the split holds no visible key)
    merge:    o = sum_s 2**(lse_s - lse) o_s,  lse = log2 sum_s 2**lse_s   (0 where all are -inf)

Grid of the split kernel: (splits x tiles of the query heads that share a kv head, kv heads). A
split holds blocks of one tier (`AttentionMetadata.splits`), so a program branches once, then runs
that tier's plain loop. Moves: each visible key and value of the split once a tile of query heads,
one tile up to 16 heads; where there are more, its programs are neighbours and share L2. Plus
4 * (head_dim + 1) bytes a (split, query head), written once and read once (`bench/roofline.py`).
Grid of the merge kernel: (sequences, query heads). It also lets a learned sink join the sum, and
rotates the output back where the values are stored rotated: linear, so once is enough. On request
it writes each split's share of the attention, 2**(lse_s - lse): 4 bytes a (split, query head), and
the lse of all of them in base e: 4 bytes a query head.

Rows are padded to 16 for the tensor cores, also where a kv head has a single query head. A path
without dots (float32 products and sums, a running maximum for each key of a tile) was compiled
against this one and lost: on sm_86 833 instructions against 643 for a tile of 64 K8V8 keys and 702
against 365 for a hot one (sm_90: 861/651, 751/378), with more registers (209 and 239 against 207
for all tiers together). Of those 643 the padded dots are 32 (triton 3.7.1, D=128, four warps).

Source: FlashDecoding (Dao et al. 2023). Contract: `omlx_kernels.ops.paged_attention`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from omlx_kernels import tuned
from omlx_kernels.launch import decode_config
from omlx_kernels.layout import QUANT_GROUP, LayerBlocks
from omlx_kernels.metadata import AttentionMetadata
from omlx_kernels.triton.common import (
    DTYPE_NAMES,
    LN_2,
    LOG2_E,
    NO_WINDOW,
    TABLES,
    TIER_HOT,
    TIER_K4V4,
    TIER_K8V4,
    TIER_K8V8,
    block_d,
    block_sink,
    channels,
    current_target,
    narrow,
    score_factors,
    tier_pointers,
    tile_mask,
)
from omlx_kernels.triton.quantized import attend_quantized_tiles
from omlx_kernels.triton.rotation import rotate
from omlx_kernels.triton.tiers import attend_hot_tiles, attend_sink_page


@triton.jit(
    do_not_specialize=["stride_table", "window_size"], do_not_specialize_on_alignment=TABLES
)
def _paged_decode_kernel(
    q_ptr,
    sink_q_ptr,
    partial_ptr,
    lse_ptr,
    sink,
    hot,
    k8v8,
    k8v4,
    k4v4,
    block_table_ptr,
    block_starts_ptr,
    sink_pages_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    splits_ptr,
    stride_q_token,
    stride_q_head,
    stride_sink_q_token,
    stride_sink_q_head,
    stride_table,
    window_size,
    score_scale,
    softcap,
    KEEP_SINKS: tl.constexpr,
    SINK_TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SINK: tl.constexpr,
    QUANT_GROUP: tl.constexpr,
):
    HEAD_TILES: tl.constexpr = (GROUP_SIZE + BLOCK_M - 1) // BLOCK_M
    split = tl.program_id(0) // HEAD_TILES
    kv_head = tl.program_id(1)
    seq = tl.load(splits_ptr + split * 4)
    tier = tl.load(splits_ptr + split * 4 + 1)
    first = tl.load(splits_ptr + split * 4 + 2)
    last = tl.load(splits_ptr + split * 4 + 3)
    seq_len = tl.load(seq_lens_ptr + seq)
    token = tl.load(query_start_loc_ptr + seq)
    # A sequence without a query in this step is not merged either: nothing to write.
    if tl.load(query_start_loc_ptr + seq + 1) == token:
        return

    # A plain 0 in the place of that axis of one program costs up to 8 registers (triton 3.7.1).
    head_tile = tl.program_id(0) % HEAD_TILES if HEAD_TILES > 1 else tl.program_id(2)
    offs_m = head_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = channels(HEAD_DIM, BLOCK_D)
    head = kv_head * GROUP_SIZE + offs_m
    mask = tile_mask(offs_m < GROUP_SIZE, HEAD_DIM, BLOCK_D)
    q_row = token.to(tl.int64) * stride_q_token + head.to(tl.int64) * stride_q_head
    q = tl.load(q_ptr + q_row[:, None] + offs_d[None, :], mask=mask, other=0.0)

    position = seq_len - 1
    row_pos = tl.full([BLOCK_M], 0, tl.int32) + position
    seen = (row_pos, position - window_size + 1, seq_len, window_size)
    scoring = (score_scale, softcap)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    table_ptr = block_table_ptr + seq.to(tl.int64) * stride_table
    starts_ptr = block_starts_ptr + seq.to(tl.int64) * stride_table

    # A tile that is wholly masked costs a turn of the loop, but its loads are predicated off.
    TILES: tl.constexpr = BLOCK_SIZE // QUANT_GROUP
    PLANAR: tl.constexpr = q.dtype != tl.float32
    if tier == TIER_K8V8:
        acc, m_i, l_i = attend_quantized_tiles(
            q, acc, m_i, l_i, k8v8, table_ptr, starts_ptr, first * TILES, last * TILES, kv_head,
            seen, scoring, 8, 8, KV_HEADS, BLOCK_SIZE, HEAD_DIM, BLOCK_D, QUANT_GROUP, PLANAR,
        )  # fmt: skip
    elif tier == TIER_K8V4:
        acc, m_i, l_i = attend_quantized_tiles(
            q, acc, m_i, l_i, k8v4, table_ptr, starts_ptr, first * TILES, last * TILES, kv_head,
            seen, scoring, 8, 4, KV_HEADS, BLOCK_SIZE, HEAD_DIM, BLOCK_D, QUANT_GROUP, PLANAR,
        )  # fmt: skip
    elif tier == TIER_K4V4:
        acc, m_i, l_i = attend_quantized_tiles(
            q, acc, m_i, l_i, k4v4, table_ptr, starts_ptr, first * TILES, last * TILES, kv_head,
            seen, scoring, 4, 4, KV_HEADS, BLOCK_SIZE, HEAD_DIM, BLOCK_D, QUANT_GROUP, PLANAR,
        )  # fmt: skip
    elif tier == TIER_HOT:
        HOT_TILES: tl.constexpr = BLOCK_SIZE // BLOCK_N
        acc, m_i, l_i = attend_hot_tiles(
            q, acc, m_i, l_i, hot, table_ptr, starts_ptr, first * HOT_TILES, last * HOT_TILES,
            kv_head, seen, scoring, KV_HEADS, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N,
        )  # fmt: skip
    else:
        sink_q = None
        if sink_q_ptr is not None:
            q_row = token.to(tl.int64) * stride_sink_q_token
            q_row = q_row + head.to(tl.int64) * stride_sink_q_head
            sink_q = tl.load(sink_q_ptr + q_row[:, None] + offs_d[None, :], mask=mask, other=0.0)
        page = tl.load(sink_pages_ptr + seq)
        acc, m_i, l_i = attend_sink_page(
            q, sink_q, acc, m_i, l_i, sink, page, kv_head, seen, scoring, KEEP_SINKS,
            SINK_TOKENS, KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SINK,
        )  # fmt: skip

    row = split.to(tl.int64) * (KV_HEADS * GROUP_SIZE) + head
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)  # no visible key: m_i = -inf, acc = 0
    tl.store(lse_ptr + row, m_i + tl.log2(l_safe), mask=offs_m < GROUP_SIZE)
    out = acc * (1.0 / l_safe)[:, None]
    tl.store(partial_ptr + row[:, None] * HEAD_DIM + offs_d[None, :], out, mask=mask)


@triton.jit(do_not_specialize_on_alignment=["query_start_loc_ptr", "split_starts_ptr"])
def _merge_splits_kernel(
    partial_ptr, lse_ptr, sink_logits_ptr, out_ptr, mass_ptr, total_ptr,
    query_start_loc_ptr, split_starts_ptr,
    ROTATED: tl.constexpr, Q_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(query_start_loc_ptr + seq)
    if tl.load(query_start_loc_ptr + seq + 1) == token:
        return
    first = tl.load(split_starts_ptr + seq)
    last = tl.load(split_starts_ptr + seq + 1)
    offs_d = tl.arange(0, BLOCK_D)
    m_i = float("-inf")
    l_i = 0.0
    if sink_logits_ptr is not None:  # a learned sink: a key without a value
        m_i = tl.load(sink_logits_ptr + head).to(tl.float32) * LOG2_E
        l_i = 1.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for base in tl.range(first, last, BLOCK_S):
        split = base + tl.arange(0, BLOCK_S)
        row = split.to(tl.int64) * Q_HEADS + head
        lse = tl.load(lse_ptr + row, mask=split < last, other=float("-inf"))
        m_new = tl.maximum(m_i, tl.max(lse, 0))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        weight = tl.exp2(lse - m_safe)
        alpha = tl.exp2(m_i - m_safe)
        mask = (lse > float("-inf"))[:, None] & (offs_d < HEAD_DIM)[None, :]
        partial = partial_ptr + row[:, None] * HEAD_DIM + offs_d[None, :]
        partial = tl.load(partial, mask=mask, other=0.0)
        acc = acc * alpha + tl.sum(weight[:, None] * partial, 0)
        l_i = l_i * alpha + tl.sum(weight, 0)
        m_i = m_new
    out = acc * (1.0 / tl.where(l_i == 0.0, 1.0, l_i))
    if ROTATED:
        out = tl.reshape(rotate(tl.reshape(out, [1, BLOCK_D]), HEAD_DIM), [BLOCK_D])
    out = narrow(out, out_ptr.dtype.element_ty)
    out_ptr += (token.to(tl.int64) * Q_HEADS + head) * HEAD_DIM
    tl.store(out_ptr + offs_d, out, mask=offs_d < HEAD_DIM)
    if total_ptr is not None:
        total = (m_i + tl.log2(tl.where(l_i == 0.0, 1.0, l_i))) * LN_2
        tl.store(total_ptr + token.to(tl.int64) * Q_HEADS + head, total)
    if mass_ptr is not None:  # m_i is finite where any split's lse is
        for base in tl.range(first, last, BLOCK_S):
            split = base + tl.arange(0, BLOCK_S)
            row = split.to(tl.int64) * Q_HEADS + head
            lse = tl.load(lse_ptr + row, mask=split < last, other=float("-inf"))
            mass = tl.where(lse > float("-inf"), tl.exp2(lse - m_i) / l_i, 0.0)
            tl.store(mass_ptr + row, mass, mask=split < last)


def paged_decode(
    q: torch.Tensor,
    blocks: LayerBlocks,
    meta: AttentionMetadata,
    *,
    sm_scale: float,
    window_size: int | None = None,
    keep_sinks: bool = True,
    rotated_v: bool = False,
    sink_q: torch.Tensor | None = None,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    split_mass: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend at most one query a sequence; see `omlx_kernels.ops.paged_attention`."""
    tokens, q_heads, dim = q.shape
    kv_heads = blocks.hot.k.shape[1]
    group = q_heads // kv_heads
    tile_d = block_d(dim)
    key = tile_d, DTYPE_NAMES[q.dtype], group
    config = tuned.lookup("decode", q.device, *key) or decode_config(current_target(), *key)
    sink_q = sink_q if keep_sinks and window_size is not None else None
    num_splits = meta.splits.shape[0]
    out = torch.empty((tokens, q_heads, dim), dtype=q.dtype, device=q.device)
    partial = torch.empty((num_splits, q_heads, dim), dtype=torch.float32, device=q.device)
    split_lse = torch.empty((num_splits, q_heads), dtype=torch.float32, device=q.device)
    head_tiles = triton.cdiv(group, config.block_m)
    with torch.cuda.device_of(q):
        if num_splits:
            _paged_decode_kernel[(num_splits * head_tiles, kv_heads)](
                q,
                sink_q,
                partial,
                split_lse,
                *tier_pointers(blocks),
                meta.block_table,
                meta.block_starts,
                meta.sink_pages,
                meta.seq_lens,
                meta.query_start_loc,
                meta.splits,
                q.stride(0),
                q.stride(1),
                *(q if sink_q is None else sink_q).stride()[:2],
                meta.block_table.shape[1],
                NO_WINDOW if window_size is None else window_size,
                *score_factors(sm_scale, softcap),
                KEEP_SINKS=keep_sinks,
                SINK_TOKENS=blocks.sink_tokens,
                BLOCK_SIZE=blocks.block_size,
                KV_HEADS=kv_heads,
                GROUP_SIZE=group,
                HEAD_DIM=dim,
                BLOCK_D=tile_d,
                BLOCK_M=config.block_m,
                BLOCK_N=config.block_n,
                BLOCK_SINK=block_sink(blocks.sink_tokens),
                QUANT_GROUP=QUANT_GROUP,
                **config.options(),
                enable_fp_fusion=True,
            )
        _merge_splits_kernel[(meta.num_seqs, q_heads)](
            partial,
            split_lse,
            sink_logits,
            out,
            split_mass,
            lse,
            meta.query_start_loc,
            meta.split_starts,
            ROTATED=rotated_v,
            Q_HEADS=q_heads,
            HEAD_DIM=dim,
            BLOCK_D=tile_d,
            BLOCK_S=16,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return out
