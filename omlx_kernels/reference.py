"""The oracle: float64, one sequence and one block at a time, nothing clever.

Every other implementation is tested against these functions on the same stored codes. They take
exactly the arguments of the public ops (`omlx_kernels.ops`), which hold the contract.
"""

from __future__ import annotations

import torch

from omlx_kernels.layout import BLOCK_TIERS, LayerBlocks, Tier, TierBlocks
from omlx_kernels.metadata import AttentionMetadata
from omlx_kernels.quantization import dequantize_k8, dequantize_v8, quantize_k8, quantize_v8


def append_kv(
    k: torch.Tensor, v: torch.Tensor, dst: TierBlocks, slot_mapping: torch.Tensor
) -> None:
    """Write each token's key and value into its slot; see `omlx_kernels.ops.append_kv`."""
    size = dst.k.shape[2]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            dst.k[slot // size, :, slot % size] = k[token].to(dst.k.dtype)
            dst.v[slot // size, :, slot % size] = v[token].to(dst.v.dtype)


def convert_blocks(
    src: TierBlocks, dst: TierBlocks, src_ids: torch.Tensor, dst_ids: torch.Tensor
) -> None:
    """Quantize blocks one by one; see `omlx_kernels.ops.convert_blocks`."""
    for i, j in zip(src_ids.tolist(), dst_ids.tolist(), strict=True):
        dst.k[j], dst.k_scale[j], dst.k_zero[j] = quantize_k8(src.k[i])
        dst.v[j], dst.v_scale[j] = quantize_v8(src.v[i])


def read_block(blocks: LayerBlocks, tier: Tier, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one block's (one page's) keys and values, float64 [kv_heads, tokens, head_dim]."""
    t = blocks.tier(tier)
    if tier is Tier.K8V8:
        k = dequantize_k8(t.k[index], t.k_scale[index], t.k_zero[index], torch.float64)
        return k, dequantize_v8(t.v[index], t.v_scale[index], torch.float64)
    return t.k[index].double(), t.v[index].double()


def read_sequence(
    blocks: LayerBlocks, meta: AttentionMetadata, seq: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Collect what one sequence has stored, in the order of its table row.

    Returns:
        k, v: float64 [kv_heads, num_tokens, head_dim]; positions: int64 [num_tokens].
    """
    length = int(meta.seq_lens[seq])
    heads, dim = blocks.hot.k.shape[1], blocks.hot.k.shape[3]
    ks = [torch.empty(heads, 0, dim, dtype=torch.float64)]
    vs, positions = [ks[0]], [torch.empty(0, dtype=torch.int64)]

    def take(tier: Tier, index: int, start: int) -> None:
        k, v = (x.cpu() for x in read_block(blocks, tier, index))
        count = max(0, min(k.shape[1], length - start))
        ks.append(k[:, :count])
        vs.append(v[:, :count])
        positions.append(torch.arange(start, start + count))

    if blocks.sink_tokens and length:
        take(Tier.SINK, int(meta.sink_pages[seq]), 0)
    for i, tier in enumerate(BLOCK_TIERS):
        for entry in range(int(meta.tier_starts[seq, i]), int(meta.tier_starts[seq, i + 1])):
            take(tier, int(meta.block_table[seq, entry]), int(meta.block_starts[seq, entry]))
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
    """Attend in float64 and round once at the end; see `omlx_kernels.ops.paged_attention`."""
    out = torch.zeros_like(q)
    kv_heads = blocks.hot.k.shape[1]
    for seq in range(meta.num_seqs):
        first, last = int(meta.query_start_loc[seq]), int(meta.query_start_loc[seq + 1])
        if first == last:
            continue
        k, v, key_pos = read_sequence(blocks, meta, seq)
        length = int(meta.seq_lens[seq])
        query_pos = torch.arange(length - (last - first), length)
        visible = key_pos <= query_pos[:, None]
        if window_size is not None:
            in_window = key_pos > query_pos[:, None] - window_size
            is_sink = (key_pos < blocks.sink_tokens) & keep_sinks
            visible &= in_window | is_sink
        for head in range(q.shape[1]):
            kv_head = head * kv_heads // q.shape[1]
            scores = q[first:last, head].double().cpu() @ k[kv_head].T * sm_scale
            scores = scores.masked_fill(~visible, float("-inf"))
            probs = torch.softmax(scores, -1).nan_to_num(0.0)  # a fully masked row gives 0
            out[first:last, head] = (probs @ v[kv_head]).to(out)
    return out
