"""Many queries of one sequence: blocks become floats range by range, torch attends, parts merge.

The keys that all queries see need no mask; those at the edges (the new tokens themselves, and the
end of the window) get one. Each of the two is taken in ranges that fit into a scratch of
`SCRATCH_BYTES`: as many heads as fit with all their tokens, or one head and as many tokens as fit.
Parts are merged by their log-sum-exp. Traffic: every block once, its floats once more through the
cache, and torch's reads of them.

Sink tokens outside the window that have a query of their own are a part of their own. With capped
scores, which torch's attention does not offer, a part is plain matrix products.
"""

from __future__ import annotations

import struct
from math import prod

import torch

from omlx_kernels.layout import BLOCK_TIERS, LayerBlocks, Tier
from omlx_kernels.metadata import AttentionMetadata
from omlx_kernels.native import library
from omlx_kernels.native.arguments import DTYPES, block_fields
from omlx_kernels.quantization import hadamard

SCRATCH_BYTES = 16 << 20
"""Most bytes of keys and values that are in floating point at a time."""
CAPPED_TOKENS = 1024
"""Most tokens of a part whose scores are capped: they are all in memory at once."""

_Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""Rows of queries, the stored tokens that they look at, mask, and which rows see none of them."""

# The structs of src/abi.h.
_GATHER = struct.Struct("51q")
_MERGE = struct.Struct("13q")


def attend(
    q: torch.Tensor,
    blocks: LayerBlocks,
    meta: AttentionMetadata,
    seq: int,
    *,
    sm_scale: float,
    window_size: int | None,
    keep_sinks: bool,
    rotated_v: bool,
    sink_q: torch.Tensor | None,
    softcap: float | None,
    sink_logits: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> torch.Tensor:
    """Attend one sequence's queries ``q`` [num_queries, num_q_heads, head_dim]; same shape back.

    ``lse`` [num_queries, num_q_heads] is written unless it is None.
    """
    count, num_heads, dim = q.shape
    kv_heads = blocks.hot.k.shape[1]
    group = num_heads // kv_heads
    length = int(meta.seq_lens[seq])
    has_sinks = blocks.sink_tokens and int(meta.sink_pages[seq]) >= 0
    split_sinks = bool(sink_q is not None and keep_sinks and window_size and has_sinks)
    always = keep_sinks and not split_sinks
    free, edge = _visible(blocks, meta, seq, length, count, window_size, always)
    query_pos = torch.arange(length - count, length)[:, None]

    rows = _rows(q, kv_heads)
    out = torch.empty(count, kv_heads, group, dim, dtype=q.dtype)
    tokens = max(int(free[:, 3].sum()), int(edge[:, 3].sum()), 1)
    token_bytes = 2 * dim * q.element_size()
    heads = min(kv_heads, max(1, SCRATCH_BYTES // (tokens * token_bytes)))
    limit = tokens if heads > 1 else SCRATCH_BYTES // token_bytes
    if softcap is not None:
        limit = min(limit, CAPPED_TOKENS)
    parts: list[_Part] = [(rows, part, None, None) for part in _ranges(free, limit)]
    masked = [(rows, part, False) for part in _ranges(edge, limit)]
    if split_sinks and sink_q is not None and window_size and length > window_size:
        stored = min(blocks.sink_tokens, length)
        sinks = torch.tensor([[Tier.SINK, int(meta.sink_pages[seq]), 0, stored, 0]])
        masked.append((_rows(sink_q, kv_heads), sinks.int(), True))
    for part_rows, part, outside in masked:
        key_pos = torch.cat([torch.arange(p, p + n) for n, p in part[:, 3:].tolist()])
        visible = _see(key_pos, query_pos, window_size, always, blocks.sink_tokens)
        if outside and window_size:
            visible = key_pos <= query_pos - window_size
        mask = torch.zeros(visible.shape, dtype=q.dtype).masked_fill_(~visible, float("-inf"))
        blind = ~visible.any(-1)
        parts.append((part_rows, part, mask.repeat(group, 1)[None, None], blind.repeat(group)))

    most = max((int(part[:, 3].sum()) for _, part, _, _ in parts), default=0)
    scratch = torch.empty(2, heads * most * dim, dtype=q.dtype)
    acc = torch.zeros(heads, rows.shape[2], dim)  # what no part at all gives
    log_sums = torch.full(acc.shape[:2], float("-inf"))
    for first in range(0, kv_heads, heads):
        last = min(first + heads, kv_heads)
        for i, (part_rows, part, part_mask, sees_none) in enumerate(parts):
            k, v = _gather(blocks, part, first, last, scratch)
            result = _attend_part(part_rows[:, first:last], k, v, part_mask, sm_scale, softcap)
            _merge(acc, log_sums, *result, sees_none, is_first=i == 0)
        merged = acc[: last - first].view(-1, group, count, dim)
        sums = log_sums[: last - first].view(-1, group, count)
        if sink_logits is not None:
            logits = sink_logits.view(kv_heads, group, 1)[first:last]
            kept = torch.sigmoid(sums - logits)
            merged = merged * kept.nan_to_num(0.0)[..., None]
            sums = torch.logaddexp(sums, logits)
        if rotated_v:
            merged = hadamard(merged)
        out[:, first:last] = merged.permute(2, 0, 1, 3)
        if lse is not None:
            lse.view(count, kv_heads, group)[:, first:last] = sums.permute(2, 0, 1)
    return out.view(count, num_heads, dim)


def _rows(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Turn [count, heads, dim] into [1, kv_heads, group * count, dim]."""
    count, num_heads, dim = q.shape
    grouped = q.view(count, kv_heads, num_heads // kv_heads, dim)
    return grouped.permute(1, 2, 0, 3).reshape(1, kv_heads, -1, dim)


def _attend_part(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    sm_scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the part's attention [1, heads, rows, dim] and log-sum-exp [1, heads, rows]."""
    if softcap is None:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=mask, scale=sm_scale
        )
    scores = softcap * torch.tanh(q.float() @ k.float().mT * (sm_scale / softcap))
    if mask is not None:
        scores += mask
    return (torch.softmax(scores, -1) @ v.float()).to(q.dtype), scores.logsumexp(-1)


def _visible(
    blocks: LayerBlocks,
    meta: AttentionMetadata,
    seq: int,
    length: int,
    count: int,
    window_size: int | None,
    keep_sinks: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """List what the queries see: pieces that all of them see whole, and those at an edge.

    Returns:
        Two int32 tensors [pieces, 5] of (tier, physical id, first token, tokens, position).
    """
    oldest = length - count  # position of the first query
    window = length + 1 if window_size is None else window_size
    pieces: tuple[list, list] = ([], [])

    def add(tier: Tier, index: int, start: int, size: int, always: bool) -> None:
        stop = min(start + size, length)
        begin = start if always else max(start, oldest - window + 1)
        # Positions seen by every query: after the last one's window begins, up to the first query.
        seen_from = begin if always else max(begin, length - window)
        seen_to = max(min(stop, oldest + 1), seen_from)
        for lo, hi, edge in ((begin, seen_from, 1), (seen_from, seen_to, 0), (seen_to, stop, 1)):
            lo, hi = max(lo, begin), min(hi, stop)
            if lo < hi:
                pieces[edge].append((tier, index, lo - start, hi - lo, lo))

    if blocks.sink_tokens and length and int(meta.sink_pages[seq]) >= 0:
        add(Tier.SINK, int(meta.sink_pages[seq]), 0, blocks.sink_tokens, keep_sinks)
    bounds = meta.tier_starts[seq].tolist()
    table, starts = meta.block_table[seq].tolist(), meta.block_starts[seq].tolist()
    for i, tier in enumerate(BLOCK_TIERS):
        for entry in range(bounds[i], bounds[i + 1]):
            add(tier, table[entry], starts[entry], blocks.block_size, False)
    free, edge = (torch.tensor(p, dtype=torch.int32).reshape(-1, 5) for p in pieces)
    return free, edge


def _ranges(pieces: torch.Tensor, limit: int) -> list[torch.Tensor]:
    """Cut the list into parts of at most ``limit`` tokens (or one piece)."""
    parts, begin, tokens = [], 0, 0
    for i, size in enumerate(pieces[:, 3].tolist()):
        if i > begin and tokens + size > limit:
            parts.append(pieces[begin:i])
            begin, tokens = i, 0
        tokens += size
    return [*parts, pieces[begin:]] if len(pieces) else []


def _see(
    key_pos: torch.Tensor,
    query_pos: torch.Tensor,
    window_size: int | None,
    keep_sinks: bool,
    sink_tokens: int,
) -> torch.Tensor:
    """Return bool [queries, tokens]: whether a query sees a key."""
    visible = key_pos <= query_pos
    if window_size is not None:
        in_window = key_pos > query_pos - window_size
        visible &= in_window | ((key_pos < sink_tokens) & keep_sinks)
    return visible


def _gather(
    blocks: LayerBlocks, pieces: torch.Tensor, first_head: int, last_head: int, out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the listed tokens into ``out``; return it as k, v [1, heads, tokens, head_dim]."""
    tokens = int(pieces[:, 3].sum())
    shape = (1, last_head - first_head, tokens, blocks.hot.k.shape[3])
    k, v = out[:, : prod(shape)].view(2, *shape)
    tiers, ids, firsts, counts, _ = columns = pieces.T.contiguous()
    arguments = _GATHER.pack(
        *block_fields(blocks), tiers.data_ptr(), ids.data_ptr(), firsts.data_ptr(),
        counts.data_ptr(), columns.shape[1], first_head, last_head, tokens, k.data_ptr(),
        v.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    library.call("omlx_gather", arguments)
    return k, v


def _merge(
    acc: torch.Tensor,
    lse: torch.Tensor,
    part: torch.Tensor,
    part_lse: torch.Tensor,
    blind: torch.Tensor | None,
    *,
    is_first: bool,
) -> None:
    """Merge one part into ``acc`` [heads, rows, head_dim] and ``lse`` [heads, rows], float32.

    ``blind`` [rows] says which rows saw no key of the part: torch gives them an lse of 0 or NaN,
    depending on its version.
    """
    part, part_lse = part.contiguous(), part_lse.float()
    _, heads, rows, dim = part.shape
    arguments = _MERGE.pack(
        acc.data_ptr(), lse.data_ptr(), part.data_ptr(), part_lse.data_ptr(),
        0 if blind is None else blind.data_ptr(), part_lse.stride(1), part_lse.stride(2),
        heads, rows, dim, DTYPES[part.dtype], is_first, torch.get_num_threads(),
    )  # fmt: skip
    library.call("omlx_merge", arguments)
