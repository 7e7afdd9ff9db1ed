"""Argument checks of the public ops; each raises ValueError before anything is written."""

from __future__ import annotations

import torch

from omlx_kernels.errors import describe
from omlx_kernels.layout import BLOCK_TIERS, LayerBlocks, Tier, TierBlocks
from omlx_kernels.metadata import AttentionMetadata

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def _shape(t: torch.Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)} on {t.device}"


def _head_dim(blocks: TierBlocks) -> int:
    """Return the channels of a head; codes of 4 bits lie two to a byte, scales do not."""
    return (blocks.k if blocks.k_scale is None else blocks.k_scale).shape[3]


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
    if slot_mapping.device != dst.k.device:
        expected = f"on {dst.k.device} like the blocks"
        raise ValueError(describe("append_kv", "slot_mapping", expected, str(slot_mapping.device)))


def check_convert(
    src: TierBlocks,
    dst: TierBlocks,
    src_tier: Tier,
    dst_tier: Tier,
    src_ids: torch.Tensor,
    dst_ids: torch.Tensor,
) -> None:
    """Check `convert_blocks`'s arguments."""
    op = "convert_blocks"
    if src_tier not in BLOCK_TIERS or dst_tier not in BLOCK_TIERS or src_tier >= dst_tier:
        expected = f"two of {', '.join(t.name for t in BLOCK_TIERS)}, the second a colder one"
        raise ValueError(describe(op, "the tiers", expected, f"{src_tier!r} to {dst_tier!r}"))
    for name, blocks, tier in (("src", src, src_tier), ("dst", dst, dst_tier)):
        parts = {"k", "v"} if tier.bits is None else {"k", "v", "k_scale", "k_zero", "v_scale"}
        parts |= {"v_zero"} if tier.bits and tier.bits[1] == 4 else set()
        if set(blocks.tensors()) != parts:
            expected = f"{tier.name} blocks with the parts {', '.join(sorted(parts))}"
            raise ValueError(describe(op, name, expected, ", ".join(blocks.tensors())))
    same = src.k.shape[1:3] == dst.k.shape[1:3] and _head_dim(src) == _head_dim(dst)
    if not same or src.k.device != dst.k.device:
        expected = f"blocks of the same layer as src, {_shape(src.k)}"
        raise ValueError(describe(op, "dst", expected, _shape(dst.k)))
    for name, ids in (("src_ids", src_ids), ("dst_ids", dst_ids)):
        if ids.dtype != torch.int32 or ids.dim() != 1 or ids.shape != src_ids.shape:
            expected = f"int32 [num_blocks={src_ids.numel()}]"
            raise ValueError(describe(op, name, expected, _shape(ids), "call .to(torch.int32)"))
        if ids.device != src.k.device:
            expected = f"on {src.k.device} like the blocks"
            raise ValueError(describe(op, name, expected, str(ids.device)))


def check_copy(blocks: TierBlocks, src_ids: torch.Tensor, dst_ids: torch.Tensor) -> None:
    """Check `copy_blocks`'s arguments."""
    for name, ids in (("src_ids", src_ids), ("dst_ids", dst_ids)):
        if ids.dtype != torch.int32 or ids.dim() != 1 or ids.shape != src_ids.shape:
            expected = f"int32 [num_blocks={src_ids.numel()}]"
            got = _shape(ids)
            raise ValueError(describe("copy_blocks", name, expected, got, "call .to(torch.int32)"))
        if ids.device != blocks.k.device:
            expected = f"on {blocks.k.device} like the blocks"
            raise ValueError(describe("copy_blocks", name, expected, str(ids.device)))


def check_attention(
    q: torch.Tensor,
    blocks: LayerBlocks,
    meta: AttentionMetadata,
    window_size: int | None,
    sink_q: torch.Tensor | None,
    softcap: float | None,
    sink_logits: torch.Tensor | None,
    split_mass: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> None:
    """Check `paged_attention`'s arguments; the tables were checked when they were made."""
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
    if sink_q is not None and (sink_q.shape != q.shape or sink_q.dtype != q.dtype):
        raise ValueError(describe(op, "sink_q", f"like q, {_shape(q)}", _shape(sink_q)))
    if softcap is not None and not softcap > 0:
        raise ValueError(describe(op, "softcap", "None or > 0", str(softcap)))
    if sink_logits is not None and sink_logits.shape != q.shape[1:2]:
        expected = f"[num_q_heads={q.shape[1]}]"
        raise ValueError(describe(op, "sink_logits", expected, _shape(sink_logits)))
    for name, x, rows, count in (
        ("split_mass", split_mass, "num_splits", meta.splits.shape[0]),
        ("lse", lse, "num_tokens", q.shape[0]),
    ):
        if x is None:
            continue
        wrong = x.dtype != torch.float32 or x.shape != (count, q.shape[1])
        if wrong or x.device != q.device or not x.is_contiguous():
            expected = f"contiguous float32 [{rows}={count}, num_q_heads={q.shape[1]}]"
            raise ValueError(describe(op, name, f"{expected} on {q.device}", _shape(x)))
    if meta.seq_lens.device != q.device:
        raise ValueError(describe(op, "meta", f"on {q.device}", f"{meta.seq_lens.device}"))
