"""Bring what the disk has of some texts into the prefix store, where `PrefixFinder` finds it.

Which blocks a text needs depends on how much of it is found: a group with a window needs none that
the window has left behind. So the longest beginning is looked for first, by the headers of the
files alone; then room is made for all that it lacks in memory, and only then are they read. What is
needed is held meanwhile, or making room could drop it. Where blocks may lie in CPU memory they are
read into that, as far as there is room; `omlx_cache.prefix_places` moves them on. Drawn for a group
without a window::

    text       SSSS BBBBBBBB BBBBBBBB BBBBBBBB BBBBBBBB bb...
    in memory    x      x        .        .        .     .
    on disk      x      x        x        x        .     x
                `---------- found --------------'         a block that is missing ends it
                                 `--- read ---'
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import torch

from omlx_cache.block_allocator import BlockAllocator
from omlx_cache.block_arena import BlockArena, Held
from omlx_cache.layer_group import LayerGroup
from omlx_cache.prefix_disk import PrefixDisk
from omlx_cache.prefix_tree import ROOT_DIGEST, PrefixNode, PrefixTree, next_digest
from omlx_cache.sequences import StoredBlock
from omlx_kernels.errors import OutOfBlocksError
from omlx_kernels.layout import Tier

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _Chunk:
    """The tokens of one block of a text, or of its sink page."""

    start: int
    tokens: np.ndarray
    digest: bytes

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


_Place = tuple[_Chunk, int]  # and the number of a layer group


class PrefixLoader:
    """Load the beginnings of texts for the groups of one new cache.

    Args:
        tree: of the store.
        disk: where to look.
        groups: the cache's layer groups.
        is_hot: whether the block of a node can be cut; see `PrefixTree.match`.
        prune: forgets a node that turns out to have no blocks.
    """

    def __init__(
        self,
        tree: PrefixTree,
        disk: PrefixDisk,
        groups: Sequence[LayerGroup],
        is_hot: Callable[[PrefixNode], bool],
        prune: Callable[[PrefixNode], None],
    ) -> None:
        self._tree, self._disk, self._groups = tree, disk, groups
        self._is_hot, self._prune = is_hot, prune
        self._sinks = groups[0].geometry.sink_tokens
        self._held: list[tuple[BlockAllocator, Tier, int]] = []
        self._found: dict[tuple[bytes, int], dict[str, str] | None] = {}
        self._nodes: dict[bytes, PrefixNode] = {}  # of the text's chunks, those that memory has

    def load(self, texts: Sequence[np.ndarray]) -> None:
        """Load what the disk has of texts, [*] int64 each, and memory lacks."""
        try:
            for ids in texts:
                while not self._load(ids):  # a block turned out to be damaged: less is there
                    pass
        except (MemoryError, torch.OutOfMemoryError):
            logger.warning("disk cache: no memory to read blocks into; they are computed again")
        finally:
            for allocator, tier, index in self._held:
                allocator.release(tier, index)

    def expect(self, texts: Sequence[np.ndarray]) -> None:
        """Begin to read what the disk has of texts and memory lacks, for a `load` to come."""
        missing: dict[tuple[bytes, int], None] = {}
        for ids in texts:
            wanted = self._wanted(self._longest(ids))
            missing |= {(c.digest, i): None for c, i in wanted if self._in_memory(c, i) is None}
        self._disk.expect(missing)

    def _wanted(self, chunks: Sequence[_Chunk]) -> list[_Place]:
        """Return the blocks that a row needs to begin with some chunks."""
        return [
            (chunk, i)
            for chunk in chunks
            for i in range(len(self._groups))
            if self._needs(i, chunk, chunks[-1].end)
        ]

    def _load(self, ids: np.ndarray) -> bool:
        """Load what is there; return False after a block that should be there and isn't."""
        chunks = self._longest(ids)
        wanted = self._wanted(chunks)
        blocks = {pair: self._in_memory(*pair) for pair in wanted}
        missing = [pair for pair, held in blocks.items() if held is None]
        if not missing:
            return True
        for held in blocks.values():
            if held is not None:
                held.allocator.share(held.block.tier, held.block.index)
                self._held.append((held.allocator, held.block.tier, held.block.index))
        return self._read(chunks, blocks, self._make_room(missing))

    def _make_room(self, missing: Sequence[_Place]) -> dict[_Place, Held]:
        """Take a block for each place, in their order, as far as there is room."""
        taken: dict[_Place, tuple[StoredBlock, bool]] = {}
        for chunk, i in missing:
            arena, geometry = self._groups[i].arena, self._groups[i].geometry
            metadata = self._described(chunk, i)
            found = self._allocate(arena, Tier[metadata["tier"]])
            if found is None:
                break
            index, is_away = found
            block = StoredBlock(chunk.start, Tier[metadata["tier"]], index)
            taken[chunk, i] = block, is_away
            self._disk.make_pools(arena, metadata, geometry.block_size, geometry.sink_tokens)
        for group in self._groups:
            for pool in group.pools:
                pool.fit(group.capacity())
            if group.arena.host is not None:
                for layer in group.arena.host.pools:
                    group.arena.host.fitted(layer)
        return {
            (chunk, i): self._groups[i].arena.held(block, is_away=is_away)
            for (chunk, i), (block, is_away) in taken.items()
        }

    def _allocate(self, arena: BlockArena, tier: Tier) -> tuple[int, bool] | None:
        """Take a block in CPU memory, else on the device; return its id and whether it is away."""
        choices = [(arena.pages if tier is Tier.SINK else arena.blocks, False)]
        if arena.host is not None and tier is not Tier.SINK:
            choices.insert(0, (arena.host.blocks, True))
        for allocator, is_away in choices:
            try:
                (index,) = allocator.allocate(tier, 1)
            except OutOfBlocksError:
                continue
            self._held.append((allocator, tier, index))
            return index, is_away
        return None

    def _read(
        self,
        chunks: Sequence[_Chunk],
        blocks: Mapping[_Place, Held | None],
        new: Mapping[_Place, Held],
    ) -> bool:
        """Read the new blocks, and let the store keep them and those that memory has already."""
        node, before = self._tree.root, self._disk.num_read
        self._disk.expect((chunk.digest, i) for chunk, i in new)
        try:
            for chunk in chunks:
                node = self._tree.add(node, chunk.tokens)
                for i, group in enumerate(self._groups):
                    held = blocks.get((chunk, i))
                    if (chunk, i) in new:
                        held = new[chunk, i]
                        if not self._disk.read(node, i, held):
                            self._look_again(chunk, i, held.block.tier)
                            return False
                        group.arena.note_written(held)
                    elif (chunk, i) in blocks and held is None:
                        return True  # there was no room for it
                    if held is not None:
                        group.arena.keep(node, held)
        finally:
            self._prune(node)
            logger.info("disk cache: %d blocks read", self._disk.num_read - before)
        return True

    def _look_again(self, chunk: _Chunk, group: int, tier: Tier) -> None:
        """Note what is there of a block that couldn't be read, as one of a tier.

        Another process may have replaced it by a colder one since its header was read: that one is
        read in the next try.
        """
        there = self._disk.peek(chunk.digest, group)
        is_another = there is not None and there["tier"] != tier.name
        self._found[chunk.digest, group] = there if is_another else None

    def _longest(self, ids: np.ndarray) -> list[_Chunk]:
        """Return the chunks of the longest beginning of which all blocks are somewhere."""
        chunks = list(self._cut(ids))
        self._nodes = {node.digest: node for node in self._tree.path(c.tokens for c in chunks)}
        count = len(chunks) - bool(chunks and self._is_partial(chunks[-1]))
        while count:
            end = chunks[count - 1].end
            gap = next((j for j in range(count) if not self._is_there(chunks[j], end)), None)
            if gap is None:
                break
            # A shorter beginning without the gap's window ends before the gap.
            count = gap
        for chunk in chunks[count + 1 :]:
            for i in range(len(self._groups)):
                self._disk.forget(chunk.digest, i)
        found = chunks[:count]
        if count < len(chunks) and (count or not self._sinks):
            found += self._longest_tail(ids, found, chunks[count])
        return found if len(found) > bool(self._sinks) else []  # sinks alone are no prefix

    def _cut(self, ids: np.ndarray) -> Iterator[_Chunk]:
        start, digest = 0, ROOT_DIGEST
        for tokens in self._tree.chunks(ids):
            if len(tokens):
                digest = next_digest(digest, tokens)
                yield _Chunk(start, tokens, digest)
                start += len(tokens)

    def _is_partial(self, chunk: _Chunk) -> bool:
        geometry = self._groups[0].geometry
        size = geometry.sink_tokens if chunk.start < geometry.sink_tokens else geometry.block_size
        return len(chunk.tokens) < size

    def _longest_tail(
        self, ids: np.ndarray, before: Sequence[_Chunk], rest: _Chunk
    ) -> list[_Chunk]:
        """Return the longest partial block on the disk that ``rest`` begins with.

        It isn't looked for where memory has a longer one, or one that the text continues: the
        usual next turn.
        """
        path = self._tree.match(ids, self._is_hot)
        known = 0
        if path and path[-1][0].start == rest.start:
            node, known = path[-1]
            if known == len(node.tokens):
                return []
        running = sha256(before[-1].digest if before else ROOT_DIGEST)
        digests = []
        for token in rest.tokens:
            running.update(token.tobytes())
            digests.append(running.copy().digest())
        for count in range(len(digests), known, -1):
            tail = _Chunk(rest.start, rest.tokens[:count], digests[count - 1])
            if self._is_there(tail, tail.end):
                return [tail]
        return []

    def _is_there(self, chunk: _Chunk, length: int) -> bool:
        """Whether every group has what it needs of a chunk when a row of ``length`` goes on."""
        return all(
            self._in_memory(chunk, i) is not None or self._on_disk(chunk, i) is not None
            for i in range(len(self._groups))
            if self._needs(i, chunk, length)
        )

    def _needs(self, group: int, chunk: _Chunk, length: int) -> bool:
        if chunk.start < self._sinks:
            return True
        block = StoredBlock(chunk.start, Tier.HOT, 0)
        return not self._groups[group].geometry.is_released(block, length)

    def _in_memory(self, chunk: _Chunk, group: int) -> Held | None:
        node = self._nodes.get(chunk.digest)
        return None if node is None else self._groups[group].arena.kept(node)

    def _described(self, chunk: _Chunk, group: int) -> dict[str, str]:
        metadata = self._found[chunk.digest, group]
        if metadata is None:
            raise KeyError(f"no block of group {group} from token {chunk.start} on is on the disk")
        return metadata

    def _on_disk(self, chunk: _Chunk, group: int) -> dict[str, str] | None:
        key = chunk.digest, group
        if key not in self._found:
            self._found[key] = self._disk.peek(*key)
        return self._found[key]
