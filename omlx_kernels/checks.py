"""Argument checks of the public ops; each raises ValueError before anything is written."""

from __future__ import annotations

import torch

from omlx_kernels.errors import describe
from omlx_kernels.layout import BLOCK_TIERS, LayerBlocks, TierBlocks
from omlx_kernels.metadata import AttentionMetadata

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def _shape(t: torch.Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)} on {t.device}"


def check_append(
    k: torch.Tensor, v: torch.Tensor, dst: TierBlocks, slot_mapping: torch.Tensor
) -> None:
    """Check `append_kv`'s arguments (shapes, dtypes, devices; not the slots' values)."""
    heads, dim = dst.k.shape[1], dst.k.shape[3]
    for name, x in (("k", k), ("v", v)):
        if x.dim() != 3 or x.shape[1:] != (heads, dim) or x.dtype != dst.k.dtype:
            dtype = str(dst.k.dtype).removeprefix("torch.")
            expected = f"{dtype} [num_tokens, kv_heads={heads}, head_dim={dim}]"
            raise ValueError(describe("append_kv", name, expected, _shape(x)))
        if x.device != dst.k.device:
            raise ValueError(describe("append_kv", name, f"on {dst.k.device}", f"{x.device}"))
    if k.shape != v.shape:
        raise ValueError(describe("append_kv", "v", f"shaped like k {tuple(k.shape)}", _shape(v)))
    if slot_mapping.dtype != torch.int64 or slot_mapping.shape != k.shape[:1]:
        expected = f"int64 [num_tokens={k.shape[0]}]"
        got = _shape(slot_mapping)
        raise ValueError(
            describe("append_kv", "slot_mapping", expected, got, "call .to(torch.int64)")
        )


def check_convert(
    src: TierBlocks, dst: TierBlocks, src_ids: torch.Tensor, dst_ids: torch.Tensor
) -> None:
    """Check `convert_blocks`'s arguments."""
    if src.k.dtype not in FLOATS:
        expected = "blocks in the model's dtype"
        raise ValueError(describe("convert_blocks", "src", expected, _shape(src.k)))
    if dst.k_scale is None or dst.k_zero is None or dst.v_scale is None:
        raise ValueError(describe("convert_blocks", "dst", "8-bit blocks", _shape(dst.k)))
    if src.k.shape[1:] != dst.k.shape[1:]:
        expected = f"blocks shaped like src's {tuple(src.k.shape[1:])}"
        raise ValueError(describe("convert_blocks", "dst", expected, _shape(dst.k)))
    for name, ids in (("src_ids", src_ids), ("dst_ids", dst_ids)):
        if ids.dtype != torch.int32 or ids.dim() != 1 or ids.shape != src_ids.shape:
            expected = f"int32 [num_blocks={src_ids.numel()}]"
            raise ValueError(
                describe("convert_blocks", name, expected, _shape(ids), "call .to(torch.int32)")
            )


def check_attention(
    q: torch.Tensor, blocks: LayerBlocks, meta: AttentionMetadata, window_size: int | None
) -> None:
    """Check `paged_attention`'s arguments (not the tables' values, which live on the device)."""
    op = "paged_attention"
    heads, dim = blocks.hot.k.shape[1], blocks.hot.k.shape[3]
    if q.dim() != 3 or q.shape[1] % heads or q.shape[2] != dim or q.shape[1] == 0:
        expected = f"[num_tokens, a multiple of kv_heads={heads}, head_dim={dim}]"
        raise ValueError(describe(op, "q", expected, _shape(q)))
    if q.dtype != blocks.hot.k.dtype or q.device != blocks.hot.k.device:
        expected = f"{blocks.hot.k.dtype} on {blocks.hot.k.device} like the hot blocks"
        raise ValueError(describe(op, "q", expected, _shape(q)))
    if window_size is not None and window_size < 1:
        raise ValueError(describe(op, "window_size", "None or >= 1", str(window_size)))
    seqs = meta.num_seqs
    shapes = {
        "block_table": (seqs, meta.block_table.shape[-1]),
        "block_starts": tuple(meta.block_table.shape),
        "tier_starts": (seqs, len(BLOCK_TIERS) + 1),
        "sink_pages": (seqs,),
        "seq_lens": (seqs,),
        "query_start_loc": (seqs + 1,),
        "splits": (meta.splits.shape[0], 4),
        "split_starts": (seqs + 1,),
    }
    for name, shape in shapes.items():
        x = getattr(meta, name)
        if x.dtype != torch.int32 or tuple(x.shape) != shape or not x.is_contiguous():
            expected = f"contiguous int32 {shape}"
            raise ValueError(describe(op, name, expected, _shape(x), "call .to(torch.int32)"))
        if x.device != q.device:
            raise ValueError(describe(op, name, f"on {q.device}", f"{x.device}"))
