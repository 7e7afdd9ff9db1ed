"""One step of one layer group as a transaction: planned on the host, then committed or undone.

While a step runs, the rows of the group are as they were: new tokens go to slots that no table
lists yet, converted blocks go to ids that no table lists yet, and what leaves is released only by
`StepPlan.commit`. So `StepPlan.rollback` (an interrupt, an error in some layer) restores the
cache exactly, whichever layers had already run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from omlx_cache.asked_padding import AskedPadding
from omlx_cache.block_allocator import BlockAllocator
from omlx_cache.block_arena import BlockArena
from omlx_cache.policy.choice import Policy
from omlx_cache.row_plan import RowPlan
from omlx_cache.sequences import Geometry, Sequence, StoredBlock
from omlx_cache.step_tables import DeviceTables, HostTables, SplitSize, StepTables
from omlx_kernels.layout import Tier


class StepPlan:
    """Plan a step: allocate what it needs, decide what ages and what leaves.

    Args:
        rows: the group's sequences.
        new_tokens: real tokens that each row gets.
        valid: [rows, columns] bool, which columns of the step are real tokens; None: all.
        geometry: the group's block arithmetic.
        arena: where blocks and sink pages come from.
        others: the rows of other groups that draw from the same arena.
        policy: which tier a block belongs to.
        split_size: from the blocks of each row and tier, and the device, the blocks that a decode
            split reads at most.
        release: whether blocks that the window has left behind are released at the end.
        recall: which of its blocks in CPU memory a row attends to.

    Raises:
        OutOfBlocksError: when the step needs more blocks than are free; nothing is changed.
    """

    def __init__(
        self,
        rows: list[Sequence],
        new_tokens: list[int],
        valid: np.ndarray | None,
        *,
        geometry: Geometry,
        arena: BlockArena,
        others: list[Sequence],
        policy: Policy,
        split_size: SplitSize,
        release: bool,
        recall: Callable[[Sequence], list[StoredBlock]],
    ) -> None:
        self._release = release
        self.geometry, self.policy = geometry, policy
        self._arena, self._others = arena, others
        self._blocks, self._pages, self._host = arena.blocks, arena.pages, arena.host
        self.rows = [RowPlan(row, n) for row, n in zip(rows, new_tokens, strict=True)]
        starts = [
            geometry.new_starts(row.length, n) for row, n in zip(rows, new_tokens, strict=True)
        ]
        shared = [self._shared_tail(row) for row in self.rows]
        self._blocks.require(sum(map(len, starts)) + sum(tail is not None for tail in shared))
        self.copies: list[tuple[int, int]] = []
        self.page_copies: list[tuple[int, int]] = []
        for row, row_starts, tail in zip(self.rows, starts, shared, strict=True):
            self._extend(row, row_starts, tail)
        self.conversions = self._age(
            [(row.blocks, row.length) for row in self.rows],
            [(row.blocks, row.length) for row in others],
            self._blocks,
            arena.num_holders,
        )
        self.offloaded_conversions = self._age_offloaded()
        for row in self.rows:
            row.recalled = recall(row.sequence) if row.new_tokens else []
        self._tables = StepTables(
            self.rows,
            valid,
            geometry=geometry,
            split_size=split_size,
            conversions=self.conversions,
            offloaded_conversions=self.offloaded_conversions,
        )
        self.padding = AskedPadding.of_step(self.rows, valid, recall, split_size)

    def _shared_tail(self, row: RowPlan) -> StoredBlock | None:
        """Return the row's partial block when others hold it too: writing needs a copy."""
        stored = row.sequence.blocks
        if not row.new_tokens or not stored:
            return None
        tail = stored[-1]
        partial = tail.start + self.geometry.block_size > row.sequence.length
        return tail if partial and self._blocks.refs(tail.tier, tail.index) > 1 else None

    def _extend(self, row: RowPlan, starts: range, tail: StoredBlock | None) -> None:
        row.blocks = list(row.sequence.blocks)
        if tail is not None:
            (index,) = self._blocks.allocate(Tier.HOT, 1)
            self.copies.append((tail.index, index))
            row.given_up.append(tail)
            row.blocks[-1] = StoredBlock(tail.start, Tier.HOT, index)
            row.taken.append(row.blocks[-1])
        for start, index in zip(starts, self._blocks.allocate(Tier.HOT, len(starts)), strict=True):
            row.blocks.append(StoredBlock(start, Tier.HOT, index))
            row.taken.append(row.blocks[-1])
        row.sink_page = row.old_sink_page = row.sequence.sink_page
        if not self.geometry.sink_tokens or not row.new_tokens:
            return
        writes_sinks = row.sequence.length < self.geometry.sink_tokens
        old = row.sink_page
        if old is None:
            (row.sink_page,) = self._pages.allocate(Tier.SINK, 1)
        elif writes_sinks and self._pages.refs(Tier.SINK, old) > 1:
            (new,) = self._pages.allocate(Tier.SINK, 1)
            self.page_copies.append((old, new))
            row.sink_page = new

    def _age(
        self,
        own: list[tuple[list[StoredBlock], int]],
        others: list[tuple[list[StoredBlock], int]],
        allocator: BlockAllocator,
        num_holders: Callable[[StoredBlock], int],
    ) -> dict[StoredBlock, StoredBlock]:
        """Give each full block that every holder wants colder an id in the colder tier.

        Args:
            own: the blocks and the length after the step of each row of the step.
            others: the same of all other rows.
            allocator: of the blocks.
            num_holders: how many rows hold a block.
        """
        wanted: dict[StoredBlock, list[Tier]] = {}
        for blocks, length in own:
            for block in blocks:
                if not self._leaves(block, length):
                    tier = self._tier_of(block, length)
                    if tier > block.tier:
                        wanted.setdefault(block, []).append(tier)
        for blocks, length in others if wanted else ():
            for block in wanted.keys() & set(blocks):
                tier = self._tier_of(block, length)
                if tier > block.tier:
                    wanted[block].append(tier)
        moves = {}
        for block, tiers in wanted.items():
            if len(tiers) == num_holders(block):
                tier = min(tiers)  # the warmest that a holder asks for
                index = allocator.begin_replace(block.tier, block.index, tier)
                moves[block] = StoredBlock(block.start, tier, index)
        return moves

    def _age_offloaded(self) -> dict[StoredBlock, StoredBlock]:
        """Do the same for the blocks in CPU memory."""
        if self._host is None:
            return {}
        return self._age(
            [(row.sequence.offloaded, row.length) for row in self.rows],
            [(row.offloaded, row.length) for row in self._others],
            self._host.blocks,
            self._arena.num_holders_on_host,
        )

    def _tier_of(self, block: StoredBlock, length: int) -> Tier:
        return self.policy.tier_of(block.start + self.geometry.block_size, length)

    def _leaves(self, block: StoredBlock, length: int) -> bool:
        return self._release and self.geometry.is_released(block, length)

    def _kept(
        self,
        blocks: list[StoredBlock],
        length: int,
        conversions: Mapping[StoredBlock, StoredBlock],
        allocator: BlockAllocator,
    ) -> list[StoredBlock]:
        """Return what a row holds of some blocks after the step, and let go of the rest."""
        kept = []
        for block in blocks:
            leaves = self._leaves(block, length)
            if leaves or block in conversions:
                allocator.release(block.tier, block.index)
            if not leaves:
                kept.append(conversions.get(block, block))
        return kept

    def commit(self) -> None:
        """Make the step's result the state of the rows, and release what left."""
        for row in self.rows:
            kept = self._kept(row.blocks, row.length, self.conversions, self._blocks)
            for block in row.given_up:
                self._blocks.release(block.tier, block.index)
            if row.old_sink_page not in (None, row.sink_page):
                self._pages.release(Tier.SINK, row.old_sink_page)
            sequence, length = row.sequence, row.length
            if sequence.offloaded:
                sequence.offloaded = self._kept(
                    sequence.offloaded,
                    length,
                    self.offloaded_conversions,
                    self._arena.cpu_tier.blocks,
                )
            sequence.length, sequence.sink_page, sequence.blocks = length, row.sink_page, kept
            if self._release:
                sequence.forget_before(self.geometry.first_live(length))
        self._arena.convert(self.conversions, self._others)
        self._arena.convert_offloaded(self.offloaded_conversions, self._others)

    def rollback(self) -> None:
        """Release everything that the step took; the rows were never touched."""
        for new in self.conversions.values():
            _cancel(self._blocks, new)
        for new in self.offloaded_conversions.values():
            _cancel(self._arena.cpu_tier.blocks, new)
        for row in self.rows:
            for block in row.taken:
                self._blocks.release(block.tier, block.index)
            if row.sink_page is not None and row.sink_page != row.old_sink_page:
                self._pages.release(Tier.SINK, row.sink_page)

    @property
    def split_blocks(self) -> list[tuple[int, int | None]]:
        """See `StepTables.split_blocks`."""
        return self._tables.split_blocks()

    def tables(self, device: torch.device) -> DeviceTables:
        """Return the step's tensors on ``device``; see `StepTables.on`."""
        return self._tables.on(device)

    def host_tables(self) -> HostTables | None:
        """Return what the step does to blocks in CPU memory; see `StepTables.on_host`."""
        return self._tables.on_host()


def _cancel(allocator: BlockAllocator, block: StoredBlock) -> None:
    while allocator.refs(block.tier, block.index):
        allocator.release(block.tier, block.index)
