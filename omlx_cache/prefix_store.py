"""What a model has read, kept for later calls: the blocks of texts, found by their ids.

All caches of a patched model with ``prefix_cache: true`` draw from the same arenas, so that to
reuse a block is to become one more of its holders. The store is such a holder too. A block is kept
in the precision that it has, and goes on ageing while sequences use it; nobody writes to a block
that somebody else holds (`StepPlan` copies it first), so a call can't change what it has found.

One thread at a time may touch the arenas, and holds the store's lock for a whole step of the model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from omlx_cache.block_arena import BlockArena
from omlx_cache.block_pool import MemoryMeter
from omlx_cache.config import CacheConfig
from omlx_cache.host_tier import HostTier
from omlx_cache.kept_blocks import KeptBlocks
from omlx_cache.layer_group import LayerGroup
from omlx_cache.policy.choice import ages
from omlx_cache.prefix_disk import PrefixDisk, Reads
from omlx_cache.prefix_finding import PrefixFinder, take, touch
from omlx_cache.prefix_loading import PrefixLoader
from omlx_cache.prefix_tree import PrefixNode, PrefixTree
from omlx_cache.sequences import Sequence as Row
from omlx_cache.sequences import StoredBlock
from omlx_cache.step_lock import StepLock
from omlx_cache.tier_moves import move_idle
from omlx_kernels.layout import Tier

if TYPE_CHECKING:
    from omlx_cache.cache import PagedCache
    from omlx_cache.inspection import ModelSpec


class PrefixStore:
    """Known texts, and the arenas that hold their blocks.

    Args:
        config: of every cache that draws from here.
        fingerprint: what the blocks were computed with; see `omlx_cache.fingerprint`.

    Attributes:
        has_run: whether the model has run since; what it changed of itself then is no change.
        disk: where they are found again when they have left memory; None: nowhere.
    """

    def __init__(self, config: CacheConfig, fingerprint: tuple) -> None:
        self.config, self.fingerprint = config, fingerprint
        self.has_run = False
        self.meter = MemoryMeter()
        self.lock = StepLock(self._take_back)
        self.tree = PrefixTree(config.block_size, config.sink_tokens)
        self._arenas: dict[Hashable, BlockArena] = {}
        self._abandoned: deque[Sequence[LayerGroup]] = deque()
        self._is_closed = False
        self.disk: PrefixDisk | None = None

    @property
    def arenas(self) -> list[BlockArena]:
        """All that caches draw from so far."""
        return list(self._arenas.values())

    def arena(self, key: Hashable) -> BlockArena:
        """Return the arena of the layer groups with a window, made on first use."""
        if key not in self._arenas:
            host = HostTier.from_config(self.config)
            arena = self._arenas[key] = BlockArena(self.config.max_gpu_blocks, host)
            bound, away = self.config.prefix_cache_blocks, None if host is None else host.blocks
            kept = arena.kept_blocks = KeptBlocks(arena.blocks, bound, self._prune, away)
            arena.kept_pages = KeptBlocks(arena.pages, None)
            arena.blocks.reclaim = kept.reclaim
            if host is not None:
                arena.blocks.reclaim = partial(move_idle, arena)
                host.blocks.reclaim = partial(kept.reclaim, is_away=True)
        return self._arenas[key]

    @property
    def reads(self) -> Reads:
        """What was read from the disk so far."""
        return Reads() if self.disk is None else self.disk.reads

    def open_disk(self, cache: PagedCache, spec: ModelSpec) -> None:
        """Find blocks in the directory of ``disk_cache`` from now on, and write them there.

        Args:
            cache: any that draws from here.
            spec: of its model.
        """
        if self.disk is None and not self._is_closed:
            self.disk = PrefixDisk.open(cache, spec, self.meter)

    def begin(
        self, groups: Sequence[LayerGroup], ids: np.ndarray, valid: np.ndarray
    ) -> tuple[int, np.ndarray]:
        """Make the rows of a new cache begin with the longest known beginning of each prompt.

        Args:
            groups: the layer groups of the cache, without rows; left so where nothing is saved.
            ids: [rows, columns] int64.
            valid: [rows, columns] bool, which of them are real tokens.

        Returns:
            How many columns needn't be computed: those that every row has, and never the last
            token of a row. [rows] tokens that each row has, which may be more.
        """
        texts = [row[real][:-1] for row, real in zip(ids, valid, strict=True)]
        if self.disk is not None and not self._is_closed:
            self._loader(self.disk, groups).load(texts)
        finder = self.finder()
        finder.come_back(texts, groups, valid.sum(1).tolist())
        known = [finder.find(text, groups) for text in texts]
        lengths = np.array([prefix.length for prefix in known])
        missing = valid & (valid.cumsum(1) > lengths[:, None])
        first = np.where(missing.any(1), missing.argmax(1), valid.shape[1] - 1)
        columns = int(first.min())
        if columns:
            take(known, groups)
        for group in groups:
            group.arena.known_blocks.trim()  # of what was loaded, the rows hold what they need
        return (columns, lengths) if columns else (0, np.zeros_like(lengths))

    def finder(self) -> PrefixFinder:
        """Return what finds known beginnings of texts in memory."""
        return PrefixFinder(self.tree, self._is_hot)

    def _loader(self, disk: PrefixDisk, groups: Sequence[LayerGroup]) -> PrefixLoader:
        return PrefixLoader(self.tree, disk, groups, self._is_hot, self._prune)

    def expect(self, groups: Sequence[LayerGroup], texts: Sequence[np.ndarray]) -> None:
        """Begin to read what the disk has of texts, for a `begin` that may come.

        Args:
            groups: the layer groups of any cache.
            texts: [*] int64 each.
        """
        with self.lock:
            if self.disk is not None and self.disk.ahead is not None and not self._is_closed:
                self._loader(self.disk, groups).expect(texts)

    def keep(
        self, groups: Sequence[LayerGroup], texts: Mapping[int, np.ndarray], *, partial: bool
    ) -> None:
        """Hold what the rows of the groups hold.

        Args:
            groups: the layer groups of one cache.
            texts: by row, [*] int64, the ids that it begins with.
            partial: whether to keep a row's last block too, which isn't full.
        """
        if self._is_closed:
            return
        for i, ids in texts.items():
            whole = [row.whole for row in (group.rows[i] for group in groups)]
            known = min([len(ids), groups[0].rows[i].length, *(n for n in whole if n is not None)])
            self._keep_row(groups, i, ids[:known], partial and set(whole) == {None})
        for group in groups:
            group.arena.known_blocks.trim()
            group.arena.settle()

    def _keep_row(
        self, groups: Sequence[LayerGroup], i: int, ids: np.ndarray, partial: bool
    ) -> None:
        stored = [_blocks_of(group.rows[i]) for group in groups]
        node, path = self.tree.root, []
        for chunk in self.tree.chunks(ids):
            at_sinks = node is self.tree.root and self.config.sink_tokens
            size = self.config.sink_tokens if at_sinks else self.config.block_size
            if len(chunk) < size:
                longer = self.tree.continues(node, chunk)
                if at_sinks or not partial or any(map(self._is_hot, longer)):
                    break
            node = self.tree.add(node, chunk)
            path.append(node)
            for number, (group, blocks) in enumerate(zip(groups, stored, strict=True)):
                page = group.rows[i].sink_page
                if at_sinks and page is not None:
                    group.arena.known_pages.keep(node, StoredBlock(0, Tier.SINK, page))
                elif node.start in blocks:
                    block, is_away = blocks[node.start]
                    group.arena.known_blocks.keep(node, block, is_away=is_away)
                if self.disk is not None:
                    may_age = not partial and ages(group.policy)
                    self.disk.writer.offer(node, number, group.arena, may_age=may_age)
            if not at_sinks and self._is_whole(node):
                for shorter in self.tree.continued(node):
                    self._forget(shorter)
                    if self.disk is not None:
                        self.disk.writer.supersede(shorter, node)
        for group, blocks in zip(groups, stored, strict=True):
            touch(group, path, blocks)
        if self.disk is not None and partial:
            self.disk.writer.end_call(path, len(groups))
        if path:
            self._prune(path[-1])

    def flush(self) -> bool:
        """Write everything that is kept to the disk; return whether it is there.

        Without a disk it is not.
        """
        with self.lock:
            return self.disk is not None and self.disk.writer.flush(self._kept())

    def _kept(self) -> list[tuple[PrefixNode, int, BlockArena]]:
        return [
            (node, number, arena)
            for node in self.tree
            for number, arena in enumerate(self.arenas)
            if arena.kept(node) is not None
        ]

    def close(self) -> None:
        """Let go of everything, for good; caches that are in use keep what they use.

        What the disk lacks is written first.
        """
        with self.lock:
            if self.disk is not None:
                self.disk.writer.flush(self._kept())
            self._is_closed = True
            for arena in self.arenas:
                arena.known_blocks.reset()
                arena.known_pages.reset()
                arena.settle()
            self.tree = PrefixTree(self.config.block_size, self.config.sink_tokens)

    def abandon(self, groups: Sequence[LayerGroup]) -> None:
        """Take back what the groups of a cache hold that is gone: now, or at the end of a step.

        May be called by the garbage collector, in any thread and in the middle of anything.
        """
        self._abandoned.append(groups)
        if any(group.step is not None for group in groups):
            self.lock.free()  # it ran the step that has the lock, and will never end it
        else:
            self.lock.visit()

    def _take_back(self) -> None:
        while self._abandoned:
            for group in self._abandoned.popleft():
                if group.step is not None:
                    group.rollback()
                group.leave()

    def _is_sinks(self, node: PrefixNode) -> bool:
        return node.start < self.config.sink_tokens

    def _is_hot(self, node: PrefixNode) -> bool:
        """Whether every arena has the block of a node in the model's dtype: it can be cut."""
        found = [arena.known_blocks.find(node) for arena in self.arenas]
        return all(kept is not None and kept.block.tier is Tier.HOT for kept in found)

    def _is_whole(self, node: PrefixNode) -> bool:
        return all(arena.known_blocks.find(node) for arena in self.arenas)

    def _forget(self, node: PrefixNode) -> None:
        for arena in self.arenas:
            arena.known_blocks.drop(node)
        self._prune(node)

    def _prune(self, node: PrefixNode) -> None:
        """Forget a node without blocks and children, and its parents likewise."""
        while node.parent is not None and not node.children:
            if any(arena.known_blocks.find(node) for arena in self.arenas):
                return
            for arena in self.arenas:
                arena.known_pages.drop(node)
            if node not in self.tree:
                return
            self.tree.remove(node)
            node = node.parent


def _blocks_of(row: Row) -> dict[int, tuple[StoredBlock, bool]]:
    """Return a row's blocks by their starts, each with whether it is in CPU memory."""
    here = {block.start: (block, False) for block in row.blocks}
    return here | {block.start: (block, True) for block in row.offloaded}
