"""Blocks that leave a layer group's device: dropped for good, or moved to CPU memory.

Room is made before a step is planned, and only when it is certain that enough can be made. What has
left stays away when the step then fails: offloaded blocks are still attended to, and dropped ones
would be dropped again by the next try.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceType

from omlx_cache.block_arena import BlockArena
from omlx_cache.policy.eviction import Candidate, EvictionPolicy
from omlx_cache.sequences import Geometry, Sequence
from omlx_kernels.errors import OutOfBlocksError


class Evictor:
    """Lets blocks of one layer group leave.

    Args:
        policy: which blocks, and whether they may be dropped.
        geometry: of the group.
        arena: of the group, which nobody else draws from.
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

    def candidates(self, lengths: SequenceType[int], *, offloaded: bool = False) -> list[Candidate]:
        """Return the blocks on the device (or in CPU memory) that could leave.

        Args:
            lengths: of the rows; what is recent is counted back from them.
        """
        found: dict[tuple, Candidate] = {}
        for row in self._rows:
            for block in row.offloaded if offloaded else row.blocks:
                found.setdefault((block.tier, block.index), Candidate(block, [])).rows.append(row)
        length_of = {id(row): n for row, n in zip(self._rows, lengths, strict=True)}
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
                free = total - blocks.num_used - there.num_used
                if worst > free:
                    raise OutOfBlocksError(worst, free, total, "max_gpu_blocks + max_cpu_blocks")
        needed = self._must_stay(steps)
        if needed > bound:
            raise OutOfBlocksError(needed, bound, bound)

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
        free, bound = self._arena.blocks.num_free, self._arena.blocks.max_blocks
        if free is None or bound is None or count <= free or not self.can_make_room:
            return self._arena.blocks.require(count)
        lengths = [row.length for row in self._rows] if lengths is None else lengths
        leaving = self.policy.least_valuable(self.candidates(lengths), count - free)
        host = self._arena.host
        if len(leaving) < count - free:
            raise OutOfBlocksError(count, free + len(leaving), bound)
        if host is None:
            self._drop(leaving)
        else:
            self._make_room_on_host(len(leaving), lengths)
            self._arena.offload([(each.block, each.rows) for each in leaving])
        self._arena.settle()
        return None

    def _make_room_on_host(self, count: int, lengths: SequenceType[int]) -> None:
        blocks = self._arena.cpu_tier.blocks
        free, bound = blocks.num_free, blocks.max_blocks
        if free is None or bound is None or count <= free:
            return
        if not self.policy.drops:
            raise OutOfBlocksError(count, free, bound, "max_cpu_blocks")
        there = self.candidates(lengths, offloaded=True)
        self._drop(self.policy.least_valuable(there, count - free))

    def prune(self) -> None:
        """Drop ``prune_ratio`` of each row's blocks, as far as that hasn't been done."""
        if not self.policy.prune_ratio:
            return
        lengths = [row.length for row in self._rows]
        candidates = [
            *self.candidates(lengths),
            *(self.candidates(lengths, offloaded=True) if self._arena.host else ()),
        ]
        for row in self._rows:
            own = [each for each in candidates if any(each_row is row for each_row in each.rows)]
            old = self.policy.num_old(self._geometry, row.length)
            kept = old - int(self.policy.prune_ratio * old)
            leaving = self.policy.least_valuable(own, len(own) - kept)
            self._drop(leaving)
            candidates = [each for each in candidates if each not in leaving]
        self._arena.settle()

    def _drop(self, leaving: list[Candidate]) -> None:
        for candidate in leaving:
            block = candidate.block
            for row in candidate.rows:
                if block in row.blocks:
                    row.blocks.remove(block)
                    self._arena.release([block], None)
                else:
                    row.offloaded.remove(block)
                    self._arena.release_offloaded([block])
                row.dropped.add(block.start)
                row.mass.pop(block.start, None)
