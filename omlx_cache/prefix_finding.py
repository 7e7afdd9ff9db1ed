"""Find the longest known beginning of a text, and make rows that begin with it: no disk.

A row needs of a beginning what its window sees, on the device or in CPU memory. A block that it is
going to write to, the last one where that isn't full, must be on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import numpy as np

from omlx_cache.layer_group import LayerGroup
from omlx_cache.prefix_places import come_back
from omlx_cache.prefix_tree import PrefixNode, PrefixTree
from omlx_cache.sequences import Sequence as Row
from omlx_cache.sequences import StoredBlock
from omlx_kernels.layout import Tier


@dataclass(frozen=True)
class Prefix:
    """The longest known beginning of a text: ``length`` tokens, and the nodes that hold them."""

    length: int
    nodes: tuple[PrefixNode, ...]


class PrefixFinder:
    """Finds beginnings of texts.

    Args:
        tree: the known texts.
        is_hot: whether the block of a node can be cut; see `PrefixTree.match`.
    """

    def __init__(self, tree: PrefixTree, is_hot: Callable[[PrefixNode], bool]) -> None:
        self._tree, self._is_hot = tree, is_hot

    def come_back(
        self, texts: Sequence[np.ndarray], groups: Sequence[LayerGroup], lengths: Sequence[int]
    ) -> None:
        """Bring what is known of prompts back to the device, as far as there is room."""
        paths = [self._tree.match(text, self._is_hot) for text in texts]
        for group in groups:
            geometry, wanted, reserve = group.geometry, [], 0
            for path, length in zip(paths, lengths, strict=True):
                known = path[-1][0].start + path[-1][1] if path else 0
                first = geometry.first_live(known)
                wanted += [node for node, _ in path if node.start >= first]
                reserve += geometry.num_blocks(length) - geometry.num_full(known)
            come_back(group.arena, wanted, reserve)

    def find(self, ids: np.ndarray, groups: Sequence[LayerGroup]) -> Prefix:
        """Find the longest beginning of a text whose blocks are all there.

        Args:
            ids: [num_tokens] int64.
            groups: the layer groups that will attend to it; each needs what its window sees.
        """
        path = self._tree.match(ids, self._is_hot)
        while path:
            length = path[-1][0].start + path[-1][1]
            nodes = tuple(node for node, _ in path)
            if all(row_behind(group, nodes, length) is not None for group in groups):
                return Prefix(length, nodes)
            path.pop()
        return Prefix(0, ())


def take(prefixes: Sequence[Prefix], groups: Sequence[LayerGroup]) -> None:
    """Make rows of the groups that begin with ``prefixes``, as holders of their blocks."""
    for group in groups:
        found = [row_behind(group, prefix.nodes, prefix.length) for prefix in prefixes]
        rows = [row for row in found if row is not None]
        group.arena.share(rows)
        group.rows = rows
        for prefix, row in zip(prefixes, rows, strict=True):
            starts = {block.start for block in (*row.blocks, *row.offloaded)}
            touch(group, prefix.nodes, starts)


def touch(group: LayerGroup, nodes: Sequence[PrefixNode], starts: Container[int]) -> None:
    """Make the blocks of some nodes the most recently used, the first of a text last."""
    for node in reversed(nodes):
        if node.start in starts:
            group.arena.known_blocks.touch(node)


def row_behind(group: LayerGroup, nodes: Sequence[PrefixNode], length: int) -> Row | None:
    """Return the row that would continue behind ``length`` tokens; None: a block has left."""
    sinks = group.geometry.sink_tokens
    row = Row(length)
    for node in nodes:
        if node.start < sinks:
            page = group.arena.known_pages.get(node)
            if page is None:
                return None
            row.sink_page = page.index
        elif not group.geometry.is_released(StoredBlock(node.start, Tier.HOT, 0), length):
            kept = group.arena.known_blocks.find(node)
            if kept is None:
                return None
            if not kept.is_away:
                row.blocks.append(kept.block)
            elif node.start + group.geometry.block_size <= length:
                row.offloaded.append(kept.block)
            else:  # it is to be written to, which the CPU's memory isn't for
                return None
    return row if not (sinks and length) or row.sink_page is not None else None
