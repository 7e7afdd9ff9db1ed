"""Blocks, their tensors and their holders: of one cache alone, or of all caches of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from omlx_cache.block_allocator import BlockAllocator
from omlx_cache.block_pool import LayerPool, copy_blocks
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
    """

    def __init__(self, max_blocks: int | None) -> None:
        self.blocks = BlockAllocator(BLOCK_TIERS, max_blocks)
        self.pages = BlockAllocator([Tier.SINK])
        self.pools: dict[int, LayerPool] = {}
        self.members: list[list[Sequence]] = []
        self.kept_blocks: KeptBlocks | None = None
        self.kept_pages: KeptBlocks | None = None

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

    def settle(self) -> None:
        """Close the gaps that released blocks have left, and give their memory back."""
        moves = {tier: self.blocks.compact(tier) for tier in BLOCK_TIERS}
        moves[Tier.SINK] = self.pages.compact(Tier.SINK)
        if any(moves.values()):
            for pool in self.pools.values():
                for tier, pairs in moves.items():
                    copy_blocks(pool.blocks.tier(tier), list(pairs.items()))
            self._follow(moves)
        capacity = self.capacity()
        for pool in self.pools.values():
            pool.shrink(capacity)

    def _follow(self, moves: Mapping[Tier, Mapping[int, int]]) -> None:
        for row in (row for rows in self.members for row in rows):
            if row.sink_page is not None:
                row.sink_page = moves[Tier.SINK].get(row.sink_page, row.sink_page)
            row.blocks = [
                replace(block, index=moves[block.tier].get(block.index, block.index))
                for block in row.blocks
            ]
        for kept in (self.kept_blocks, self.kept_pages):
            if kept is not None:
                for tier, pairs in moves.items():
                    kept.follow(tier, pairs)


def _made_by_a_store(kept: KeptBlocks | None) -> KeptBlocks:
    if kept is None:
        raise RuntimeError("BlockArena: the arena must be one of a prefix store, got another")
    return kept
