"""Where the blocks of a text lie when a call begins with them: as many as fit come to the device.

What the prefix store keeps in CPU memory is attended to there, which is slower than on a GPU. So
the blocks of the texts that a call begins with come back to the device, the newest first: in room
that is free, or that blocks of other texts have, which leave for them. Room for the rest of the
prompt is left. A block that the call is going to write to has to come back; `PrefixFinder` goes
without it where it can't.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from omlx_cache.block_arena import BlockArena
from omlx_cache.prefix_tree import PrefixNode
from omlx_cache.tier_moves import bring_back
from omlx_kernels.errors import OutOfBlocksError

logger = logging.getLogger(__name__)


def come_back(arena: BlockArena, nodes: Iterable[PrefixNode], reserve: int) -> None:
    """Bring blocks of some texts to the device, as far as there is room for them.

    Args:
        arena: holds them.
        nodes: of the texts; afterwards the most recently used.
        reserve: blocks to leave free.
    """
    if arena.host is None:
        return
    kept, wanted = arena.known_blocks, sorted(set(nodes), key=lambda node: node.start)
    for node in wanted:
        kept.touch(node)
    found = [kept.find(node) for node in reversed(wanted)]
    away = [each.block for each in found if each is not None and each.is_away]
    free, idle = arena.blocks.num_free, kept.idle(is_away=False)
    if free is not None:
        others = free + len(set(idle).difference(wanted))
        away = away[: max(others - reserve, min(1, free + len(idle)))]  # the last one at least
    try:
        bring_back(arena, away)
    except (OutOfBlocksError, MemoryError, torch.OutOfMemoryError):
        logger.warning("no room to bring blocks back to the device; they stay in CPU memory")
