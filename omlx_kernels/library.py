"""The ops as `torch.ops.omlx`: what `torch.compile` and ``torch.export`` see of them.

The public functions of `omlx_kernels.ops` take dataclasses of tensors; a registered op takes lists
of tensors, in the order of their fields. A traced call goes through here and is opaque to the
compiler: `paged_attention` has a shape (its fake implementation), the others only say what they
write. At run time each op calls the public function, with its checks and its dispatch.
"""

from __future__ import annotations

import torch

from omlx_kernels import ops
from omlx_kernels.layout import LayerBlocks, Tier, TierBlocks
from omlx_kernels.metadata import AttentionMetadata

_PARTS = (2, 2, 5, 6, 6)
"""Tensors of SINK, HOT, K8V8, K8V4, K4V4: the first fields of `TierBlocks`."""
_TABLES = (
    "block_table",
    "block_starts",
    "tier_starts",
    "sink_pages",
    "seq_lens",
    "query_start_loc",
    "splits",
    "split_starts",
)


def parts_of(blocks: TierBlocks) -> list[torch.Tensor]:
    """Return the tensors of one tier."""
    return list(blocks.tensors().values())


def layer_parts(blocks: LayerBlocks) -> list[torch.Tensor]:
    """Return the tensors of a layer, tier by tier."""
    tiers = (blocks.sink, blocks.hot, blocks.k8v8, blocks.k8v4, blocks.k4v4)
    return [part for tier in tiers for part in parts_of(tier)]


def tables_of(meta: AttentionMetadata) -> list[torch.Tensor]:
    """Return the tables of a step, in the order of their fields."""
    return [getattr(meta, name) for name in _TABLES]


def _layer(parts: list[torch.Tensor]) -> LayerBlocks:
    tiers, first = [], 0
    for count in _PARTS:
        tiers.append(TierBlocks(*parts[first : first + count]))
        first += count
    return LayerBlocks(*tiers)


@torch.library.custom_op("omlx::append_kv", mutates_args=("dst",))
def append_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    dst: list[torch.Tensor],
    slot_mapping: torch.Tensor,
    rotate_v: bool,
) -> None:
    """See `omlx_kernels.ops.append_kv`; ``dst`` is `parts_of` the destination."""
    ops.append_kv(k, v, TierBlocks(*dst), slot_mapping, rotate_v=rotate_v)


@torch.library.custom_op("omlx::convert_blocks", mutates_args=("dst",))
def convert_blocks(
    src: list[torch.Tensor],
    dst: list[torch.Tensor],
    src_tier: int,
    dst_tier: int,
    src_ids: torch.Tensor,
    dst_ids: torch.Tensor,
) -> None:
    """See `omlx_kernels.ops.convert_blocks`; ``src`` and ``dst`` are `parts_of` the blocks."""
    tiers = Tier(src_tier), Tier(dst_tier)
    ops.convert_blocks(TierBlocks(*src), TierBlocks(*dst), *tiers, src_ids, dst_ids)


@torch.library.custom_op("omlx::copy_blocks", mutates_args=("blocks",))
def copy_blocks(blocks: list[torch.Tensor], src_ids: torch.Tensor, dst_ids: torch.Tensor) -> None:
    """See `omlx_kernels.ops.copy_blocks`; ``blocks`` is `parts_of` the blocks."""
    ops.copy_blocks(TierBlocks(*blocks), src_ids, dst_ids)


@torch.library.custom_op("omlx::paged_attention", mutates_args=("split_mass", "lse"))
def paged_attention(
    q: torch.Tensor,
    blocks: list[torch.Tensor],
    tables: list[torch.Tensor],
    max_query_len: int,
    sm_scale: float,
    window_size: int | None,
    keep_sinks: bool,
    rotated_v: bool,
    sink_q: torch.Tensor | None,
    softcap: float | None,
    sink_logits: torch.Tensor | None,
    split_mass: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> torch.Tensor:
    """See `omlx_kernels.ops.paged_attention`; `layer_parts`, `tables_of` make the lists."""
    return ops.paged_attention(
        q,
        _layer(blocks),
        AttentionMetadata(**dict(zip(_TABLES, tables, strict=True)), max_query_len=max_query_len),
        sm_scale=sm_scale,
        window_size=window_size,
        keep_sinks=keep_sinks,
        rotated_v=rotated_v,
        sink_q=sink_q,
        softcap=softcap,
        sink_logits=sink_logits,
        split_mass=split_mass,
        lse=lse,
    )


@paged_attention.register_fake
def _(q: torch.Tensor, *args: object) -> torch.Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)
