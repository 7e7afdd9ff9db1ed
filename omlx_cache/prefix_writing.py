"""Write what the prefix store keeps to disk, behind the calls of the model.

Under the store's lock a block is copied out of the pools, and no more; a thread of its own
compresses, seals and writes it. What waits for it is bounded (`BACKLOG_BYTES`): a block for which
there is no room is not waited for but offered again by the next call that keeps it, and by `flush`.
During a prompt, a block that is to get colder soon isn't written yet. A block that has got colder
since it was written replaces its file, so that a text that is read back takes the memory that it
took. A last, partial block is a file of its tokens alone; it is removed when a longer one is on the
disk, and a later call has gone on from there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import partial

from omlx_cache.block_arena import BlockArena
from omlx_cache.prefix_tree import PrefixNode
from omlx_cache.storage.background import BackgroundJobs
from omlx_cache.storage.block_files import BlockFiles
from omlx_cache.storage.block_tensors import CopiedBlock, copy_block
from omlx_cache.storage.tensors import DTYPES
from omlx_kernels.layout import Tier

BACKLOG_BYTES = 512 * 2**20
"""The most that copies of blocks may hold while they wait to be written; one block always may."""

_MAX_KNOWN = 2**17  # blocks of which to remember that they are on the disk: some tens of MB


def key_of(digest: bytes, group: int) -> bytes:
    """Return the key of a block's file: the digest of its text, and its layer group."""
    return digest + group.to_bytes(2, "little")


class PrefixWriter:
    """Writes the blocks of one prefix store into a directory; see the module.

    Methods are called under the store's lock.

    Args:
        files: the directory.
    """

    def __init__(self, files: BlockFiles) -> None:
        self._files = files
        self._jobs = BackgroundJobs(BACKLOG_BYTES)
        self._known: dict[bytes, Tier] = {}  # files that are there, or on their way
        # digest of a block -> (number of a call, digest) of the partial blocks that it continues
        self._superseded: dict[bytes, tuple[tuple[int, bytes], ...]] = {}
        self._calls = 0
        self._is_failing = False

    def offer(
        self, node: PrefixNode, group: int, arena: BlockArena, *, may_age: bool = False
    ) -> bool:
        """Write the block that an arena keeps of a node, where the disk lacks it and has room.

        Args:
            node: a block of some text.
            group: number of the layer group, in the order of every cache.
            arena: the group's.
            may_age: whether a block in the model's dtype is soon to get colder, and to wait.

        Returns:
            Whether it is there, or on its way.
        """
        held, key = arena.kept(node), key_of(node.digest, group)
        if held is None or self._known.get(key) is held.block.tier:
            return True
        block, pools = held.block, held.pools
        if block.tier is Tier.HOT and may_age:
            return False
        size = sum(pool.format.bytes_per_block(block.tier) for pool in pools)
        if not (self._jobs.is_idle if self._is_failing else self._jobs.has_room(size)):
            return False
        copied = copy_block(pools, block.tier, block.index, len(node.tokens))
        self.note(key, block.tier)
        layers = [
            [i, pool.format.num_kv_heads, pool.format.head_dim, DTYPES[pool.format.dtype]]
            for i, pool in sorted(arena.pools.items())
        ]
        metadata = {"tier": block.tier.name, "layers": json.dumps(layers)}
        self._jobs.submit(partial(self._write, key, copied, metadata), size)
        return True

    def flush(self, kept: Iterable[tuple[PrefixNode, int, BlockArena]]) -> bool:
        """Write what is kept, waiting for room where there is none, and until all is written.

        Args:
            kept: (node, group, arena) as for `offer`.

        Returns:
            Whether all of it is on the disk. At the first block that can't be written it gives up.
        """
        asked = []
        for node, group, arena in kept:
            asked.append(key_of(node.digest, group))
            if not self.offer(node, group, arena):
                self._jobs.drain()
                if not self.offer(node, group, arena):
                    return False
            if self._is_failing:
                self._jobs.drain()
                if self._is_failing:
                    return False
        self._jobs.drain()
        return all(key in self._known for key in asked)

    def _write(self, key: bytes, copied: CopiedBlock, metadata: dict[str, str]) -> None:
        """Write a block; runs in the background."""
        is_stored = False
        try:
            is_stored = self._files.put(key, copied.to_raw(), metadata)
        finally:
            self._is_failing = not is_stored
            if not is_stored:
                self._known.pop(key, None)

    def knows(self, key: bytes) -> bool:
        """Whether a block is there, or on its way, as far as is known."""
        return key in self._known

    def note(self, key: bytes, tier: Tier) -> None:
        """Remember that a block of a tier is there."""
        self._known.pop(key, None)
        self._known[key] = tier
        if len(self._known) > _MAX_KNOWN:
            self._known.pop(next(iter(self._known)), None)

    def forget(self, key: bytes) -> None:
        """Believe no more that a block is there: it is written when it is kept again."""
        self._known.pop(key, None)

    def drain(self) -> None:
        """Wait until everything that was offered is written, or has failed."""
        self._jobs.drain()

    def supersede(self, shorter: PrefixNode, longer: PrefixNode) -> None:
        """Note that a partial block goes on: its files may leave a call later; see `end_call`."""
        olds = [self._superseded.pop(node.digest, ()) for node in (longer, shorter)]
        self._superseded[longer.digest] = (*olds[0], *olds[1], (self._calls, shorter.digest))
        if len(self._superseded) > _MAX_KNOWN:
            self._superseded.pop(next(iter(self._superseded)))

    def end_call(self, nodes: Sequence[PrefixNode], num_groups: int) -> None:
        """Make the blocks of a text the last to be evicted, its first block the very last.

        What an *earlier* call has superseded in this text is removed. What this one has is not yet:
        the process may be killed before anybody sees the call's answer, and the call come again.
        """
        keys = [key_of(node.digest, i) for node in reversed(nodes) for i in range(num_groups)]
        touched = [key for key in keys if key in self._known]
        removed: list[tuple[list[bytes], list[bytes]]] = []
        for node in nodes:
            olds = self._superseded.pop(node.digest, ())
            later = tuple(old for old in olds if old[0] == self._calls)
            if later:
                self._superseded[node.digest] = later
            gone = [
                key_of(old, i)
                for call, old in olds
                if call < self._calls
                for i in range(num_groups)
            ]
            removed.append(([key_of(node.digest, i) for i in range(num_groups)], gone))
            for key in gone:
                self._known.pop(key, None)
        self._calls += 1
        self._jobs.submit(partial(self._tidy, touched, removed))

    def _tidy(
        self, touched: Sequence[bytes], removed: Sequence[tuple[Sequence[bytes], Sequence[bytes]]]
    ) -> None:
        """Keep the order of use, and remove what was superseded; runs in the background."""
        for new, old in removed:
            if old and all(key in self._files for key in new):
                for key in old:
                    self._files.discard(key)
        if self._files.max_bytes is not None:
            for key in touched:
                self._files.touch(key)
