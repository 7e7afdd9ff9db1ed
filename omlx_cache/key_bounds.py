"""What a query can expect of a block that it has not looked at: bounds on the block's keys.

For each channel the smallest and the largest key of a block are kept. A query's score with any key
of the block is at most::

    sum over channels of max(q * smallest, q * largest)

(Tang et al., "Quest", 2024), which costs one look at two rows instead of ``block_size``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from omlx_cache.sequences import StoredBlock
from omlx_kernels.layout import Tier


class KeyBounds:
    """The bounds of blocks in CPU memory, by layer, tier and id; float32 on the CPU."""

    def __init__(self) -> None:
        self._of: dict[tuple[int, Tier], dict[int, torch.Tensor]] = {}

    def put(self, layer: int, tier: Tier, index: int, keys: torch.Tensor) -> None:
        """Note the bounds of a block's keys, [kv_heads, block_size, head_dim] on any device."""
        bounds = torch.stack([keys.amin(1), keys.amax(1)]).float().cpu()
        self._of.setdefault((layer, tier), {})[index] = bounds

    def move(self, old: StoredBlock, new: StoredBlock) -> None:
        """Follow a block into a colder tier."""
        for (layer, tier), own in list(self._of.items()):
            if tier is old.tier and old.index in own:
                self._of.setdefault((layer, new.tier), {})[new.index] = own.pop(old.index)

    def follow(self, tier: Tier, moves: Mapping[int, int], capacity: int) -> None:
        """Follow blocks to new ids, and forget those that are no ids any more."""
        for (_, own_tier), own in self._of.items():
            if own_tier is tier:
                moved = {moves.get(index, index): bounds for index, bounds in own.items()}
                own.clear()
                own.update({i: bounds for i, bounds in moved.items() if i < capacity})

    def best_scores(
        self, layer: int, blocks: Sequence[StoredBlock], q: torch.Tensor
    ) -> torch.Tensor:
        """Return an upper bound on the dot products of queries with any key of each block.

        Args:
            q: [num_q_heads, head_dim] float32 on the CPU.

        Returns:
            [num_blocks, num_q_heads].
        """
        bounds = torch.stack([self._of[layer, block.tier][block.index] for block in blocks])
        smallest, largest = bounds.unbind(1)  # [num_blocks, kv_heads, head_dim]
        grouped = q.view(smallest.shape[1], -1, q.shape[1])  # [kv_heads, group, head_dim]
        up = torch.einsum("hgd,nhd->nhg", grouped.clamp(min=0), largest)
        down = torch.einsum("hgd,nhd->nhg", grouped.clamp(max=0), smallest)
        return (up + down).flatten(1)
