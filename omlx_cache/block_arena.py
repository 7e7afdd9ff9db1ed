"""Blocks, their tensors and their holders: of one cache alone, or of all caches of a model."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from omlx_cache.block_allocator import BlockAllocator
from omlx_cache.block_pool import LayerPool, copy_blocks
from omlx_cache.host_tier import HostTier
from omlx_cache.sequences import Sequence, StoredBlock
from omlx_kernels.layout import BLOCK_TIERS, Tier

if TYPE_CHECKING:
    from omlx_cache.kept_blocks import KeptBlocks


@dataclass(frozen=True)
class Held:
    """A block (or sink page) that is kept, and where it lies.

    Attributes:
        block: the block.
        allocator: counts its holders.
        pools: hold its content, in the order of the layers.
    """

    block: StoredBlock
    allocator: BlockAllocator
    pools: list[LayerPool]


class BlockArena:
    """The blocks from which the rows of one or several layer groups with one window draw.

    At most one group of an arena runs a step at a time, see `omlx_cache.step_lock`: between steps
    ids may change, and every holder follows.

    Attributes:
        blocks, pages: who holds which block, and which sink page.
        pools: the tensors, by the index of the layer; of the layers that have run.
        members: the rows of every group that draws from here, each as the group lists them.
        kept_blocks, kept_pages: what is held for later calls; None where nothing is.
        host: blocks that have moved to CPU memory; None where none may.
    """

    def __init__(self, max_blocks: int | None, host: HostTier | None = None) -> None:
        self.blocks = BlockAllocator(BLOCK_TIERS, max_blocks)
        self.pages = BlockAllocator([Tier.SINK])
        self.pools: dict[int, LayerPool] = {}
        self.members: list[list[Sequence]] = []
        self.kept_blocks: KeptBlocks | None = None
        self.kept_pages: KeptBlocks | None = None
        self.host = host

    @property
    def known_blocks(self) -> KeptBlocks:
        """`kept_blocks` of an arena that a prefix store made.

        Raises:
            RuntimeError: for another one.
        """
        return _made_by_a_store(self.kept_blocks)

    @property
    def known_pages(self) -> KeptBlocks:
        """`kept_pages` likewise."""
        return _made_by_a_store(self.kept_pages)

    @property
    def cpu_tier(self) -> HostTier:
        """`host`, where blocks may move to CPU memory.

        Raises:
            RuntimeError: where they may not.
        """
        if self.host is None:
            raise RuntimeError("BlockArena: blocks must be allowed to move to CPU memory here")
        return self.host

    @property
    def rows(self) -> list[Sequence]:
        """The rows of every group that draws from here."""
        return [row for rows in self.members for row in rows]

    def held(self, block: StoredBlock, *, is_away: bool = False) -> Held:
        """Return a block, of the device or of CPU memory, with where it lies."""
        if is_away:
            self.cpu_tier.wait_for_all()
            return Held(block, self.cpu_tier.blocks, _in_order(self.cpu_tier.pools))
        allocator = self.pages if block.tier is Tier.SINK else self.blocks
        return Held(block, allocator, _in_order(self.pools))

    def kept(self, key: Hashable) -> Held | None:
        """Return the block (or sink page) that is kept under ``key``, wherever it lies."""
        found = self.known_blocks.find(key) or self.known_pages.find(key)
        return None if found is None else self.held(found.block, is_away=found.is_away)

    def keep(self, key: Hashable, held: Held) -> None:
        """Keep a block (or sink page) under ``key``, as `kept` finds it."""
        if held.block.tier is Tier.SINK:
            self.known_pages.keep(key, held.block)
        else:
            self.known_blocks.keep(key, held.block, is_away=self._is_away(held))

    def note_written(self, held: Held) -> None:
        """Take notice of a block that was filled from elsewhere."""
        if self._is_away(held):
            for layer in self.pools:
                self.cpu_tier.note_bounds(layer, held.block.tier, [held.block.index])

    def _is_away(self, held: Held) -> bool:
        return self.host is not None and held.allocator is self.host.blocks

    @property
    def num_available(self) -> int | None:
        """Blocks that a step may take: free, or only held for later calls; None: no bound."""
        free, kept = self.blocks.num_free, self.kept_blocks
        return free if free is None or kept is None else free + kept.num_idle

    def capacity(self) -> dict[Tier, int]:
        """Return the blocks (pages) of each tier that the layers' tensors must hold."""
        capacity = {tier: self.blocks.capacity(tier) for tier in BLOCK_TIERS}
        return {Tier.SINK: self.pages.capacity(Tier.SINK), **capacity}

    def num_holders(self, block: StoredBlock) -> int:
        """Return how many rows hold a block."""
        kept = self.kept_blocks is not None and self.kept_blocks.holds(block)
        return self.blocks.refs(block.tier, block.index) - kept

    def num_holders_on_host(self, block: StoredBlock) -> int:
        """Return how many rows hold a block in CPU memory."""
        kept = self.kept_blocks is not None and self.kept_blocks.holds(block, is_away=True)
        return self.cpu_tier.blocks.refs(block.tier, block.index) - kept

    def share(self, rows: list[Sequence]) -> None:
        """Add a holder to everything that ``rows`` list."""
        for row in rows:
            for block in row.blocks:
                self.blocks.share(block.tier, block.index)
            if row.sink_page is not None:
                self.pages.share(Tier.SINK, row.sink_page)
            for block in row.offloaded:
                self.cpu_tier.blocks.share(block.tier, block.index)

    def release_rows(self, rows: Iterable[Sequence]) -> None:
        """Remove a holder of everything that ``rows`` list."""
        for row in rows:
            self.release(row.blocks, row.sink_page)
            self.release_offloaded(row.offloaded)

    def release_offloaded(self, blocks: Iterable[StoredBlock]) -> None:
        """Remove a holder of some blocks in CPU memory."""
        for block in blocks:
            self.cpu_tier.blocks.release(block.tier, block.index)

    def release(self, blocks: list[StoredBlock], sink_page: int | None) -> None:
        """Remove a holder of some blocks and of a page."""
        for block in blocks:
            self.blocks.release(block.tier, block.index)
        if sink_page is not None:
            self.pages.release(Tier.SINK, sink_page)

    def convert(self, conversions: Mapping[StoredBlock, StoredBlock], rows: list[Sequence]) -> None:
        """Let ``rows``, and what is kept, hold the second block of each pair for the first."""
        for row in rows:
            for i, block in enumerate(row.blocks):
                if block in conversions:
                    row.blocks[i] = conversions[block]
                    self.blocks.release(block.tier, block.index)
        if self.kept_blocks is not None:
            self.kept_blocks.replace(conversions)

    def convert_offloaded(
        self, conversions: Mapping[StoredBlock, StoredBlock], rows: list[Sequence]
    ) -> None:
        """Do the same for blocks in CPU memory."""
        if self.host is not None and self.host.bounds is not None:
            for old, new in conversions.items():
                self.host.bounds.move(old, new)
        for row in rows if conversions else ():
            for i, block in enumerate(row.offloaded):
                if block in conversions:
                    row.offloaded[i] = conversions[block]
                    self.cpu_tier.blocks.release(block.tier, block.index)
        if self.kept_blocks is not None:
            self.kept_blocks.replace(conversions, is_away=True)

    def settle(self) -> None:
        """Close the gaps that released blocks have left, and give their memory back."""
        moves = {tier: self.blocks.compact(tier) for tier in BLOCK_TIERS}
        moves[Tier.SINK] = self.pages.compact(Tier.SINK)
        if any(moves.values()):
            for pool in self.pools.values():
                for tier, pairs in moves.items():
                    copy_blocks(pool.blocks.tier(tier), list(pairs.items()))
            self._follow(moves)
        if self.host is not None:
            moved = self.host.settle()
            for row in self.rows:
                row.offloaded = _renumbered(row.offloaded, moved)
            for tier, pairs in moved.items():
                if self.kept_blocks is not None:
                    self.kept_blocks.follow(tier, pairs, is_away=True)
        capacity = self.capacity()
        for pool in self.pools.values():
            pool.shrink(capacity)

    def _follow(self, moves: Mapping[Tier, Mapping[int, int]]) -> None:
        for row in self.rows:
            if row.sink_page is not None:
                row.sink_page = moves[Tier.SINK].get(row.sink_page, row.sink_page)
            row.blocks = _renumbered(row.blocks, moves)
        for kept in (self.kept_blocks, self.kept_pages):
            if kept is not None:
                for tier, pairs in moves.items():
                    kept.follow(tier, pairs)


def _in_order(pools: Mapping[int, LayerPool]) -> list[LayerPool]:
    return [pool for _, pool in sorted(pools.items())]


def _renumbered(
    blocks: list[StoredBlock], moves: Mapping[Tier, Mapping[int, int]]
) -> list[StoredBlock]:
    return [replace(b, index=moves[b.tier].get(b.index, b.index)) for b in blocks]


def _made_by_a_store(kept: KeptBlocks | None) -> KeptBlocks:
    if kept is None:
        raise RuntimeError("BlockArena: the arena must be one of a prefix store, got another")
    return kept
