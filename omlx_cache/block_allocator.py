"""Which physical blocks are in use, and by how many holders: pure bookkeeping, no tensors.

Each tier is an id space of its own (block 3 of HOT and block 3 of K8V8 are different memory), and
all spaces share one budget. `BlockAllocator.compact` closes the gaps that released blocks leave, so
that the tensors behind a space can be as small as what they hold.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Hashable, Iterable

from omlx_kernels.errors import OutOfBlocksError


class _Space:
    """Ids ``0 .. capacity - 1``: each is free or has a positive reference count."""

    def __init__(self) -> None:
        self.capacity = 0
        self.free: list[int] = []  # negated ids, ascending: pop() gives the lowest id
        self.refs: dict[int, int] = {}

    def take(self) -> int:
        if self.free:
            block = -self.free.pop()
        else:
            block = self.capacity
            self.capacity += 1
        self.refs[block] = 1
        return block


class BlockAllocator:
    """Reference-counted block ids in several spaces under one budget.

    Attributes:
        reclaim: asked for a number of blocks when too few are free, so that it can release some
            that nobody needs; None: nobody to ask.

    Args:
        spaces: the names of the id spaces.
        max_blocks: how many blocks may be in use over all spaces; None is no bound. The two ids
            of a block that is being replaced count as one.

    Example:
        >>> allocator = BlockAllocator(["hot", "cold"], max_blocks=2)
        >>> allocator.allocate("hot", 2)
        [0, 1]
        >>> moved = allocator.begin_replace("hot", 0, "cold")
        >>> allocator.release("hot", 0)
        >>> allocator.num_used, allocator.num_free
        (2, 0)
    """

    def __init__(self, spaces: Iterable[Hashable], max_blocks: int | None = None) -> None:
        self.max_blocks = max_blocks
        self.reclaim: Callable[[int], None] | None = None
        self._spaces = {space: _Space() for space in spaces}
        # (space, new id) -> (space, old id) of the blocks that hold two ids for one content
        self._replacing: dict[tuple[Hashable, int], tuple[Hashable, int]] = {}

    @property
    def num_used(self) -> int:
        """Blocks in use, a block that is being replaced counted once."""
        return sum(len(s.refs) for s in self._spaces.values()) - len(self._replacing)

    @property
    def num_free(self) -> int | None:
        """Blocks that may still be taken; None without a bound."""
        return None if self.max_blocks is None else self.max_blocks - self.num_used

    def capacity(self, space: Hashable) -> int:
        """One more than the highest id of ``space``: how many blocks its tensors must hold."""
        return self._spaces[space].capacity

    def used(self, space: Hashable) -> int:
        """Ids of ``space`` in use."""
        return len(self._spaces[space].refs)

    def refs(self, space: Hashable, block: int) -> int:
        """Holders of a block; 0 for a free one."""
        return self._spaces[space].refs.get(block, 0)

    def require(self, count: int) -> None:
        """Check that ``count`` more blocks may be taken, after `reclaim` where it is set.

        Raises:
            OutOfBlocksError: when they may not; no block in need changes either way.
        """
        if self.max_blocks is None:
            return
        free = self.max_blocks - self.num_used
        if self.reclaim is not None and count > free:
            self.reclaim(count - free)
            free = self.max_blocks - self.num_used
        if count > free:
            raise OutOfBlocksError(count, free, self.max_blocks)

    def allocate(self, space: Hashable, count: int) -> list[int]:
        """Take ``count`` blocks, each with one holder: all or none.

        Raises:
            OutOfBlocksError: when fewer than ``count`` are free; nothing changes.
        """
        self.require(count)
        return [self._spaces[space].take() for _ in range(count)]

    def begin_replace(self, space: Hashable, block: int, new_space: Hashable) -> int:
        """Give a block a second id, with as many holders, in ``new_space``.

        It does not count against the budget. Releasing every holder of the old id completes the
        move; releasing every holder of the new one cancels it.
        """
        holders = self._holders(space, block)
        new = self._spaces[new_space].take()
        self._spaces[new_space].refs[new] = holders
        self._replacing[new_space, new] = (space, block)
        return new

    def share(self, space: Hashable, block: int) -> None:
        """Add a holder to a block in use."""
        self._holders(space, block)
        self._spaces[space].refs[block] += 1

    def release(self, space: Hashable, block: int) -> None:
        """Remove a holder; the block is free when the last one is gone."""
        holders = self._holders(space, block)
        s = self._spaces[space]
        if holders > 1:
            s.refs[block] = holders - 1
            return
        del s.refs[block]
        insort(s.free, -block)
        self._replacing.pop((space, block), None)
        for new, old in list(self._replacing.items()):
            if old == (space, block):
                del self._replacing[new]

    def compact(self, space: Hashable) -> dict[int, int]:
        """Give the highest blocks the lowest free ids, and give up the ids above.

        Afterwards the space's capacity is the number of its blocks: its tensors need no more room.

        Returns:
            old id -> new id of the blocks that moved; whoever holds one must follow, and the
            content must be copied. No new id is an old one.

        Example:
            >>> allocator = BlockAllocator(["hot"])
            >>> ids = allocator.allocate("hot", 4)
            >>> for block in (0, 2):
            ...     allocator.release("hot", block)
            >>> allocator.compact("hot"), allocator.capacity("hot")
            ({3: 0}, 2)
        """
        s = self._spaces[space]
        count = len(s.refs)
        high = sorted((block for block in s.refs if block >= count), reverse=True)
        low = sorted(-block for block in s.free if -block < count)
        moves = dict(zip(high, low, strict=True))
        s.refs = {moves.get(block, block): holders for block, holders in s.refs.items()}
        s.free, s.capacity = [], count
        self._replacing = {
            (sp, moves.get(new, new) if sp == space else new): (
                old_sp,
                moves.get(old, old) if old_sp == space else old,
            )
            for (sp, new), (old_sp, old) in self._replacing.items()
        }
        return moves

    def _holders(self, space: Hashable, block: int) -> int:
        holders = self._spaces[space].refs.get(block, 0)
        if not holders:
            raise ValueError(
                f"BlockAllocator: block must be in use, got free block {block} of {space}"
            )
        return holders
