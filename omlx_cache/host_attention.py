"""Attend to blocks in CPU memory.

A decoding step takes its few queries to the blocks: the CPU attends to them where they are, which
moves some kilobytes instead of the blocks. The many queries of a prompt are worth the way of the
blocks: those of one layer at a time are copied to the device, and dropped again
(`omlx_cache.layers_ahead`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from omlx_cache.host_tier import CPU, HostTier
from omlx_kernels import ops
from omlx_kernels.merge import merge_attention
from omlx_kernels.metadata import AttentionMetadata

Attend = Callable[..., torch.Tensor]


def new_mass(meta: AttentionMetadata, q: torch.Tensor) -> torch.Tensor:
    """Allocate what `paged_attention` writes the mass of each split to."""
    shape = (meta.splits.shape[0], q.shape[1])
    return torch.empty(shape, dtype=torch.float32, device=q.device)


def attend_in_parts(
    q: torch.Tensor,
    metas: tuple[AttentionMetadata, AttentionMetadata],
    here: Attend,
    there: Attend,
    wants_mass: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend to blocks on the device and to blocks in CPU memory, as if they lay side by side.

    Args:
        q: [num_tokens, num_q_heads, head_dim].
        metas: tables of the blocks on the device, and of those in CPU memory.
        here: attends to the former, given ``split_mass`` and ``lse``.
        there: attends to the latter, given ``meta``, ``split_mass`` and ``lse``.
        wants_mass: whether to return the mass of each split.

    Returns:
        The output, shaped like q; and the share of the attention that falls on each split of the
        first tables and then of the second, [num_splits, num_q_heads], or None.
    """
    masses = [new_mass(meta, q) if wants_mass else None for meta in metas]
    lses = [q.new_empty(q.shape[:2], dtype=torch.float32) for _ in metas]
    outs = [
        here(split_mass=masses[0], lse=lses[0]),
        there(meta=metas[1], split_mass=masses[1], lse=lses[1]),
    ]
    out = merge_attention(list(zip(outs, lses, strict=True)))
    if not wants_mass:
        return out, None
    total = torch.logaddexp(*lses)
    ends = metas[0].query_start_loc[1:].long() - 1  # row of each sequence's newest query
    shares = []
    for meta, mass, lse in zip(metas, masses, lses, strict=True):
        if mass is None:
            continue
        share = (lse - total).exp().nan_to_num(0.0)[ends]  # no key at all: -inf less -inf
        shares.append(mass * share[meta.splits[:, 0].to(q.device).long()])
    return out, torch.cat(shares)


def attend_on_host(
    host: HostTier,
    layer: int,
    q: torch.Tensor,
    *,
    meta: AttentionMetadata,
    split_mass: torch.Tensor | None,
    lse: torch.Tensor,
    **scoring,
) -> torch.Tensor:
    """Attend to blocks of one layer that are in CPU memory.

    Args:
        host: holds them.
        layer: index of the layer.
        q: [num_tokens, num_q_heads, head_dim], on the device.
        meta: the tables, in CPU memory; they list no sink page.
        split_mass, lse: as in `omlx_kernels.ops.paged_attention`, on q's device.
        scoring: the other arguments of `omlx_kernels.ops.paged_attention`.

    Returns:
        The output, shaped like q.
    """
    host.wait()
    blocks, near = host.pools[layer].blocks, q
    if meta.max_query_len == 1:
        near = q.to(CPU)
    elif _is_away_from(q.device):
        blocks, meta = host.ahead.take(layer, meta, q.device)
    near_lse = torch.empty_like(lse, device=near.device)
    near_mass = None if split_mass is None else torch.empty_like(split_mass, device=near.device)
    out = ops.paged_attention(near, blocks, meta, split_mass=near_mass, lse=near_lse, **scoring)
    lse.copy_(near_lse)
    if split_mass is not None and near_mass is not None:
        split_mass.copy_(near_mass)
    return out.to(q.device)


def _is_away_from(device: torch.device) -> bool:
    """Whether blocks in CPU memory have to be copied to be read by many queries on a device."""
    return device != CPU
