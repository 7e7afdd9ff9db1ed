"""Extend (prefill, chunks, several new tokens): query tiles over everything a sequence has stored.

A program owns BLOCK_Q consecutive queries of one sequence x the query heads that share one kv
head, stacked as the rows of one tile (row = query * heads + head). So each key tile is loaded,
dequantized and laid out for the dot once for the whole group, and groups that are no power of two
(3 for SmolLM2, 7 for Qwen2) waste a row or two instead of a tile.

It walks the K8V8 blocks, then the sink page, then the HOT blocks with one online softmax: quantized
tiers first, because their weights carry the value scale (`omlx_kernels.triton.tiers`). Causal mask
and window shrink each walk to the tiles that some row sees.

Grid: (query tiles of the longest sequence, latest first; kv heads x tiles of the group; sequences).
Moves: the visible keys and values once a query tile, mostly from L2; queries and outputs once.

Source: FlashAttention-2 (Dao 2023), stacked groups as in vLLM's unified attention.
Contract: `omlx_kernels.ops.paged_attention`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from omlx_kernels.launch import extend_config
from omlx_kernels.layout import QUANT_GROUP, LayerBlocks
from omlx_kernels.metadata import AttentionMetadata
from omlx_kernels.triton.common import (
    DTYPE_NAMES,
    LOG2_E,
    NO_WINDOW,
    TABLES,
    block_d,
    block_sink,
    current_target,
    narrow,
    tier_pointers,
    tile_mask,
    visible_tiles,
)
from omlx_kernels.triton.tiers import attend_hot_tiles, attend_k8v8_tiles, attend_sink_page


@triton.jit(
    do_not_specialize=["stride_table", "window_size"], do_not_specialize_on_alignment=TABLES
)
def _paged_extend_kernel(
    q_ptr,
    out_ptr,
    sink,
    hot,
    k8v8,
    block_table_ptr,
    block_starts_ptr,
    tier_starts_ptr,
    sink_pages_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    stride_q_token,
    stride_q_head,
    stride_table,
    window_size,
    sm_scale_log2,
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

    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    query = tile * BLOCK_Q + offs_m // HEADS
    group_head = head_tile * HEADS + offs_m % HEADS
    is_row = (offs_m < BLOCK_Q * HEADS) & (query < num_queries) & (group_head < GROUP_SIZE)
    mask = tile_mask(is_row, offs_d, HEAD_DIM, BLOCK_D)
    q_token = (token + query).to(tl.int64)
    head = (kv_head * GROUP_SIZE + group_head).to(tl.int64)
    q_row = q_token * stride_q_token + head * stride_q_head
    q = tl.load(q_ptr + q_row[:, None] + offs_d[None, :], mask=mask, other=0.0)

    # Rows past the tile's end see what a later query would; they are not stored.
    row_pos = seq_len - num_queries + query
    first_pos = seq_len - num_queries + tile * BLOCK_Q
    key_first = tl.maximum(first_pos - window_size + 1, 0)
    key_stop = tl.minimum(first_pos + BLOCK_Q, seq_len)
    table_ptr = block_table_ptr + seq.to(tl.int64) * stride_table
    starts_ptr = block_starts_ptr + seq.to(tl.int64) * stride_table
    hot_first = tl.load(tier_starts_ptr + seq * 3)
    k8v8_first = tl.load(tier_starts_ptr + seq * 3 + 1)
    k8v8_last = tl.load(tier_starts_ptr + seq * 3 + 2)

    lo, hi = visible_tiles(
        starts_ptr, k8v8_first, k8v8_last, key_first, key_stop, BLOCK_SIZE, QUANT_GROUP
    )
    acc, m_i, l_i = attend_k8v8_tiles(
        q, k8v8, table_ptr, starts_ptr, lo, hi, kv_head, key_first, key_stop,
        row_pos, window_size, sm_scale_log2, KV_HEADS, BLOCK_SIZE, HEAD_DIM, BLOCK_D,
        QUANT_GROUP, PLANAR=False,
    )  # fmt: skip
    if KEEP_SINKS or key_first < SINK_TOKENS:
        page = tl.load(sink_pages_ptr + seq)
        acc, m_i, l_i = attend_sink_page(
            q, acc, m_i, l_i, sink, page, kv_head, key_first, key_stop, row_pos, window_size,
            sm_scale_log2, KEEP_SINKS, SINK_TOKENS, KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SINK,
        )  # fmt: skip
    lo, hi = visible_tiles(
        starts_ptr, hot_first, k8v8_first, key_first, key_stop, BLOCK_SIZE, BLOCK_N
    )
    acc, m_i, l_i = attend_hot_tiles(
        q, acc, m_i, l_i, hot, table_ptr, starts_ptr, lo, hi, kv_head, key_first, key_stop,
        row_pos, window_size, sm_scale_log2, KV_HEADS, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N,
    )  # fmt: skip

    inverse = 1.0 / tl.where(l_i == 0.0, 1.0, l_i)  # a row that sees no key: 0
    out = narrow(acc * inverse[:, None], out_ptr.dtype.element_ty)
    out_row = (q_token * (KV_HEADS * GROUP_SIZE) + head) * HEAD_DIM
    tl.store(out_ptr + out_row[:, None] + offs_d[None, :], out, mask=mask)


def paged_extend(
    q: torch.Tensor,
    blocks: LayerBlocks,
    meta: AttentionMetadata,
    *,
    sm_scale: float,
    window_size: int | None = None,
    keep_sinks: bool = True,
) -> torch.Tensor:
    """Attend any number of queries a sequence; see `omlx_kernels.ops.paged_attention`."""
    tokens, q_heads, dim = q.shape
    kv_heads = blocks.hot.k.shape[1]
    group = q_heads // kv_heads
    tile_d = block_d(dim)
    rows = group * meta.max_query_len
    config = extend_config(current_target(), tile_d, DTYPE_NAMES[q.dtype], rows)
    head_tiles = triton.cdiv(group, config.block_m)
    heads = triton.cdiv(group, head_tiles)
    query_tiles = triton.cdiv(meta.max_query_len, config.block_m // heads)
    out = torch.empty((tokens, q_heads, dim), dtype=q.dtype, device=q.device)
    with torch.cuda.device_of(q):
        _paged_extend_kernel[(query_tiles, kv_heads * head_tiles, meta.num_seqs)](
            q,
            out,
            *tier_pointers(blocks),
            meta.block_table,
            meta.block_starts,
            meta.tier_starts,
            meta.sink_pages,
            meta.seq_lens,
            meta.query_start_loc,
            q.stride(0),
            q.stride(1),
            meta.block_table.shape[1],
            NO_WINDOW if window_size is None else window_size,
            sm_scale * LOG2_E,
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
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            enable_fp_fusion=True,
        )
    return out
