"""Blocks, their tensors and their holders: of one cache alone, or of all caches of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Sequence_
from dataclasses import replace
from typing import TYPE_CHECKING

from omlx_cache.block_allocator import BlockAllocator
from omlx_cache.block_pool import LayerPool, copy_blocks
from omlx_cache.host_tier import HostTier
from omlx_cache.sequences import Sequence, StoredBlock
from omlx_kernels.layout import BLOCK_TIERS, Tier

if TYPE_CHECKING:
    from omlx_cache.kept_blocks import KeptBlocks


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
        kept = self.kept_blocks is not None and block in self.kept_blocks
        return self.blocks.refs(block.tier, block.index) - kept

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

    def offload(self, held: Sequence_[tuple[StoredBlock, list[Sequence]]]) -> None:
        """Move blocks to CPU memory.

        Args:
            held: each block, and the rows that hold it: nobody else does.

        Raises:
            OutOfBlocksError, MemoryError: there is no room; nothing is changed.
        """
        host = self.cpu_tier
        copies = host.take(self.pools, [block for block, _ in held])
        for (block, rows), copied in zip(held, copies, strict=True):
            for row in rows:
                host.blocks.share(copied.tier, copied.index)
                self.blocks.release(block.tier, block.index)
                row.blocks.remove(block)
                row.offloaded = sorted([*row.offloaded, copied], key=lambda b: b.start)
            host.blocks.release(copied.tier, copied.index)  # its own share in the copy

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
            for row in (row for rows in self.members for row in rows):
                row.offloaded = _renumbered(row.offloaded, moved)
        capacity = self.capacity()
        for pool in self.pools.values():
            pool.shrink(capacity)

    def _follow(self, moves: Mapping[Tier, Mapping[int, int]]) -> None:
        for row in (row for rows in self.members for row in rows):
            if row.sink_page is not None:
                row.sink_page = moves[Tier.SINK].get(row.sink_page, row.sink_page)
            row.blocks = _renumbered(row.blocks, moves)
        for kept in (self.kept_blocks, self.kept_pages):
            if kept is not None:
                for tier, pairs in moves.items():
                    kept.follow(tier, pairs)


def _renumbered(
    blocks: list[StoredBlock], moves: Mapping[Tier, Mapping[int, int]]
) -> list[StoredBlock]:
    return [replace(b, index=moves[b.tier].get(b.index, b.index)) for b in blocks]


def _made_by_a_store(kept: KeptBlocks | None) -> KeptBlocks:
    if kept is None:
        raise RuntimeError("BlockArena: the arena must be one of a prefix store, got another")
    return kept
