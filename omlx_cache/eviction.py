"""Blocks that leave a layer group's device: dropped for good, or moved to CPU memory.

Room is made before a step is planned, and only when it is certain that enough can be made. What has
left stays away when the step then fails: offloaded blocks are still attended to, and dropped ones
would be dropped again by the next try.

What the prefix store alone holds leaves first (`BlockAllocator.reclaim`), then blocks of the rows
of all caches that draw from the arena.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceType

from omlx_cache.block_arena import BlockArena
from omlx_cache.policy.eviction import Candidate, EvictionPolicy
from omlx_cache.sequences import Geometry, Sequence, StoredBlock
from omlx_cache.tier_moves import offload
from omlx_kernels.errors import OutOfBlocksError


class Evictor:
    """Lets blocks of one layer group leave.

    Args:
        policy: which blocks, and whether they may be dropped.
        geometry: of the group.
        arena: of the group.
        rows: the group's, a list that changes in place.
    """

    def __init__(
        self, policy: EvictionPolicy, geometry: Geometry, arena: BlockArena, rows: list[Sequence]
    ) -> None:
        self.policy = policy
        self._geometry, self._arena, self._rows = geometry, arena, rows

    @property
    def can_make_room(self) -> bool:
        """Whether a full pool is no obstacle by itself."""
        return self.policy.drops or self._arena.host is not None

    def candidates(
        self, lengths: SequenceType[int], *, offloaded: bool = False, only_own: bool = False
    ) -> list[Candidate]:
        """Return the blocks on the device (or in CPU memory) that could leave.

        Args:
            lengths: of the group's rows; what is recent is counted back from them.
            offloaded: whether to return those in CPU memory.
            only_own: whether the group's rows alone could do without them, whatever others do.
        """
        found: dict[tuple, Candidate] = {}
        length_of = {id(row): row.length for row in self._arena.rows}
        length_of |= {id(row): n for row, n in zip(self._rows, lengths, strict=True)}
        for row in self._rows if only_own else self._arena.rows:
            for block in row.offloaded if offloaded else row.blocks:
                found.setdefault((block.tier, block.index), Candidate(block, [])).rows.append(row)
        return [
            candidate
            for candidate in found.values()
            if all(
                self.policy.is_old(self._geometry, candidate.block, length_of[id(row)])
                for row in candidate.rows
            )
        ]

    def check_room(self, worst: int, steps: SequenceType[SequenceType[int]]) -> None:
        """Check that several steps in a row will find room, if blocks leave for them.

        Args:
            worst: the most blocks that they need beside those that are in use now.
            steps: for each step, the new tokens of each row.

        Raises:
            OutOfBlocksError: they will not; nothing is changed.
        """
        blocks, bound = self._arena.blocks, self._arena.blocks.max_blocks
        if bound is None:
            return
        if not self.policy.drops:
            there = self._arena.cpu_tier.blocks
            if there.max_blocks is not None:
                total = bound + there.max_blocks
                free = total - blocks.num_used - there.num_used + self._num_kept_alone()
                if worst > free:
                    raise OutOfBlocksError(worst, free, total, "max_gpu_blocks + max_cpu_blocks")
        needed, room = self._must_stay(steps), bound - self._num_stuck_elsewhere()
        if needed > room:
            raise OutOfBlocksError(needed, room, bound)

    def _num_kept_alone(self, *, is_away: bool | None = None) -> int:
        """Return how many blocks only the prefix store holds."""
        kept = self._arena.kept_blocks
        return 0 if kept is None else len(kept.idle(is_away=is_away))

    def _num_stuck_elsewhere(self) -> int:
        """Return how many blocks of the device rows of other caches can't let go of."""
        own = {id(row) for row in self._rows}
        recent: dict[bool, set[StoredBlock]] = {True: set(), False: set()}
        for row in self._arena.rows:
            recent[id(row) in own] |= {
                block
                for block in row.blocks
                if not self.policy.is_old(self._geometry, block, row.length)
            }
        return len(recent[False] - recent[True])

    def _must_stay(self, steps: SequenceType[SequenceType[int]]) -> int:
        """Return how many blocks can't leave in the worst of several steps, the new ones included.

        Blocks that rows share are counted once, as far as they are shared now.
        """
        geometry = self._geometry
        listed = [(b.tier, b.index) for row in self._rows for b in row.blocks]
        shared = len(listed) - len(set(listed))
        lengths, worst = [row.length for row in self._rows], 0
        for new_tokens in steps:
            stay = -shared
            for i, (length, new) in enumerate(zip(lengths, new_tokens, strict=True)):
                after = length + new
                gone = geometry.num_full(length - self.policy.recent_tokens)
                stay += geometry.num_blocks(after) - max(gone, geometry.num_released(length))
                lengths[i] = after
            worst = max(worst, stay)
        return worst

    def make_room(self, count: int, lengths: SequenceType[int] | None = None) -> None:
        """Let as many blocks leave the device as it takes for ``count`` to be free.

        Args:
            lengths: of the rows, where they are about to become shorter.

        Raises:
            OutOfBlocksError: too few can leave; nothing is changed.
        """
        blocks, free = self._arena.blocks, self._arena.num_available
        if free is None or blocks.max_blocks is None or count <= free or not self.can_make_room:
            return blocks.require(count)
        lengths = [row.length for row in self._rows] if lengths is None else lengths
        leaving = self.policy.least_valuable(self.candidates(lengths), count - free)
        if len(leaving) < count - free:
            raise OutOfBlocksError(count, free + len(leaving), blocks.max_blocks)
        if self._arena.host is None:
            self._drop(leaving, is_for_good=True)
            blocks.require(count)
        else:
            leaving = self._make_room_on_host(leaving, lengths)
            blocks.require(free)
            offload(self._arena, [each.block for each in leaving])
        self._arena.settle()
        return None

    def _make_room_on_host(
        self, leaving: list[Candidate], lengths: SequenceType[int]
    ) -> list[Candidate]:
        """Make room in CPU memory for blocks that leave the device, the least valuable first.

        Returns:
            Those that there is room for, or will be once what only the prefix store holds has
            left. The others have been dropped.
        """
        blocks = self._arena.cpu_tier.blocks
        if blocks.num_free is None or blocks.max_blocks is None:
            return leaving
        free = blocks.num_free + self._num_kept_alone(is_away=True)
        short = len(leaving) - free
        if short <= 0:
            return leaving
        if not self.policy.drops:
            raise OutOfBlocksError(len(leaving), free, blocks.max_blocks, "max_cpu_blocks")
        there = self.policy.least_valuable(self.candidates(lengths, offloaded=True), short)
        rest = short - len(there)  # more than CPU memory ever has room for
        self._drop([*there, *leaving[:rest]], is_for_good=True)
        return leaving[rest:]

    def prune(self) -> None:
        """Drop ``prune_ratio`` of each row's blocks, as far as that hasn't been done."""
        if not self.policy.prune_ratio:
            return
        lengths = [row.length for row in self._rows]
        candidates = [
            *self.candidates(lengths, only_own=True),
            *self.candidates(lengths, only_own=True, offloaded=True),
        ]
        for row in self._rows:
            own = [each for each in candidates if any(each_row is row for each_row in each.rows)]
            old = self.policy.num_old(self._geometry, row.length)
            kept = old - int(self.policy.prune_ratio * old)
            leaving = self.policy.least_valuable(own, len(own) - kept)
            self._drop(leaving)
            candidates = [each for each in candidates if each not in leaving]
        self._arena.settle()

    def _drop(self, leaving: list[Candidate], *, is_for_good: bool = False) -> None:
        """Let rows go on without some blocks.

        Args:
            leaving: the blocks.
            is_for_good: whether the prefix store lets go of them, too: their room is needed.
        """
        kept = self._arena.kept_blocks
        for candidate in leaving:
            block, is_away = candidate.block, False
            for row in candidate.rows:
                is_away = block not in row.blocks
                if is_away:
                    row.offloaded.remove(block)
                    self._arena.release_offloaded([block])
                else:
                    row.blocks.remove(block)
                    self._arena.release([block], None)
                row.lose(block.start)
            if kept is not None and is_for_good:
                kept.drop_block(block, is_away=is_away)
