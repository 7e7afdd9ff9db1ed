"""Extend (prefill, chunks, several new tokens): query tiles over everything a sequence has stored.

A program owns BLOCK_Q consecutive queries of one sequence x the query heads that share one kv
head, stacked as the rows of one tile (row = query * heads + head). So each key tile is loaded,
dequantized and laid out for the dot once for the whole group, and groups that are no power of two
(3 for SmolLM2, 7 for Qwen2) waste a row or two instead of a tile.

It walks the tiers one after the other with one online softmax, K8V8 first, because its weights
carry the value scale (`omlx_kernels.triton.quantized`). Causal mask and window shrink each walk to
the tiles that some row sees. The finished output is rotated back by tensor cores.

Grid: (query tiles of the longest sequence, latest first; kv heads x tiles of the group; sequences).
Moves: the visible keys and values once a query tile, mostly from L2; queries and outputs once.

Source: FlashAttention-2 (Dao 2023), stacked groups as in vLLM's unified attention.
Contract: `omlx_kernels.ops.paged_attention`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from omlx_kernels import tuned
from omlx_kernels.launch import extend_config
from omlx_kernels.layout import QUANT_GROUP, LayerBlocks
from omlx_kernels.metadata import AttentionMetadata
from omlx_kernels.triton.common import (
    DTYPE_NAMES,
    LN_2,
    LOG2_E,
    NO_WINDOW,
    TABLES,
    TIERS,
    block_d,
    block_sink,
    channels,
    current_target,
    dot,
    narrow,
    score_factors,
    tier_pointers,
    tile_mask,
    untraced,
    visible_tiles,
)
from omlx_kernels.triton.quantized import attend_quantized_tiles
from omlx_kernels.triton.rotation import hadamard_columns
from omlx_kernels.triton.tiers import attend_hot_tiles, attend_sink_page


@triton.jit
def _rows(
    tile, head_tile, kv_head, num_queries,
    HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Return the query and the head of each row of a tile, and whether there is such a row."""
    offs_m = tl.arange(0, BLOCK_M)
    query = tile * BLOCK_Q + offs_m // HEADS
    group_head = head_tile * HEADS + offs_m % HEADS
    is_row = (offs_m < BLOCK_Q * HEADS) & (query < num_queries) & (group_head < GROUP_SIZE)
    return query, (kv_head * GROUP_SIZE + group_head).to(tl.int64), is_row


@triton.jit
def _load_rows(
    ptr, stride_token, stride_head, token, rows, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Load the rows of a tile (`_rows`) of queries: [BLOCK_M, BLOCK_D]."""
    query, head, is_row = rows
    offsets = (token + query).to(tl.int64) * stride_token + head * stride_head
    offs_d = channels(HEAD_DIM, BLOCK_D)
    mask = tile_mask(is_row, HEAD_DIM, BLOCK_D)
    return tl.load(ptr + offsets[:, None] + offs_d[None, :], mask=mask, other=0.0)


@triton.jit(
    do_not_specialize=["stride_table", "window_size"], do_not_specialize_on_alignment=TABLES
)
def _paged_extend_kernel(
    q_ptr,
    sink_q_ptr,
    sink_logits_ptr,
    out_ptr,
    lse_ptr,
    sink,
    hot,
    k8v8,
    k8v4,
    k4v4,
    block_table_ptr,
    block_starts_ptr,
    tier_starts_ptr,
    sink_pages_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    stride_q_token,
    stride_q_head,
    stride_sink_q_token,
    stride_sink_q_head,
    stride_table,
    window_size,
    score_scale,
    softcap,
    ROTATED: tl.constexpr,
    KEEP_SINKS: tl.constexpr,
    SINK_TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SINK: tl.constexpr,
    QUANT_GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = BLOCK_M // HEADS
    seq = tl.program_id(2)
    kv_head = tl.program_id(1) // HEAD_TILES
    head_tile = tl.program_id(1) % HEAD_TILES
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest walks start first
    token = tl.load(query_start_loc_ptr + seq)
    num_queries = tl.load(query_start_loc_ptr + seq + 1) - token
    seq_len = tl.load(seq_lens_ptr + seq)
    if tile * BLOCK_Q >= num_queries:
        return

    rows = _rows(tile, head_tile, kv_head, num_queries, HEADS, GROUP_SIZE, BLOCK_Q, BLOCK_M)
    q = _load_rows(q_ptr, stride_q_token, stride_q_head, token, rows, HEAD_DIM, BLOCK_D)

    # Rows past the tile's end see what a later query would; they are not stored.
    row_pos = seq_len - num_queries + rows[0]
    first_pos = seq_len - num_queries + tile * BLOCK_Q
    key_first = tl.maximum(first_pos - window_size + 1, 0)
    key_stop = tl.minimum(first_pos + BLOCK_Q, seq_len)
    table_ptr = block_table_ptr + seq.to(tl.int64) * stride_table
    starts_ptr = block_starts_ptr + seq.to(tl.int64) * stride_table
    bounds_ptr = tier_starts_ptr + seq * (TIERS + 1)
    hot_first = tl.load(bounds_ptr)
    k8v8_first = tl.load(bounds_ptr + 1)
    k8v4_first = tl.load(bounds_ptr + 2)
    k4v4_first = tl.load(bounds_ptr + 3)
    last = tl.load(bounds_ptr + TIERS)
    seen = (row_pos, key_first, key_stop, window_size)
    scoring = (score_scale, softcap)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    lo, hi = visible_tiles(
        starts_ptr, k8v8_first, k8v4_first, key_first, key_stop, BLOCK_SIZE, QUANT_GROUP
    )
    acc, m_i, l_i = attend_quantized_tiles(
        q, acc, m_i, l_i, k8v8, table_ptr, starts_ptr, lo, hi, kv_head, seen, scoring, 8, 8,
        KV_HEADS, BLOCK_SIZE, HEAD_DIM, BLOCK_D, QUANT_GROUP, PLANAR=False,
    )  # fmt: skip
    lo, hi = visible_tiles(
        starts_ptr, k8v4_first, k4v4_first, key_first, key_stop, BLOCK_SIZE, QUANT_GROUP
    )
    acc, m_i, l_i = attend_quantized_tiles(
        q, acc, m_i, l_i, k8v4, table_ptr, starts_ptr, lo, hi, kv_head, seen, scoring, 8, 4,
        KV_HEADS, BLOCK_SIZE, HEAD_DIM, BLOCK_D, QUANT_GROUP, PLANAR=False,
    )  # fmt: skip
    lo, hi = visible_tiles(
        starts_ptr, k4v4_first, last, key_first, key_stop, BLOCK_SIZE, QUANT_GROUP
    )
    acc, m_i, l_i = attend_quantized_tiles(
        q, acc, m_i, l_i, k4v4, table_ptr, starts_ptr, lo, hi, kv_head, seen, scoring, 4, 4,
        KV_HEADS, BLOCK_SIZE, HEAD_DIM, BLOCK_D, QUANT_GROUP, PLANAR=False,
    )  # fmt: skip

    # The rows and the queries are found anew where they are needed again, not kept meanwhile.
    if KEEP_SINKS or key_first < SINK_TOKENS:
        tile = untraced(tile)
        rows = _rows(tile, head_tile, kv_head, num_queries, HEADS, GROUP_SIZE, BLOCK_Q, BLOCK_M)
        q = _load_rows(q_ptr, stride_q_token, stride_q_head, token, rows, HEAD_DIM, BLOCK_D)
        sink_q = None
        if sink_q_ptr is not None:
            sink_q = _load_rows(
                sink_q_ptr, stride_sink_q_token, stride_sink_q_head, token, rows, HEAD_DIM, BLOCK_D
            )
        page = tl.load(sink_pages_ptr + seq)
        acc, m_i, l_i = attend_sink_page(
            q, sink_q, acc, m_i, l_i, sink, page, kv_head, seen, scoring, KEEP_SINKS, SINK_TOKENS,
            KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SINK,
        )  # fmt: skip
    tile = untraced(tile)
    rows = _rows(tile, head_tile, kv_head, num_queries, HEADS, GROUP_SIZE, BLOCK_Q, BLOCK_M)
    q = _load_rows(q_ptr, stride_q_token, stride_q_head, token, rows, HEAD_DIM, BLOCK_D)
    lo, hi = visible_tiles(
        starts_ptr, hot_first, k8v8_first, key_first, key_stop, BLOCK_SIZE, BLOCK_N
    )
    acc, m_i, l_i = attend_hot_tiles(
        q, acc, m_i, l_i, hot, table_ptr, starts_ptr, lo, hi, kv_head, seen, scoring, KV_HEADS,
        BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N,
    )  # fmt: skip

    tile = untraced(tile)
    query, head, is_row = _rows(
        tile, head_tile, kv_head, num_queries, HEADS, GROUP_SIZE, BLOCK_Q, BLOCK_M
    )
    if sink_logits_ptr is not None:  # a learned sink: one more key, without a value
        logit = tl.load(sink_logits_ptr + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        m_all = tl.maximum(m_i, logit)
        alpha = tl.exp2(m_i - m_all)
        l_i = l_i * alpha + tl.exp2(logit - m_all)
        acc = acc * alpha[:, None]
        m_i = m_all
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)  # a row that sees no key: 0, and -inf
    out = acc * (1.0 / l_safe)[:, None]
    q_token = (token + query).to(tl.int64)
    row = q_token * (KV_HEADS * GROUP_SIZE) + head
    if lse_ptr is not None:
        tl.store(lse_ptr + row, (m_i + tl.log2(l_safe)) * LN_2, mask=is_row)
    out_row = out_ptr + row * HEAD_DIM
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    if ROTATED:
        DOT_DTYPE: tl.constexpr = tl.float32 if tl.float32 == DTYPE else tl.float16
        out = narrow(out, DOT_DTYPE)
        for first in tl.range(0, HEAD_DIM, COLUMNS):
            columns = first + tl.arange(0, COLUMNS)
            matrix = hadamard_columns(first, DOT_DTYPE, HEAD_DIM, BLOCK_D, COLUMNS)
            rotated = dot(out, matrix, tl.zeros([BLOCK_M, COLUMNS], tl.float32))
            rotated = narrow(rotated * (HEAD_DIM & -HEAD_DIM) ** -0.5, DTYPE)
            inside = is_row[:, None] & (columns < HEAD_DIM)[None, :]
            tl.store(out_row[:, None] + columns[None, :], rotated, mask=inside)
    else:
        offs_d = channels(HEAD_DIM, BLOCK_D)
        mask = tile_mask(is_row, HEAD_DIM, BLOCK_D)
        tl.store(out_row[:, None] + offs_d[None, :], narrow(out, DTYPE), mask=mask)


def paged_extend(
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
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend any number of queries a sequence; see `omlx_kernels.ops.paged_attention`."""
    tokens, q_heads, dim = q.shape
    kv_heads = blocks.hot.k.shape[1]
    group = q_heads // kv_heads
    tile_d = block_d(dim)
    key = tile_d, DTYPE_NAMES[q.dtype], group * meta.max_query_len
    # Tuned on whole tiles: the masks of a padded head_dim take registers, and could make it spill.
    config = tuned.lookup("extend", q.device, *key) if dim == tile_d else None
    config = config or extend_config(current_target(), *key, padded=dim < tile_d)
    sink_q = sink_q if keep_sinks and window_size is not None else None
    head_tiles = triton.cdiv(group, config.block_m)
    heads = triton.cdiv(group, head_tiles)
    query_tiles = triton.cdiv(meta.max_query_len, config.block_m // heads)
    out = torch.empty((tokens, q_heads, dim), dtype=q.dtype, device=q.device)
    with torch.cuda.device_of(q):
        _paged_extend_kernel[(query_tiles, kv_heads * head_tiles, meta.num_seqs)](
            q,
            sink_q,
            sink_logits,
            out,
            lse,
            *tier_pointers(blocks),
            meta.block_table,
            meta.block_starts,
            meta.tier_starts,
            meta.sink_pages,
            meta.seq_lens,
            meta.query_start_loc,
            q.stride(0),
            q.stride(1),
            *(q if sink_q is None else sink_q).stride()[:2],
            meta.block_table.shape[1],
            NO_WINDOW if window_size is None else window_size,
            *score_factors(sm_scale, softcap),
            ROTATED=rotated_v,
            KEEP_SINKS=keep_sinks,
            SINK_TOKENS=blocks.sink_tokens,
            BLOCK_SIZE=blocks.block_size,
            KV_HEADS=kv_heads,
            GROUP_SIZE=group,
            HEADS=heads,
            HEAD_TILES=head_tiles,
            HEAD_DIM=dim,
            BLOCK_D=tile_d,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_SINK=block_sink(blocks.sink_tokens),
            QUANT_GROUP=QUANT_GROUP,
            COLUMNS=16 if q.dtype == torch.float32 else 64,
            **config.options(),
            enable_fp_fusion=True,
        )
    return out
