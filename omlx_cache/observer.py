"""Watch where attention goes: the share of it that each block gets, layer by layer, step by step.

A cache with an observer (`PagedCache.observe`) plans its steps with one block a split, so that the
`split_mass` of `paged_attention` is the mass of each block. Without one nothing is asked, computed
or allocated.
"""

from __future__ import annotations

from typing import Protocol

import torch

from omlx_kernels.layout import Tier
from omlx_kernels.metadata import AttentionMetadata

SINKS = -1
"""Stands for the sink page where the others are named by the position of their first token."""


class Observer(Protocol):
    """Is told about the attention of one layer in one step, right after it was computed."""

    def __call__(self, layer: int, meta: AttentionMetadata, mass: torch.Tensor) -> None:
        """Look at a step.

        Args:
            layer: index of the layer.
            meta: the step's tables, with one block a split.
            mass: [num_splits, num_q_heads] float32 on the device of the blocks: the share of the
                attention of each sequence's newest query that falls on each of ``meta.splits``.
        """


def blocks_of_splits(meta: AttentionMetadata, sequence: int = 0) -> tuple[slice, list[int]]:
    """Name the blocks that the splits of a sequence read, where each split reads one block.

    Returns:
        The splits of the sequence, and for each of them the position of its block's first token, or
        `SINKS` for the sink page. Reads back from the device.
    """
    first, last = (int(i) for i in meta.split_starts[sequence : sequence + 2])
    starts = meta.block_starts[sequence].tolist()
    splits = meta.splits[first:last].tolist()
    return slice(first, last), [
        SINKS if tier == Tier.SINK else starts[entry] for _, tier, entry, _ in splits
    ]
