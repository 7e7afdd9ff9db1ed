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

from omlx_cache import cropping
from omlx_cache.block_allocator import BlockAllocator
from omlx_cache.block_arena import BlockArena
from omlx_cache.block_mass import StepMass, add_step
from omlx_cache.block_pool import LayerPool
from omlx_cache.eviction import Evictor
from omlx_cache.observer import Observer
from omlx_cache.plan import StepPlan
from omlx_cache.policy.choice import Policy
from omlx_cache.policy.eviction import EvictionPolicy
from omlx_cache.recall import Recall, StepPromise
from omlx_cache.sequences import Geometry, Sequence
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
        eviction: which blocks leave, and when; None: none does.
        recall: how many of its blocks in CPU memory a row attends to; None is all.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        keep_sinks: bool,
        policy: Policy,
        arena: BlockArena,
        eviction: EvictionPolicy | None = None,
        recall: int | None = None,
    ) -> None:
        self.geometry, self.keep_sinks, self.policy = geometry, keep_sinks, policy
        self.arena = arena
        self._rows: list[Sequence] = []
        arena.members.append(self._rows)
        self._evictor = None if eviction is None else Evictor(eviction, geometry, arena, self._rows)
        self.recall = Recall(recall)
        self.mass: StepMass | None = None  # of the step in progress, where it is asked for
        self.promise: StepPromise | None = None  # likewise
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
        if free is None or bound is None or not steps:
            return
        worst = max(self._needs(steps))
        if self._evictor is not None and self._evictor.can_make_room:
            self._evictor.check_room(worst, steps)
        elif worst > free:
            raise OutOfBlocksError(worst, free, bound)

    def check_room(self, count: int, removed: SequenceType[int]) -> None:
        """Make room for ``count`` blocks beside rows that lose their last ``removed`` tokens.

        Raises:
            OutOfBlocksError: there can't be that much; nothing is changed.
        """
        if self._evictor is None:
            self.blocks.require(count)
        else:
            lengths = [row.length - n for row, n in zip(self.rows, removed, strict=True)]
            self._evictor.make_room(count, lengths)

    def _needs(self, steps: SequenceType[SequenceType[int]]) -> list[int]:
        """Return for each of several steps in a row the blocks that it needs beside those in use.

        What leaves the window in one step is there for the next.
        """
        lengths = [row.length for row in self.rows]
        first = [self.first_live(row) for row in self.rows]
        needed, needs = self._shared_tails(steps), []
        for new_tokens in steps:
            before = lengths
            lengths = [n + new for n, new in zip(before, new_tokens, strict=True)]
            needed += sum(
                self.geometry.num_blocks(after) - self.geometry.num_blocks(old)
                for old, after in zip(before, lengths, strict=True)
            )
            needs.append(needed)
            if self.keep_past or self._is_sharing():
                continue  # what a row releases may stay with others: count nothing as freed
            released = map(self.geometry.num_released, lengths)
            still_live = [max(pair) for pair in zip(first, released, strict=True)]
            needed -= sum(still_live) - sum(first)
            first = still_live
        return needs

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

    def first_live(self, row: Sequence) -> int:
        """Return the number of blocks that a row has already released."""
        return self.geometry.num_blocks(row.length) - len(row.blocks) - row.num_absent

    def begin(self, new_tokens: list[int], valid: np.ndarray | None) -> None:
        """Plan a step; see `StepPlan`, which raises OutOfBlocksError without changing anything."""
        if self._evictor is not None:
            self._evictor.make_room(self._needs([new_tokens])[0])
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
            recall=self.recall.choose,
        )
        if self._evictor is not None and self._evictor.policy.needs_mass:
            self.mass = StepMass()
        if self.recall.count is not None and any(row.recalled for row in self.running_step.rows):
            ends = np.cumsum(new_tokens) - 1
            asking = [
                (row, int(at)) for row, at, n in zip(self.rows, ends, new_tokens, strict=True) if n
            ]
            self.promise = StepPromise(self.arena.cpu_tier, asking)

    def _split_size(self, row_blocks: list[int], device: torch.device) -> int:
        """Return the blocks of a decode split: sized for a GPU; elsewhere a row is not split.

        Where the mass is watched it is one, so that the mass of a split is that of a block.
        """
        if self.watches_mass:
            return 1
        if device.type != "cuda":
            return max(row_blocks, default=0) or 1
        kv_heads = self.pools[0].format.num_kv_heads
        return blocks_per_split(row_blocks, kv_heads, num_multiprocessors(device))

    @property
    def watches_mass(self) -> bool:
        """Whether somebody wants to know the attention that each block gets in the step."""
        return self.observer is not None or self.mass is not None

    def commit(self) -> None:
        """Finish the step in progress, and give back the memory that it freed."""
        step = self.running_step
        for plan in step.rows:
            if plan.new_tokens and len(plan.recalled) < len(plan.sequence.offloaded):
                plan.sequence.see_less()
        step.commit()
        if self.promise is not None:
            chosen = {id(row.sequence): row.recalled for row in step.rows}
            for row, promise in self.promise.of_rows():
                self.recall.learn(row, chosen[id(row)], promise)
        if self.mass is not None:
            add_step(self.rows, [row.new_tokens for row in step.rows], self._masses(step))
        self._end()

    def _masses(self, step: StepPlan) -> list[tuple[int, int, float]]:
        """Return the attention that each block got in a step: row, start of the block, mass."""
        masses = None if self.mass is None else self.mass.collect()
        if masses is None:
            return []
        return [
            (row, start, mass)
            for (row, start), mass in zip(step.split_blocks, masses, strict=True)
            if start is not None
        ]

    def prune(self) -> None:
        """Drop what the configuration wants dropped whether there is room or not."""
        if self._evictor is not None:
            self._evictor.prune()

    def rollback(self) -> None:
        """Undo the step in progress."""
        self.running_step.rollback()
        self._end()

    def _end(self) -> None:
        self.step = self.mass = self.promise = None
        self.arena.settle()

    def select(self, indices: SequenceType[int]) -> None:
        """Make row ``i`` a holder of what row ``indices[i]`` held; rows not named let go."""
        chosen = [self.rows[i] for i in indices]
        self.arena.share(chosen)
        old = list(self.rows)
        self.rows = [row.copy() for row in chosen]
        self.arena.release_rows(old)
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
        self.arena.release_rows(self.rows[i] for i in indices)
        for i in indices:
            self.rows[i] = Sequence()
        self.arena.settle()

    def check_crop(self, removed: SequenceType[int]) -> None:
        """Check that each row can lose its last ``removed`` tokens; see `cropping.check_crop`."""
        cropping.check_crop(self, removed)

    def crop(self, removed: SequenceType[int]) -> None:
        """Remove each row's last tokens, and the blocks that its window has left behind."""
        cropping.crop(self, removed)
