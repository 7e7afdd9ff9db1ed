"""Blocks that stay for later calls, in the order in which they were last used: no tensors.

They lie on the device, or away from it, in CPU memory: each place counts its own holders.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from omlx_cache.block_allocator import BlockAllocator
from omlx_cache.sequences import StoredBlock
from omlx_kernels.layout import Tier


@dataclass(frozen=True)
class Kept:
    """A block that is kept, and whether it lies in CPU memory."""

    block: StoredBlock
    is_away: bool


class KeptBlocks:
    """One more holder of blocks beside the sequences: it has a share in each block that it keeps.

    Args:
        allocator: counts the holders on the device.
        max_kept: the most blocks to keep, in both places together; the least recently used leave
            first. None is no bound.
        on_drop: told of each key whose block has left.
        away: counts the holders in CPU memory; None: no block goes there.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        max_kept: int | None,
        on_drop: Callable[[Any], None] = lambda key: None,
        away: BlockAllocator | None = None,
    ) -> None:
        self._here, self._away = allocator, away
        self._max_kept, self._on_drop = max_kept, on_drop
        self._kept: dict[Hashable, Kept] = {}  # least recently used first
        self._keys: dict[tuple[bool, Tier, int], Hashable] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Kept]:
        return iter(self._kept.values())

    def holds(self, block: StoredBlock, *, is_away: bool = False) -> bool:
        """Whether a block is kept, of the device or of CPU memory."""
        return (is_away, block.tier, block.index) in self._keys

    def find(self, key: Hashable) -> Kept | None:
        """Return what is kept under ``key``, wherever it lies."""
        return self._kept.get(key)

    def get(self, key: Hashable) -> StoredBlock | None:
        """Return the block on the device that is kept under ``key``."""
        kept = self._kept.get(key)
        return None if kept is None or kept.is_away else kept.block

    def idle(self, *, is_away: bool | None = None) -> list[Hashable]:
        """Return the keys of the blocks that nobody but this holds, least recently used first.

        Args:
            is_away: of which place; None is both.
        """
        return [
            key
            for key, kept in self._kept.items()
            if is_away in (None, kept.is_away) and self._holders(kept) == 1
        ]

    @property
    def num_idle(self) -> int:
        """Blocks on the device that nobody but this holds."""
        return len(self.idle(is_away=False))

    def keep(self, key: Hashable, block: StoredBlock, *, is_away: bool = False) -> None:
        """Become a holder of a block in use, as the most recently used one.

        Does nothing where the key has a block, or the block a key: equal content once is enough.
        `trim` enforces the bound.
        """
        if key in self._kept or self.holds(block, is_away=is_away):
            return
        self._allocator(is_away).share(block.tier, block.index)
        self._put(key, Kept(block, is_away))

    def touch(self, key: Hashable) -> None:
        """Make the block under ``key``, if there is one, the most recently used."""
        if key in self._kept:
            self._kept[key] = self._kept.pop(key)

    def drop(self, key: Hashable) -> None:
        """Let go of the block under ``key``, if there is one."""
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._let_go(kept)
            self._on_drop(key)

    def drop_block(self, block: StoredBlock, *, is_away: bool = False) -> None:
        """Let go of a block, if it is kept."""
        key = self._keys.get((is_away, block.tier, block.index))
        if key is not None:
            self.drop(key)

    def reset(self) -> None:
        """Let go of every block, without telling."""
        for kept in self._kept.values():
            self._let_go(kept)
        self._kept = {}

    def trim(self) -> None:
        """Let go of the least recently used blocks above the bound."""
        while self._max_kept is not None and len(self._kept) > self._max_kept:
            self.drop(next(iter(self._kept)))

    def reclaim(self, count: int, *, is_away: bool = False) -> None:
        """Free up to ``count`` blocks: the least recently used of those that nobody else holds."""
        for key in self.idle(is_away=is_away)[:count]:
            self.drop(key)

    def replace(
        self, conversions: Mapping[StoredBlock, StoredBlock], *, is_away: bool = False
    ) -> None:
        """Hold the second block of each pair instead of the first, where the first is kept."""
        for old, new in conversions.items():
            key = self._keys.get((is_away, old.tier, old.index))
            if key is not None:
                self._let_go(self._kept[key])
                self._put(key, Kept(new, is_away))

    def move(self, block: StoredBlock, copied: StoredBlock, *, is_away: bool) -> None:
        """Hold a block's copy in the other place, if the block is kept.

        Args:
            block: in the one place.
            copied: in the other, where somebody holds it.
            is_away: whether the copy is in CPU memory.
        """
        key = self._keys.get((not is_away, block.tier, block.index))
        if key is not None:
            self._allocator(is_away).share(copied.tier, copied.index)
            self._let_go(self._kept[key])
            self._put(key, Kept(copied, is_away))

    def follow(self, tier: Tier, moves: Mapping[int, int], *, is_away: bool = False) -> None:
        """Follow blocks to the ids that `BlockAllocator.compact` gave them."""
        for old, new in moves.items():
            key = self._keys.pop((is_away, tier, old), None)
            if key is not None:
                self._put(key, Kept(replace(self._kept[key].block, index=new), is_away))

    def _put(self, key: Hashable, kept: Kept) -> None:
        self._kept[key] = kept  # one that is there stays in its place in the order
        self._keys[kept.is_away, kept.block.tier, kept.block.index] = key

    def _let_go(self, kept: Kept) -> None:
        block = kept.block
        del self._keys[kept.is_away, block.tier, block.index]
        self._allocator(kept.is_away).release(block.tier, block.index)

    def _holders(self, kept: Kept) -> int:
        return self._allocator(kept.is_away).refs(kept.block.tier, kept.block.index)

    def _allocator(self, is_away: bool) -> BlockAllocator:
        if not is_away:
            return self._here
        if self._away is None:
            raise RuntimeError("KeptBlocks: blocks must be allowed to move to CPU memory here")
        return self._away
