"""The ops as vectorised torch code, for devices that no faster implementation serves.

Decode and extend both gather a sequence's blocks, turn them into floating point and call torch's
own attention, so each step costs time and scratch memory proportional to the visible tokens of one
sequence. The contract is that of `omlx_kernels.ops`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from omlx_kernels.layout import BLOCK_TIERS, LayerBlocks, Tier, TierBlocks
from omlx_kernels.metadata import AttentionMetadata
from omlx_kernels.quantization import dequantize_k8, dequantize_v8, quantize_k8, quantize_v8


def append_kv(
    k: torch.Tensor, v: torch.Tensor, dst: TierBlocks, slot_mapping: torch.Tensor
) -> None:
    """Scatter the tokens whose slot is not -1."""
    size = dst.k.shape[2]
    kept = slot_mapping >= 0
    if not bool(kept.all()):
        k, v, slot_mapping = k[kept], v[kept], slot_mapping[kept]
    block, offset = slot_mapping // size, slot_mapping % size
    dst.k[block, :, offset] = k.to(dst.k.dtype)
    dst.v[block, :, offset] = v.to(dst.v.dtype)


def convert_blocks(
    src: TierBlocks, dst: TierBlocks, src_ids: torch.Tensor, dst_ids: torch.Tensor
) -> None:
    """Quantize all listed blocks at once."""
    ids = dst_ids.long()
    dst.k[ids], dst.k_scale[ids], dst.k_zero[ids] = quantize_k8(src.k[src_ids.long()])
    dst.v[ids], dst.v_scale[ids] = quantize_v8(src.v[src_ids.long()])


def _gather(
    blocks: LayerBlocks, tier: Tier, ids: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of the listed blocks, [kv_heads, len(ids) * tokens, head_dim]."""
    t = blocks.tier(tier)
    k, v = t.k[ids], t.v[ids]
    if tier is Tier.K8V8:
        k = dequantize_k8(k, t.k_scale[ids], t.k_zero[ids], torch.float32)
        v = dequantize_v8(v, t.v_scale[ids], torch.float32)
    return tuple(x.to(dtype).transpose(0, 1).flatten(1, 2) for x in (k, v))


def _read_sequence(
    blocks: LayerBlocks, meta: AttentionMetadata, seq: int, length: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return keys and values [kv_heads, slots, head_dim] and each slot's position [slots]."""
    device = blocks.hot.k.device
    ks, vs, positions = [], [], []
    if blocks.sink_tokens and length:
        count = min(blocks.sink_tokens, length)
        k, v = _gather(blocks, Tier.SINK, meta.sink_pages[seq : seq + 1].long(), dtype)
        ks.append(k[:, :count])
        vs.append(v[:, :count])
        positions.append(torch.arange(count, device=device))
    bounds = meta.tier_starts[seq].tolist()
    offsets = torch.arange(blocks.block_size, device=device)
    for i, tier in enumerate(BLOCK_TIERS):
        first, last = bounds[i], bounds[i + 1]
        if first < last:
            k, v = _gather(blocks, tier, meta.block_table[seq, first:last].long(), dtype)
            ks.append(k)
            vs.append(v)
            starts = meta.block_starts[seq, first:last]
            positions.append((starts[:, None] + offsets).flatten())
    if not ks:
        empty = torch.empty(blocks.hot.k.shape[1], 0, blocks.hot.k.shape[3], device=device)
        return empty.to(dtype), empty.to(dtype), torch.empty(0, device=device)
    return torch.cat(ks, 1), torch.cat(vs, 1), torch.cat(positions)


def paged_attention(
    q: torch.Tensor,
    blocks: LayerBlocks,
    meta: AttentionMetadata,
    *,
    sm_scale: float,
    window_size: int | None = None,
    keep_sinks: bool = True,
) -> torch.Tensor:
    """Attend sequence by sequence with the query heads of a group stacked as extra queries."""
    out = torch.zeros_like(q)
    num_heads, kv_heads, dim = q.shape[1], blocks.hot.k.shape[1], q.shape[2]
    bounds, lengths = meta.query_start_loc.tolist(), meta.seq_lens.tolist()
    for seq, length in enumerate(lengths):
        first, last = bounds[seq], bounds[seq + 1]
        count = last - first
        if not count:
            continue
        # One query is bound by reading the blocks: float32 costs nothing and rounds less.
        dtype = torch.float32 if count == 1 else q.dtype
        k, v, key_pos = _read_sequence(blocks, meta, seq, length, dtype)
        query_pos = torch.arange(length - count, length, device=q.device)[:, None]
        visible = key_pos <= query_pos
        if window_size is not None:
            in_window = key_pos > query_pos - window_size
            visible &= in_window | ((key_pos < blocks.sink_tokens) & keep_sinks)
        group = num_heads // kv_heads
        # [count, heads, dim] -> [kv_heads, group * count, dim]
        grouped = q[first:last].view(count, kv_heads, group, dim).permute(1, 2, 0, 3)
        # Keys that no query sees hold undefined bytes, and 0 * NaN is NaN: clear them.
        v = v.masked_fill(~visible.any(0)[:, None], 0.0)
        k = k.masked_fill(~visible.any(0)[:, None], 0.0)
        mask = visible.expand(group, *visible.shape).reshape(group * count, -1)
        result = F.scaled_dot_product_attention(
            grouped.reshape(1, kv_heads, -1, dim).to(dtype),
            k[None],
            v[None],
            attn_mask=mask[None, None],
            scale=sm_scale,
        )
        seen = visible.any(-1)[:, None, None]  # a fully masked row gives 0, not NaN
        result = result.view(kv_heads, group, count, dim).permute(2, 0, 1, 3)
        out[first:last] = torch.where(seen, result.reshape(count, num_heads, dim), 0.0).to(q.dtype)
    return out
