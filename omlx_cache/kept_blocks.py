"""Blocks that stay for later calls, in the order in which they were last used: no tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from omlx_cache.block_allocator import BlockAllocator
from omlx_cache.sequences import StoredBlock
from omlx_kernels.layout import Tier


class KeptBlocks:
    """One more holder of blocks beside the sequences: it has a share in each block that it keeps.

    Args:
        allocator: counts the holders.
        max_kept: the most blocks to keep; the least recently used leave first. None is no bound.
        on_drop: told of each key whose block has left.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        max_kept: int | None,
        on_drop: Callable[[Any], None] = lambda key: None,
    ) -> None:
        self._allocator, self._max_kept, self._on_drop = allocator, max_kept, on_drop
        self._blocks: dict[Hashable, StoredBlock] = {}  # least recently used first
        self._keys: dict[tuple[Tier, int], Hashable] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[StoredBlock]:
        return iter(self._blocks.values())

    def __contains__(self, block: StoredBlock) -> bool:
        return (block.tier, block.index) in self._keys

    @property
    def num_idle(self) -> int:
        """Blocks that nobody but this holds."""
        return sum(map(self._is_idle, self._blocks.values()))

    def get(self, key: Hashable) -> StoredBlock | None:
        """Return the block that is kept under ``key``."""
        return self._blocks.get(key)

    def keep(self, key: Hashable, block: StoredBlock) -> None:
        """Become a holder of a block in use, as the most recently used one.

        Does nothing where the key has a block, or the block a key: equal content once is enough.
        `trim` enforces the bound.
        """
        if key in self._blocks or block in self:
            return
        self._allocator.share(block.tier, block.index)
        self._blocks[key] = block
        self._keys[block.tier, block.index] = key

    def touch(self, key: Hashable) -> None:
        """Make the block under ``key``, if there is one, the most recently used."""
        if key in self._blocks:
            self._blocks[key] = self._blocks.pop(key)

    def drop(self, key: Hashable) -> None:
        """Let go of the block under ``key``, if there is one."""
        block = self._blocks.pop(key, None)
        if block is not None:
            del self._keys[block.tier, block.index]
            self._allocator.release(block.tier, block.index)
            self._on_drop(key)

    def reset(self) -> None:
        """Let go of every block, without telling."""
        for block in self._blocks.values():
            self._allocator.release(block.tier, block.index)
        self._blocks, self._keys = {}, {}

    def trim(self) -> None:
        """Let go of the least recently used blocks above the bound."""
        while self._max_kept is not None and len(self._blocks) > self._max_kept:
            self.drop(next(iter(self._blocks)))

    def reclaim(self, count: int) -> None:
        """Free up to ``count`` blocks: the least recently used of those that nobody else holds."""
        idle = [key for key, block in self._blocks.items() if self._is_idle(block)]
        for key in idle[:count]:
            self.drop(key)

    def replace(self, conversions: Mapping[StoredBlock, StoredBlock]) -> None:
        """Hold the second block of each pair instead of the first, where the first is kept."""
        for old, new in conversions.items():
            if old in self:
                key = self._keys.pop((old.tier, old.index))
                self._keys[new.tier, new.index] = key
                self._blocks[key] = new
                self._allocator.release(old.tier, old.index)

    def follow(self, tier: Tier, moves: Mapping[int, int]) -> None:
        """Follow blocks to the ids that `BlockAllocator.compact` gave them."""
        for old, new in moves.items():
            key = self._keys.pop((tier, old), None)
            if key is not None:
                self._keys[tier, new] = key
                self._blocks[key] = replace(self._blocks[key], index=new)

    def _is_idle(self, block: StoredBlock) -> bool:
        return self._allocator.refs(block.tier, block.index) == 1
