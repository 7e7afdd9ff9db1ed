"""The ops as Triton kernels; importing this touches no driver. Contract: `omlx_kernels.ops`."""

from __future__ import annotations

from functools import partial

import torch

from omlx_kernels.layout import LayerBlocks
from omlx_kernels.metadata import AttentionMetadata
from omlx_kernels.triton.append_kv import append_kv
from omlx_kernels.triton.convert_blocks import convert_blocks
from omlx_kernels.triton.copy_blocks import copy_blocks
from omlx_kernels.triton.decode import paged_decode
from omlx_kernels.triton.extend import paged_extend

__all__ = ["append_kv", "convert_blocks", "copy_blocks", "paged_attention"]


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
    """Decode where no sequence has more than one query, else extend."""
    is_decode = meta.max_query_len == 1
    return (partial(paged_decode, split_mass=split_mass) if is_decode else paged_extend)(
        q,
        blocks,
        meta,
        sm_scale=sm_scale,
        window_size=window_size,
        keep_sinks=keep_sinks,
        rotated_v=rotated_v,
        sink_q=sink_q,
        softcap=softcap,
        sink_logits=sink_logits,
        lse=lse,
    )
