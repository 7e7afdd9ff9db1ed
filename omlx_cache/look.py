"""What queries of one layer see in one step: blocks on the device, and those in CPU memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from omlx_cache.host_attention import attend_in_parts, attend_on_host, new_mass
from omlx_cache.host_tier import HostTier
from omlx_kernels import ops
from omlx_kernels.layout import LayerBlocks
from omlx_kernels.metadata import AttentionMetadata

Tables = tuple[AttentionMetadata, AttentionMetadata | None]
"""Of the blocks on the device; and of those in CPU memory, None where none are."""


@dataclass(frozen=True)
class Look:
    """Attends to the blocks of a layer, whichever memory they are in.

    Attributes:
        blocks: on the device.
        host: holds those in CPU memory; None where blocks may not move there.
        layer: index of the layer.
        sight: arguments of `paged_attention` that say what a query sees; all keys in CPU memory
            are seen.
        scoring: arguments of `paged_attention` for blocks in both memories.
        sink_logits: [num_q_heads] learned sinks; None is none.
    """

    blocks: LayerBlocks
    host: HostTier | None
    layer: int
    sight: dict[str, Any]
    scoring: dict[str, Any]
    sink_logits: torch.Tensor | None

    def __call__(
        self,
        q: torch.Tensor,
        metas: Tables,
        *,
        sink_q: torch.Tensor | None,
        wants_mass: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend.

        Args:
            q: [num_queries, num_q_heads, head_dim].
            metas: tables that list a row for each sequence of q.
            sink_q: q as it looks at the sinks outside of the window, shaped like q; None: as it is.
            wants_mass: whether to return the mass.

        Returns:
            The output, shaped like q; and the share of the attention that falls on each split of
            the first tables and then of the second, [num_splits, num_q_heads], or None.
        """
        meta, meta_there = metas
        here = partial(
            ops.paged_attention,
            q,
            self.blocks,
            meta,
            sink_q=sink_q,
            sink_logits=self.sink_logits,
            **self.sight,
            **self.scoring,
        )
        if self.host is None or meta_there is None:
            mass = new_mass(meta, q) if wants_mass else None
            return here(split_mass=mass), mass
        there = partial(attend_on_host, self.host, self.layer, q, **self.scoring)
        return attend_in_parts(q, (meta, meta_there), here, there, wants_mass)
