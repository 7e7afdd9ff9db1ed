"""The ops on CPUs, in C++ through a C ABI: integer dots on 8-bit blocks, no torch headers.

The functions have the signatures and the contract of `omlx_kernels.ops`. They check what the C++
side relies on (dtypes, shapes, contiguity); the values in index tables are checked there, before
anything is written. `build` compiles the library, `library` loads it and picks the instruction set.

Decode, and extend by at most `MAX_NATIVE_QUERIES` tokens, run wholly in C++ on
``torch.get_num_threads()`` threads. More queries are bound by arithmetic, so `extend` turns the
blocks into floats range by range and lets torch attend.
"""

from __future__ import annotations

import struct
from itertools import pairwise

import torch

from omlx_kernels.layout import LayerBlocks, TierBlocks
from omlx_kernels.metadata import AttentionMetadata
from omlx_kernels.native import extend, library
from omlx_kernels.native.arguments import (
    DTYPES,
    block_fields,
    check_append,
    check_convert,
    check_layer,
    quantized_fields,
)
from omlx_kernels.native.library import available, isa

__all__ = ["append_kv", "available", "convert_blocks", "isa", "paged_attention"]

MAX_NATIVE_QUERIES = 16
"""Queries of a sequence up to which reading the blocks costs more than the arithmetic."""

# The structs of src/abi.h.
_APPEND = struct.Struct("18q")
_CONVERT = struct.Struct("17q")
_ATTENTION = struct.Struct("35qd")


def append_kv(
    k: torch.Tensor, v: torch.Tensor, dst: TierBlocks, slot_mapping: torch.Tensor
) -> None:
    """Scatter tokens into their slots; see `omlx_kernels.ops.append_kv`."""
    _, heads, size, dim = dst.k.shape
    check_append(dst, slot_mapping)
    slot_mapping = slot_mapping.contiguous()
    arguments = _APPEND.pack(
        k.data_ptr(), v.data_ptr(), *k.stride(), *v.stride(), slot_mapping.data_ptr(),
        dst.k.data_ptr(), dst.v.data_ptr(), k.shape[0], heads, dim, size, dst.num_blocks,
        DTYPES[dst.k.dtype], torch.get_num_threads(),
    )  # fmt: skip
    library.call("omlx_append_kv", arguments)


def convert_blocks(
    src: TierBlocks, dst: TierBlocks, src_ids: torch.Tensor, dst_ids: torch.Tensor
) -> None:
    """Quantize hot blocks into 8-bit blocks; see `omlx_kernels.ops.convert_blocks`."""
    _, heads, size, dim = src.k.shape
    check_convert(src, dst, src_ids, dst_ids)
    src_ids, dst_ids = src_ids.contiguous(), dst_ids.contiguous()
    arguments = _CONVERT.pack(
        src.k.data_ptr(), src.v.data_ptr(), *quantized_fields(dst), src_ids.data_ptr(),
        dst_ids.data_ptr(), src_ids.numel(), src.num_blocks, dst.num_blocks, heads, dim, size,
        DTYPES[src.k.dtype], torch.get_num_threads(),
    )  # fmt: skip
    library.call("omlx_convert_blocks", arguments)


def paged_attention(
    q: torch.Tensor,
    blocks: LayerBlocks,
    meta: AttentionMetadata,
    *,
    sm_scale: float,
    window_size: int | None = None,
    keep_sinks: bool = True,
) -> torch.Tensor:
    """Attend through the block table; see `omlx_kernels.ops.paged_attention`."""
    check_layer(blocks)
    if q.stride(2) != 1:
        q = q.contiguous()
    num_tokens, num_heads, _ = q.shape
    table = meta.block_table
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    arguments = _ATTENTION.pack(
        *block_fields(blocks), table.data_ptr(), meta.block_starts.data_ptr(),
        meta.tier_starts.data_ptr(), meta.sink_pages.data_ptr(), meta.seq_lens.data_ptr(),
        meta.query_start_loc.data_ptr(), table.shape[0], table.shape[1], q.data_ptr(),
        out.data_ptr(), q.stride(0), q.stride(1), num_tokens, num_heads, window_size or 0,
        keep_sinks, MAX_NATIVE_QUERIES, torch.get_num_threads(), sm_scale,
    )  # fmt: skip
    library.call("omlx_paged_attention", arguments)
    if num_tokens > MAX_NATIVE_QUERIES:
        bounds = meta.query_start_loc.tolist()
        for seq, (first, last) in enumerate(pairwise(bounds)):
            if last - first > MAX_NATIVE_QUERIES:
                out[first:last] = extend.attend(
                    q[first:last], blocks, meta, seq,
                    sm_scale=sm_scale, window_size=window_size, keep_sinks=keep_sinks,
                )  # fmt: skip
    return out
