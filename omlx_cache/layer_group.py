"""The layers of a model that see the same window, and the rows that they share.

A block holds its tokens' keys and values for every layer of a group, so allocation, ageing and
release are decided once a step for all of them. Most models have one group; models that mix
window layers and full layers have two, and the window layers' blocks leave on their own.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceType
from functools import lru_cache

import numpy as np
import torch

from omlx_cache.block_allocator import BlockAllocator
from omlx_cache.block_arena import BlockArena
from omlx_cache.block_pool import LayerPool, reopen_block
from omlx_cache.observer import Observer
from omlx_cache.plan import StepPlan
from omlx_cache.policy.choice import Policy
from omlx_cache.sequences import Geometry, Sequence, StoredBlock
from omlx_kernels.errors import OutOfBlocksError
from omlx_kernels.launch import blocks_per_split
from omlx_kernels.layout import Tier


@lru_cache
def num_multiprocessors(device: torch.device) -> int:
    """Return the multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


class LayerGroup:
    """The rows, and the step in progress, of the layers that share a window.

    Attributes:
        rows: the sequences; assigning changes the list in place, which the arena knows.
        keep_past: when set, blocks that the window has left behind stay until the next `crop`.
        observer: when set, told which share of the attention each block got; see `Observer`.

    Args:
        geometry: block arithmetic with the group's window.
        keep_sinks: whether sink tokens stay visible outside the window.
        policy: which tier a block belongs to.
        arena: where the rows' blocks come from.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        keep_sinks: bool,
        policy: Policy,
        arena: BlockArena,
    ) -> None:
        self.geometry, self.keep_sinks, self.policy = geometry, keep_sinks, policy
        self.arena = arena
        self._rows: list[Sequence] = []
        arena.members.append(self._rows)
        self.step: StepPlan | None = None
        self.keep_past = False
        self.observer: Observer | None = None

    @property
    def running_step(self) -> StepPlan:
        """The step in progress.

        Raises:
            RuntimeError: when there is none.
        """
        if self.step is None:
            raise RuntimeError("LayerGroup: a step must be in progress; call begin first")
        return self.step

    @property
    def rows(self) -> list[Sequence]:
        """The sequences."""
        return self._rows

    @rows.setter
    def rows(self, rows: list[Sequence]) -> None:
        self._rows[:] = rows

    @property
    def blocks(self) -> BlockAllocator:
        """Who holds which block."""
        return self.arena.blocks

    @property
    def pages(self) -> BlockAllocator:
        """Who holds which sink page."""
        return self.arena.pages

    @property
    def pools(self) -> list[LayerPool]:
        """The tensors of the layers that have run."""
        return list(self.arena.pools.values())

    def capacity(self) -> dict[Tier, int]:
        """Return the blocks (pages) of each tier that the layers' tensors must hold."""
        return self.arena.capacity()

    def require(self, steps: SequenceType[SequenceType[int]]) -> None:
        """Check that several steps in a row will find the blocks that they need.

        Args:
            steps: for each step, the new tokens of each row.

        Raises:
            OutOfBlocksError: when they will not; nothing is changed.
        """
        free, bound = self.arena.num_available, self.blocks.max_blocks
        if free is None or bound is None:
            return
        lengths = [row.length for row in self.rows]
        first = [self._first_live(row) for row in self.rows]
        needed, worst = self._shared_tails(steps), 0
        for new_tokens in steps:
            before = lengths
            lengths = [n + new for n, new in zip(before, new_tokens, strict=True)]
            needed += sum(
                self.geometry.num_blocks(after) - self.geometry.num_blocks(old)
                for old, after in zip(before, lengths, strict=True)
            )
            worst = max(worst, needed)
            if self.keep_past or self._is_sharing():
                continue  # what a row releases may stay with others: count nothing as freed
            released = map(self.geometry.num_released, lengths)
            still_live = [max(pair) for pair in zip(first, released, strict=True)]
            needed -= sum(still_live) - sum(first)
            first = still_live
        if worst > free:
            raise OutOfBlocksError(worst, free, bound)

    def _is_sharing(self) -> bool:
        return any(self.arena.num_holders(b) > 1 for row in self.rows for b in row.blocks)

    def _shared_tails(self, steps: SequenceType[SequenceType[int]]) -> int:
        """Return how many rows will write to a block that others hold too, and so copy it."""
        size = self.geometry.block_size
        writes = [any(new[i] for new in steps) for i in range(len(self.rows))]
        tails = [
            row.blocks[-1] for row, w in zip(self.rows, writes, strict=True) if w and row.blocks
        ]
        lengths = [row.length for row, w in zip(self.rows, writes, strict=True) if w and row.blocks]
        return sum(
            tail.start + size > length and self.blocks.refs(tail.tier, tail.index) > 1
            for tail, length in zip(tails, lengths, strict=True)
        )

    def _first_live(self, row: Sequence) -> int:
        """Return the number of blocks that the row has already released."""
        return self.geometry.num_blocks(row.length) - len(row.blocks)

    def begin(self, new_tokens: list[int], valid: np.ndarray | None) -> None:
        """Plan a step; see `StepPlan`, which raises OutOfBlocksError without changing anything."""
        self.step = StepPlan(
            self.rows,
            new_tokens,
            valid,
            geometry=self.geometry,
            arena=self.arena,
            others=[row for rows in self.arena.members if rows is not self._rows for row in rows],
            policy=self.policy,
            split_size=self._split_size,
            release=not self.keep_past,
        )

    def _split_size(self, row_blocks: list[int], device: torch.device) -> int:
        """Return the blocks of a decode split: sized for a GPU; elsewhere a row is not split.

        With an observer it is one, so that the mass of a split is that of a block.
        """
        if self.observer is not None:
            return 1
        if device.type != "cuda":
            return max(row_blocks, default=0) or 1
        kv_heads = self.pools[0].format.num_kv_heads
        return blocks_per_split(row_blocks, kv_heads, num_multiprocessors(device))

    def commit(self) -> None:
        """Finish the step in progress, and give back the memory that it freed."""
        self.running_step.commit()
        self._end()

    def rollback(self) -> None:
        """Undo the step in progress."""
        self.running_step.rollback()
        self._end()

    def _end(self) -> None:
        self.step = None
        self.arena.settle()

    def select(self, indices: SequenceType[int]) -> None:
        """Make row ``i`` a holder of what row ``indices[i]`` held; rows not named let go."""
        chosen = [self.rows[i] for i in indices]
        self.arena.share(chosen)
        old = list(self.rows)
        self.rows = [Sequence(row.length, row.sink_page, list(row.blocks)) for row in chosen]
        for row in old:
            self.arena.release(row.blocks, row.sink_page)
        self.arena.settle()

    def clear(self) -> None:
        """Release every row."""
        self.select([])

    def join(self) -> None:
        """Make the rows, a copy of another group's, holders of what they list."""
        self.arena.members.append(self._rows)
        self.arena.share(self._rows)

    def leave(self) -> None:
        """Release every row, and draw from the arena no more."""
        self.clear()
        self.arena.members = [rows for rows in self.arena.members if rows is not self._rows]

    def empty(self, indices: SequenceType[int]) -> None:
        """Release what some rows hold; they are empty rows then."""
        for i in indices:
            self.arena.release(self.rows[i].blocks, self.rows[i].sink_page)
            self.rows[i] = Sequence()
        self.arena.settle()

    def check_crop(self, removed: SequenceType[int]) -> None:
        """Check that each row can lose its last ``removed`` tokens.

        Raises:
            ValueError: when a shorter row's window reaches back to blocks that were released.
            OutOfBlocksError: when the blocks that must be re-opened don't fit.
        """
        for i, (row, count) in enumerate(zip(self.rows, removed, strict=True)):
            if self._first_live(row) > self.geometry.num_released(row.length - count):
                raise ValueError(
                    f"crop: row {i} must keep what its window of {self.geometry.window_size} "
                    f"tokens sees, got {count} tokens to remove after older blocks were released; "
                    f"call cache.activate_past_recording() before the step that is to be undone"
                )
        cut = [
            self._cut_block(row, row.length - count)
            for row, count in zip(self.rows, removed, strict=True)
        ]
        self.blocks.require(
            sum(b is not None and self.blocks.refs(b.tier, b.index) > 1 for b in cut)
        )

    def _cut_block(self, row: Sequence, length: int) -> StoredBlock | None:
        """Return the quantized block of ``row`` in which a sequence of ``length`` would end."""
        end = self.geometry.block_size
        for block in reversed(row.blocks):
            if block.start < length < block.start + end:
                return None if block.tier is Tier.HOT else block
        return None

    def crop(self, removed: SequenceType[int]) -> None:
        """Remove each row's last tokens, and the blocks that its window has left behind.

        A quantized block that is cut is re-opened as hot.

        Raises:
            OutOfMemoryError: when there is no room to re-open one; nothing is changed.
        """
        reopened = self._reopen_cut_blocks(removed)
        for row, count, new in zip(self.rows, removed, reopened, strict=True):
            row.length -= count
            if new is not None:
                self.arena.release([b for b in row.blocks if b.start == new.start], None)
                row.blocks = [new if b.start == new.start else b for b in row.blocks]
            gone = [
                b
                for b in row.blocks
                if b.start >= row.length or self.geometry.is_released(b, row.length)
            ]
            self.arena.release(gone, None)
            row.blocks = [b for b in row.blocks if b not in gone]
            if not row.length and row.sink_page is not None:
                self.arena.release([], row.sink_page)
                row.sink_page = None
        self.arena.settle()

    def _reopen_cut_blocks(self, removed: SequenceType[int]) -> list[StoredBlock | None]:
        """Copy each quantized block that a shorter row would end in to a hot block of its own."""
        taken: list[StoredBlock | None] = []
        try:
            for row, count in zip(self.rows, removed, strict=True):
                cut = self._cut_block(row, row.length - count)
                taken.append(None if cut is None else self._reopen(cut))
        except BaseException:
            self.arena.release([block for block in taken if block is not None], None)
            self.arena.settle()
            raise
        return taken

    def _reopen(self, block: StoredBlock) -> StoredBlock:
        """Write one holder's share of a quantized block into a hot block."""
        if self.blocks.refs(block.tier, block.index) > 1:
            (index,) = self.blocks.allocate(Tier.HOT, 1)
        else:
            index = self.blocks.begin_replace(block.tier, block.index, Tier.HOT)
        try:
            for pool in self.pools:
                pool.fit(self.capacity())
                reopen_block(pool.blocks, block.tier, block.index, index)
        except BaseException:
            self.blocks.release(Tier.HOT, index)
            raise
        return StoredBlock(block.start, Tier.HOT, index)
