"""The ops on CPUs, in C++ through a C ABI: integer dots on quantized blocks, no torch headers.

The functions have the signatures and the contract of `omlx_kernels.ops`. They check what the C++
side relies on (dtypes, shapes, contiguity); the values in index tables are checked there, before
anything is written. `build` compiles the library, `library` loads it and picks the instruction set.

Decode, and extend by at most `library.max_queries` tokens, run wholly in C++ on
``torch.get_num_threads()`` threads. More queries are bound by arithmetic, for which torch may have
the better unit: `extend` turns the blocks into floats range by range and lets torch attend. That is
so where the processor has AMX, which nothing here uses itself: torch's bfloat16 attention runs on
it. It is also so with less than AVX-512. With AVX-512 VNNI and no AMX everything is C++.
"""

from __future__ import annotations

import struct
from dataclasses import fields
from itertools import pairwise

import torch

from omlx_kernels.layout import LayerBlocks, Tier, TierBlocks
from omlx_kernels.metadata import AttentionMetadata
from omlx_kernels.native import extend, library
from omlx_kernels.native.arguments import (
    DTYPES,
    block_fields,
    check_append,
    check_convert,
    check_copy,
    check_layer,
    check_on_cpu,
    tier_fields,
)
from omlx_kernels.native.library import available, isa

__all__ = ["append_kv", "available", "convert_blocks", "copy_blocks", "isa", "paged_attention"]

# The structs of src/abi.h.
_APPEND = struct.Struct("19q")
_CONVERT = struct.Struct("24q")
_COPY = struct.Struct("17q")
_ATTENTION = struct.Struct("68q2d")


def append_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    dst: TierBlocks,
    slot_mapping: torch.Tensor,
    *,
    rotate_v: bool = False,
) -> None:
    """Scatter tokens into their slots; see `omlx_kernels.ops.append_kv`."""
    _, heads, size, dim = dst.k.shape
    check_append(dst, slot_mapping)
    slot_mapping = slot_mapping.contiguous()
    arguments = _APPEND.pack(
        k.data_ptr(), v.data_ptr(), *k.stride(), *v.stride(), slot_mapping.data_ptr(),
        dst.k.data_ptr(), dst.v.data_ptr(), k.shape[0], heads, dim, size, dst.num_blocks,
        DTYPES[dst.k.dtype], rotate_v, torch.get_num_threads(),
    )  # fmt: skip
    library.call("omlx_append_kv", arguments)


def convert_blocks(
    src: TierBlocks,
    dst: TierBlocks,
    src_tier: Tier,
    dst_tier: Tier,
    src_ids: torch.Tensor,
    dst_ids: torch.Tensor,
) -> None:
    """Turn blocks into colder ones; see `omlx_kernels.ops.convert_blocks`."""
    _, heads, size, dim = src.k.shape
    check_convert(src, dst, src_tier, dst_tier, src_ids, dst_ids)
    src_ids, dst_ids = src_ids.contiguous(), dst_ids.contiguous()
    arguments = _CONVERT.pack(
        *tier_fields(src), *tier_fields(dst), src_tier, dst_tier, src_ids.data_ptr(),
        dst_ids.data_ptr(), src_ids.numel(), heads, dim, size, DTYPES.get(src.k.dtype, 0),
        torch.get_num_threads(),
    )  # fmt: skip
    library.call("omlx_convert_blocks", arguments)


def copy_blocks(blocks: TierBlocks, src_ids: torch.Tensor, dst_ids: torch.Tensor) -> None:
    """Copy blocks of one tier; see `omlx_kernels.ops.copy_blocks`.

    Raises:
        ValueError: also for an id out of range, a target listed twice or also listed as a source.
    """
    check_copy(blocks, src_ids, dst_ids)
    src_ids, dst_ids = src_ids.contiguous(), dst_ids.contiguous()
    parts = [getattr(blocks, f.name) for f in fields(blocks)]
    arguments = _COPY.pack(
        *tier_fields(blocks)[:-1],
        *[0 if x is None else x[:1].numel() * x.element_size() for x in parts],
        blocks.num_blocks, src_ids.data_ptr(), dst_ids.data_ptr(), src_ids.numel(),
        torch.get_num_threads(),
    )  # fmt: skip
    library.call("omlx_copy_blocks", arguments)


def paged_attention(
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
    """Attend through the block table; see `omlx_kernels.ops.paged_attention`."""
    check_layer(blocks)
    if q.stride(2) != 1:
        q = q.contiguous()
    sink_pointer = sink_token = sink_head = logits_pointer = 0
    if sink_q is not None or sink_logits is not None:
        check_on_cpu("paged_attention", sink_q=sink_q, sink_logits=sink_logits)
    if sink_q is not None:
        sink_q = sink_q if sink_q.stride(2) == 1 else sink_q.contiguous()
        sink_pointer, (sink_token, sink_head, _) = sink_q.data_ptr(), sink_q.stride()
    if sink_logits is not None:
        sink_logits = sink_logits.float().contiguous()
        logits_pointer = sink_logits.data_ptr()
    num_tokens, num_heads, _ = q.shape
    max_queries = library.max_queries()
    table = meta.block_table
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    arguments = _ATTENTION.pack(
        *block_fields(blocks), table.data_ptr(), meta.block_starts.data_ptr(),
        meta.tier_starts.data_ptr(), meta.sink_pages.data_ptr(), meta.seq_lens.data_ptr(),
        meta.query_start_loc.data_ptr(), table.shape[0], table.shape[1], q.data_ptr(),
        sink_pointer, logits_pointer, out.data_ptr(), q.stride(0), q.stride(1), sink_token,
        sink_head, num_tokens, num_heads, window_size or 0, keep_sinks, rotated_v,
        max_queries, torch.get_num_threads(),
        0 if split_mass is None else split_mass.data_ptr(), meta.splits.data_ptr(),
        meta.split_starts.data_ptr(), meta.splits.shape[0], 0 if lse is None else lse.data_ptr(),
        sm_scale, softcap or 0.0,
    )  # fmt: skip
    library.call("omlx_paged_attention", arguments)
    if num_tokens > max_queries:
        bounds = meta.query_start_loc.tolist()
        for seq, (first, last) in enumerate(pairwise(bounds)):
            if last - first > max_queries:
                out[first:last] = extend.attend(
                    q[first:last], blocks, meta, seq, sm_scale=sm_scale, window_size=window_size,
                    keep_sinks=keep_sinks, rotated_v=rotated_v,
                    sink_q=None if sink_q is None else sink_q[first:last],
                    softcap=softcap, sink_logits=sink_logits,
                    lse=None if lse is None else lse[first:last],
                )  # fmt: skip
    return out
