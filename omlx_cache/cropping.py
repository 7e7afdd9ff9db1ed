"""How the rows of a layer group lose their newest tokens.

A row that ends inside of a quantized block, or of one in CPU memory, gets the block's values in a
hot block of its own, to which it can write again: they stay rounded as they are.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceType
from typing import TYPE_CHECKING

from omlx_cache.block_pool import reopen_block
from omlx_cache.sequences import Sequence, StoredBlock
from omlx_kernels.layout import Tier

if TYPE_CHECKING:
    from omlx_cache.layer_group import LayerGroup


def check_crop(group: LayerGroup, removed: SequenceType[int]) -> None:
    """Check that each row can lose its last ``removed`` tokens.

    Raises:
        ValueError: when a shorter row's window reaches back to blocks that were released, or it
            would end inside of a block that pruning has dropped.
        OutOfBlocksError: when the blocks that must be re-opened don't fit.
    """
    geometry, needed = group.geometry, 0
    for i, (row, count) in enumerate(zip(group.rows, removed, strict=True)):
        length = row.length - count
        if group.first_live(row) > geometry.num_released(length):
            raise ValueError(
                f"crop: row {i} must keep what its window of {geometry.window_size} tokens sees, "
                f"got {count} tokens to remove after older blocks were released; call "
                f"cache.activate_past_recording() before the step that is to be undone"
            )
        if any(start < length < start + geometry.block_size for start in row.dropped):
            raise ValueError(
                f"crop: row {i} must end in a block that it still has, got {count} tokens to "
                f"remove, which leads to one that pruning has dropped; remove fewer or more"
            )
        cut = _cut_block(group, row, length)
        is_own = cut in row.blocks and group.blocks.refs(cut.tier, cut.index) == 1
        needed += cut is not None and not is_own
    group.check_room(needed, removed)


def crop(group: LayerGroup, removed: SequenceType[int]) -> None:
    """Remove each row's last tokens, and the blocks that its window has left behind.

    Raises:
        OutOfMemoryError: when there is no room to re-open a block; nothing is changed.
    """
    arena, geometry = group.arena, group.geometry
    reopened = _reopen_cut_blocks(group, removed)
    for row, count, new in zip(group.rows, removed, reopened, strict=True):
        row.length -= count
        if new is not None:
            _let_go(group, row, lambda block, at=new.start: block.start == at)
            row.blocks = sorted([*row.blocks, new], key=lambda block: block.start)
        _let_go(
            group,
            row,
            lambda b, end=row.length: b.start >= end or geometry.is_released(b, end),
        )
        row.forget_from(row.length)
        row.forget_before(geometry.first_live(row.length))
        if not row.length and row.sink_page is not None:
            arena.release([], row.sink_page)
            row.sink_page = None
    arena.settle()


def _let_go(group: LayerGroup, row: Sequence, is_gone) -> None:
    group.arena.release([block for block in row.blocks if is_gone(block)], None)
    group.arena.release_offloaded([block for block in row.offloaded if is_gone(block)])
    row.blocks = [block for block in row.blocks if not is_gone(block)]
    row.offloaded = [block for block in row.offloaded if not is_gone(block)]


def _cut_block(group: LayerGroup, row: Sequence, length: int) -> StoredBlock | None:
    """Return the block to re-open so that a sequence of ``length`` can end in it."""
    size = group.geometry.block_size
    for block in reversed(row.blocks):
        if block.start < length < block.start + size:
            return None if block.tier is Tier.HOT else block
    return next((b for b in row.offloaded if b.start < length < b.start + size), None)


def _reopen_cut_blocks(group: LayerGroup, removed: SequenceType[int]) -> list[StoredBlock | None]:
    """Copy each block that a shorter row would end in to a hot block of its own."""
    taken: list[StoredBlock | None] = []
    try:
        for row, count in zip(group.rows, removed, strict=True):
            cut = _cut_block(group, row, row.length - count)
            taken.append(None if cut is None else _reopen(group, row, cut))
    except BaseException:
        group.arena.release([block for block in taken if block is not None], None)
        group.arena.settle()
        raise
    return taken


def _reopen(group: LayerGroup, row: Sequence, block: StoredBlock) -> StoredBlock:
    """Write one holder's share of a block into a hot block."""
    arena, blocks = group.arena, group.blocks
    is_here = block in row.blocks
    if is_here and blocks.refs(block.tier, block.index) == 1:
        index = blocks.begin_replace(block.tier, block.index, Tier.HOT)
    else:
        (index,) = blocks.allocate(Tier.HOT, 1)
    try:
        sources = arena.pools if is_here else arena.cpu_tier.pools
        if not is_here:
            arena.cpu_tier.wait()
        for layer, pool in arena.pools.items():
            pool.fit(arena.capacity())
            reopen_block(sources[layer].blocks, block.tier, block.index, pool.blocks, index)
    except BaseException:
        blocks.release(Tier.HOT, index)
        raise
    return StoredBlock(block.start, Tier.HOT, index)
