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
from omlx_kernels.quantization import hadamard, quantize_into, read_blocks


def append_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    dst: TierBlocks,
    slot_mapping: torch.Tensor,
    *,
    rotate_v: bool = False,
) -> None:
    """Scatter the tokens whose slot is not -1."""
    size = dst.k.shape[2]
    kept = slot_mapping >= 0
    if not bool(kept.all()):
        k, v, slot_mapping = k[kept], v[kept], slot_mapping[kept]
    block, offset = slot_mapping // size, slot_mapping % size
    dst.k[block, :, offset] = k
    dst.v[block, :, offset] = hadamard(v) if rotate_v else v


def convert_blocks(
    src: TierBlocks,
    dst: TierBlocks,
    src_tier: Tier,
    dst_tier: Tier,
    src_ids: torch.Tensor,
    dst_ids: torch.Tensor,
) -> None:
    """Quantize all listed blocks at once; parts whose format stays are copied."""
    sources, targets = src_ids.long(), dst_ids.long()
    k, v = read_blocks(src, src_tier, sources, torch.float32)
    quantize_into(dst, dst_tier, targets, k, v)
    for letter, old, new in zip("kv", src_tier.bits or (0, 0), dst_tier.code_bits, strict=True):
        for name, tensor in dst.tensors().items() if old == new else ():
            if name[0] == letter:
                tensor[targets] = getattr(src, name)[sources]


def copy_blocks(blocks: TierBlocks, src_ids: torch.Tensor, dst_ids: torch.Tensor) -> None:
    """Gather the sources of each part and scatter them."""
    sources, targets = src_ids.long(), dst_ids.long()
    for tensor in blocks.tensors().values():
        tensor[targets] = tensor[sources]


def _gather(
    blocks: LayerBlocks, tier: Tier, ids: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of the listed blocks, [kv_heads, len(ids) * tokens, head_dim]."""
    wide = torch.float32 if tier.bits else dtype
    stored = read_blocks(blocks.tier(tier), tier, ids, wide)
    k, v = (x.to(dtype).transpose(0, 1).flatten(1, 2) for x in stored)
    return k, v


def _read_sequence(
    blocks: LayerBlocks, meta: AttentionMetadata, seq: int, length: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return keys and values [kv_heads, slots, head_dim] and each slot's position [slots]."""
    device = blocks.hot.k.device
    ks, vs, positions = [], [], []
    if blocks.sink_tokens and length and int(meta.sink_pages[seq]) >= 0:
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
    rotated_v: bool = False,
    sink_q: torch.Tensor | None = None,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    split_mass: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend sequence by sequence with the query heads of a group stacked as extra queries."""
    out = torch.zeros_like(q)
    kv_heads, sinks = blocks.hot.k.shape[1], blocks.sink_tokens
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
        outside = key_pos < 0 if window_size is None else key_pos <= query_pos - window_size
        visible = (key_pos <= query_pos) & (~outside | ((key_pos < sinks) & keep_sinks))
        # Keys that no query sees hold undefined bytes, and 0 * NaN is NaN: clear them.
        unseen = ~visible.any(0)[:, None]
        k, v = k.masked_fill(unseen, 0.0), v.masked_fill(unseen, 0.0)
        queries = _grouped(q[first:last].to(dtype), kv_heads)
        is_plain = softcap is None and sink_logits is None and sink_q is None
        if is_plain and split_mass is None and lse is None:
            mask = visible.repeat(q.shape[1] // kv_heads, 1)
            result = F.scaled_dot_product_attention(
                queries[None], k[None], v[None], attn_mask=mask, scale=sm_scale
            )[0]
        else:
            scores = queries.float() @ k.float().mT * sm_scale
            if sink_q is not None:
                capped = _grouped(sink_q[first:last].to(dtype), kv_heads).float() @ k.float().mT
                use = (outside & (key_pos < sinks)).expand(visible.shape)
                use = use.repeat(q.shape[1] // kv_heads, 1)
                scores = torch.where(use, capped * sm_scale, scores)
            probs, log_sums = _softmax(scores, visible, softcap, sink_logits)
            if lse is not None:
                lse[first:last] = log_sums.view(q.shape[1], count).T
            result = probs.to(v.dtype) @ v
            if split_mass is not None:
                of_keys = probs.reshape(q.shape[1], -1)  # [num_q_heads, keys]: count is 1
                _add_mass(split_mass, of_keys, blocks, meta, seq, key_pos)
        result = result.view(kv_heads, -1, count, q.shape[2]).permute(2, 0, 1, 3)
        seen = visible.any(-1)[:, None, None]  # a fully masked row gives 0, not NaN
        result = torch.where(seen, result.reshape(count, q.shape[1], q.shape[2]), 0.0)
        out[first:last] = hadamard(result) if rotated_v else result
    return out


def _grouped(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Stack a group's heads as queries: [count, heads, dim] -> [kv_heads, group * count, dim]."""
    return q.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)


def _softmax(
    scores: torch.Tensor,
    visible: torch.Tensor,
    softcap: float | None,
    sink_logits: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn scores [kv_heads, group * count, keys] into weights, capped and with learned sinks.

    Returns:
        The weights, and the scores' log-sum-exp [kv_heads, group * count].
    """
    kv_heads, rows, keys = scores.shape
    group = rows // visible.shape[0]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible.repeat(group, 1), float("-inf"))
    if sink_logits is not None:
        logits = sink_logits.float().view(kv_heads, group, 1).repeat_interleave(rows // group, 1)
        scores = torch.cat([scores, logits.view(kv_heads, rows, 1)], -1)
    return torch.softmax(scores, -1)[..., :keys].nan_to_num(0.0), scores.logsumexp(-1)


def _add_mass(
    split_mass: torch.Tensor,
    probs: torch.Tensor,
    blocks: LayerBlocks,
    meta: AttentionMetadata,
    seq: int,
    key_pos: torch.Tensor,
) -> None:
    """Write the mass of one sequence's splits from its newest query's weights [heads, keys]."""
    num_sinks = int((key_pos < blocks.sink_tokens).sum())  # first, as `_read_sequence` lists keys
    first, last = (int(i) for i in meta.split_starts[seq : seq + 2])
    for i, (_, tier, start, stop) in enumerate(meta.splits[first:last].tolist(), first):
        columns = slice(0, num_sinks)
        if tier != Tier.SINK:
            columns = slice(*(num_sinks + entry * blocks.block_size for entry in (start, stop)))
        split_mass[i] = probs[:, columns].sum(-1)
