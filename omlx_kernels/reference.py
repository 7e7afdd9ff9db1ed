"""The oracle: float64, one sequence and one block at a time, nothing clever.

Every other implementation is tested against these functions on the same stored codes. They take
exactly the arguments of the public ops (`omlx_kernels.ops`), which hold the contract.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from omlx_kernels.layout import BLOCK_TIERS, LayerBlocks, Tier, TierBlocks
from omlx_kernels.metadata import AttentionMetadata
from omlx_kernels.quantization import hadamard, quantize_into, read_blocks


def append_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    dst: TierBlocks,
    slot_mapping: torch.Tensor,
    *,
    rotate_v: bool = False,
) -> None:
    """Write each token's key and value into its slot; see `omlx_kernels.ops.append_kv`."""
    size = dst.k.shape[2]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            value = hadamard(v[token]) if rotate_v else v[token]
            dst.k[slot // size, :, slot % size] = k[token].to(dst.k.dtype)
            dst.v[slot // size, :, slot % size] = value.to(dst.v.dtype)


def convert_blocks(
    src: TierBlocks,
    dst: TierBlocks,
    src_tier: Tier,
    dst_tier: Tier,
    src_ids: torch.Tensor,
    dst_ids: torch.Tensor,
) -> None:
    """Quantize blocks one by one; see `omlx_kernels.ops.convert_blocks`."""
    for i, j in zip(src_ids.tolist(), dst_ids.tolist(), strict=True):
        k, v = read_blocks(src, src_tier, [i], torch.float64)
        quantize_into(dst, dst_tier, [j], k, v)
        if src_tier.bits and src_tier.bits[0] == dst_tier.code_bits[0]:
            for part in ("k", "k_scale", "k_zero"):  # same format: copied, not rounded again
                getattr(dst, part)[j] = getattr(src, part)[i]
        if src_tier.bits and src_tier.bits[1] == dst_tier.code_bits[1]:
            for part in ("v", "v_scale", "v_zero"):
                if getattr(dst, part) is not None:
                    getattr(dst, part)[j] = getattr(src, part)[i]


def copy_blocks(blocks: TierBlocks, src_ids: torch.Tensor, dst_ids: torch.Tensor) -> None:
    """Copy blocks one by one; see `omlx_kernels.ops.copy_blocks`."""
    for i, j in zip(src_ids.tolist(), dst_ids.tolist(), strict=True):
        for tensor in blocks.tensors().values():
            tensor[j] = tensor[i]


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
        stored = read_blocks(blocks.tier(tier), tier, [index], torch.float64)
        k, v = (x[0].cpu() for x in stored)
        count = max(0, min(k.shape[1], length - start))
        ks.append(k[:, :count])
        vs.append(v[:, :count])
        positions.append(torch.arange(start, start + count))

    if blocks.sink_tokens and length and int(meta.sink_pages[seq]) >= 0:
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
    rotated_v: bool = False,
    sink_q: torch.Tensor | None = None,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    split_mass: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend in float64 and round once at the end; see `omlx_kernels.ops.paged_attention`."""
    out = torch.zeros_like(q)
    found = attention_probabilities(
        q,
        blocks,
        meta,
        sm_scale=sm_scale,
        window_size=window_size,
        keep_sinks=keep_sinks,
        sink_q=sink_q,
        softcap=softcap,
        sink_logits=sink_logits,
    )
    for seq, (probs, v, key_pos, log_sum) in enumerate(found):
        first, last = int(meta.query_start_loc[seq]), int(meta.query_start_loc[seq + 1])
        result = (probs @ v.repeat_interleave(q.shape[1] // v.shape[0], 0)).transpose(0, 1)
        out[first:last] = (hadamard(result) if rotated_v else result).to(out)
        if lse is not None:
            lse[first:last] = log_sum.T
        if split_mass is not None and first < last:
            for i in range(int(meta.split_starts[seq]), int(meta.split_starts[seq + 1])):
                chosen = _keys_of_split(meta, blocks, i, key_pos)
                split_mass[i] = probs[:, -1, chosen].sum(-1)
    return out


def attention_probabilities(
    q: torch.Tensor,
    blocks: LayerBlocks,
    meta: AttentionMetadata,
    *,
    sm_scale: float,
    window_size: int | None = None,
    keep_sinks: bool = True,
    sink_q: torch.Tensor | None = None,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield what each sequence's queries make of its keys, in the order of its table row.

    Args: as `paged_attention` takes them.

    Yields:
        float64 [num_q_heads, queries, num_tokens], a row of zeros where a query sees nothing; the
        values and the positions, as `read_sequence` returns them; float64 [num_q_heads, queries],
        the natural log-sum-exp of the scores, a learned sink included.
    """
    sinks = blocks.sink_tokens
    for seq in range(meta.num_seqs):
        first, last = int(meta.query_start_loc[seq]), int(meta.query_start_loc[seq + 1])
        k, v, key_pos = read_sequence(blocks, meta, seq)
        length = int(meta.seq_lens[seq])
        query_pos = torch.arange(length - (last - first), length)[:, None]
        outside = key_pos < 0 if window_size is None else key_pos <= query_pos - window_size
        visible = (key_pos <= query_pos) & (~outside | ((key_pos < sinks) & keep_sinks))
        probs = torch.zeros(q.shape[1], last - first, k.shape[1], dtype=torch.float64)
        lse = torch.empty(q.shape[1], last - first, dtype=torch.float64)
        for head in range(q.shape[1]):
            keys = k[head * k.shape[0] // q.shape[1]]
            scores = q[first:last, head].double().cpu() @ keys.T * sm_scale
            if sink_q is not None:
                capped = sink_q[first:last, head].double().cpu() @ keys.T * sm_scale
                scores = torch.where(outside & (key_pos < sinks), capped, scores)
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill(~visible, float("-inf"))
            if sink_logits is not None:
                logit = sink_logits[head].double().cpu().expand(len(scores), 1)
                scores = torch.cat([scores, logit], 1)
            shares = torch.softmax(scores, -1).nan_to_num(0.0)  # a fully masked row gives 0
            probs[head] = shares[:, : k.shape[1]]
            lse[head] = torch.logsumexp(scores, -1)
        yield probs, v, key_pos, lse


def _keys_of_split(
    meta: AttentionMetadata, blocks: LayerBlocks, split: int, key_pos: torch.Tensor
) -> torch.Tensor:
    """Say which keys a decode split reads, as a mask over their positions."""
    seq, tier, first, last = meta.splits[split].tolist()
    if tier == Tier.SINK:
        return key_pos < blocks.sink_tokens
    offsets = key_pos - meta.block_starts[seq, first:last, None].cpu()  # [blocks, keys]
    return ((offsets >= 0) & (offsets < blocks.block_size)).any(0)
