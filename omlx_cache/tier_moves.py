"""Blocks that move between a device and CPU memory, with all of their holders.

The holders of a block are rows of any cache that draws from the arena, and the prefix store where
there is one. They never disagree about where a block lies: it moves for all of them at once,
between the steps of a model.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from omlx_cache.sequences import StoredBlock

if TYPE_CHECKING:
    from omlx_cache.block_arena import BlockArena

logger = logging.getLogger(__name__)


def offload(arena: BlockArena, blocks: Sequence[StoredBlock]) -> None:
    """Move blocks from the device to CPU memory.

    Raises:
        OutOfBlocksError, MemoryError: there is no room; nothing is changed.
    """
    host = arena.cpu_tier
    copies = dict(zip(blocks, host.take(arena.pools, blocks), strict=True))
    for row in arena.rows:
        for block in [b for b in row.blocks if b in copies]:
            host.blocks.share(copies[block].tier, copies[block].index)
            arena.blocks.release(block.tier, block.index)
            row.blocks.remove(block)
            row.offloaded = sorted([*row.offloaded, copies[block]], key=lambda b: b.start)
    for block, copied in copies.items():
        if arena.kept_blocks is not None:
            arena.kept_blocks.move(block, copied, is_away=True)
        host.blocks.release(copied.tier, copied.index)  # its own share in the copy


def bring_back(arena: BlockArena, blocks: Sequence[StoredBlock]) -> None:
    """Move blocks from CPU memory to the device.

    Raises:
        OutOfBlocksError, MemoryError, torch.OutOfMemoryError: there is no room; they stay.
    """
    if not blocks:
        return
    host, places = arena.cpu_tier, list[StoredBlock]()
    for block in blocks:  # nobody may drop them to make room for them
        host.blocks.share(block.tier, block.index)
    try:
        arena.blocks.require(len(blocks))
        for block in blocks:
            (index,) = arena.blocks.allocate(block.tier, 1)
            places.append(StoredBlock(block.start, block.tier, index))
        for pool in arena.pools.values():
            pool.fit(arena.capacity())
        pairs = dict(zip(blocks, places, strict=True))
        host.give(arena.pools, pairs)
        for row in arena.rows:
            for block in [b for b in row.offloaded if b in pairs]:
                arena.blocks.share(block.tier, pairs[block].index)
                host.blocks.release(block.tier, block.index)
                row.offloaded.remove(block)
                row.blocks = sorted([*row.blocks, pairs[block]], key=lambda b: b.start)
        for block, place in pairs.items():
            if arena.kept_blocks is not None:
                arena.kept_blocks.move(block, place, is_away=False)
    finally:
        for place in places:
            arena.blocks.release(place.tier, place.index)
        for block in blocks:
            host.blocks.release(block.tier, block.index)


def move_idle(arena: BlockArena, count: int) -> None:
    """Free up to ``count`` blocks of the device that the prefix store alone holds.

    They move to CPU memory, the least recently used first. Where that is full, what the store has
    used least recently in either place is dropped.
    """
    kept, host = arena.known_blocks, arena.cpu_tier
    leaving = kept.idle(is_away=False)[:count]
    free = host.blocks.num_free
    if free is not None and len(leaving) > free:
        chosen = set(leaving) | set(kept.idle(is_away=True))
        oldest = [key for key in kept.idle() if key in chosen]
        for key in oldest[: len(leaving) - free]:
            kept.drop(key)
    found = (kept.get(key) for key in leaving)
    try:
        offload(arena, [block for block in found if block is not None])
    except MemoryError:
        logger.warning("no CPU memory for blocks that are kept for later calls; they are dropped")
        for key in leaving:
            kept.drop(key)
