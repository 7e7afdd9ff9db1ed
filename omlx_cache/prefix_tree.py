"""Which texts are known, cut where their blocks are cut: pure bookkeeping over token ids.

A node stands for the tokens of one block after those of its parents, so it says by its place which
text its keys and values were computed in. Children are found by a hash of their tokens and equal
only if every token is: what follows another text is never found. For ``S = sink_tokens`` and
``B = block_size``::

    root -- S tokens (sink page) -- B tokens -- B tokens -- 17 tokens (a last, partial block)
                                 \\- B tokens -- ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256

import numpy as np

ROOT_DIGEST = sha256(b"omlx_cache text 1").digest()


def next_digest(digest: bytes, tokens: np.ndarray) -> bytes:
    """Return the digest of the block with ``tokens``, [*] int64, behind the one with ``digest``."""
    return sha256(digest + tokens.tobytes()).digest()


class PrefixNode:
    """One block of some text.

    Attributes:
        parent: the block before; None for the root.
        start: position of its first token.
        tokens: its ids, [1 .. block_size] int64.
        children: the blocks that may follow, by the bytes of their tokens.
        digest: a hash of all tokens up to its last, block by block: what names it on disk.
    """

    __slots__ = ("children", "digest", "parent", "start", "tokens")

    def __init__(self, parent: PrefixNode | None, start: int, tokens: np.ndarray) -> None:
        self.parent, self.start, self.tokens = parent, start, tokens
        self.children: dict[bytes, PrefixNode] = {}
        self.digest: bytes = ROOT_DIGEST if parent is None else next_digest(parent.digest, tokens)

    @property
    def end(self) -> int:
        """One more than the position of its last token."""
        return self.start + len(self.tokens)


class PrefixTree:
    """The nodes of all known texts.

    Args:
        block_size: tokens of a block.
        sink_tokens: tokens before the first block; a text is known from there on.

    Example:
        >>> tree = PrefixTree(block_size=4, sink_tokens=0)
        >>> ids = np.arange(6)
        >>> first = tree.add(tree.root, ids[:4])
        >>> [(node.start, used) for node, used in tree.match(ids, lambda node: True)]
        [(0, 4)]
        >>> [(node.start, used) for node, used in tree.match(ids[:3], lambda node: True)]
        [(0, 3)]
    """

    def __init__(self, block_size: int, sink_tokens: int) -> None:
        self._block_size, self._sink_tokens = block_size, sink_tokens
        self.root = PrefixNode(None, 0, np.empty(0, np.int64))

    def chunks(self, ids: np.ndarray) -> Iterator[np.ndarray]:
        """Cut a text, [num_tokens] int64, as its blocks are cut; the last chunk may be shorter."""
        first, size = self._sink_tokens, self._block_size
        if first:
            yield ids[:first]
        for start in range(first, len(ids), size):
            yield ids[start : start + size]

    def path(self, chunks: Iterable[np.ndarray]) -> list[PrefixNode]:
        """Return the nodes of a text's chunks, as far as there are any."""
        found = [self.root]
        for tokens in chunks:
            child = found[-1].children.get(tokens.tobytes())
            if child is None:
                break
            found.append(child)
        return found[1:]

    def match(
        self, ids: np.ndarray, can_cut: Callable[[PrefixNode], bool]
    ) -> list[tuple[PrefixNode, int]]:
        """Return the nodes along a text, each with how many of its tokens the text shares.

        All but the last are shared whole. The last may be shared in part where ``can_cut`` says
        that the first tokens of its block can be had alone; the sinks never are.
        """
        node, path = self.root, []
        for chunk in self.chunks(ids):
            child = node.children.get(chunk.tobytes())
            if child is None:
                if node.parent is not None or not self._sink_tokens:
                    path += self._longest_part(node, chunk, can_cut)
                break
            path.append((child, len(chunk)))
            node = child
        return path

    def _longest_part(
        self, node: PrefixNode, chunk: np.ndarray, can_cut: Callable[[PrefixNode], bool]
    ) -> list[tuple[PrefixNode, int]]:
        shared = [(_shared(child.tokens, chunk), child) for child in node.children.values()]
        usable = [
            (child, count)
            for count, child in shared
            if count and (count == len(child.tokens) or can_cut(child))
        ]
        return [max(usable, key=lambda pair: pair[1])] if usable else []

    def add(self, parent: PrefixNode, tokens: np.ndarray) -> PrefixNode:
        """Return the child of ``parent`` that holds exactly ``tokens``, made where there is none.

        Shorter blocks that it continues are left to the caller, see `continued`.
        """
        key = tokens.tobytes()
        if key not in parent.children:
            parent.children[key] = PrefixNode(parent, parent.end, tokens.copy())
        return parent.children[key]

    def continued(self, node: PrefixNode) -> list[PrefixNode]:
        """Return the partial blocks beside ``node`` whose tokens it begins with."""
        beside = {} if node.parent is None else node.parent.children
        return [
            other
            for other in beside.values()
            if other is not node
            and len(other.tokens) < len(node.tokens)
            and _shared(other.tokens, node.tokens) == len(other.tokens)
        ]

    def continues(self, parent: PrefixNode, tokens: np.ndarray) -> list[PrefixNode]:
        """Return the children of ``parent`` that begin with ``tokens`` and go on."""
        return [
            child
            for child in parent.children.values()
            if len(child.tokens) > len(tokens) and _shared(child.tokens, tokens) == len(tokens)
        ]

    def remove(self, node: PrefixNode) -> None:
        """Forget a node that has no children."""
        if node.parent is None:
            raise ValueError("PrefixTree.remove: node must not be the root")
        del node.parent.children[node.tokens.tobytes()]

    def __contains__(self, node: PrefixNode) -> bool:
        if node.parent is None:
            return node is self.root
        return node.parent.children.get(node.tokens.tobytes()) is node

    def __iter__(self) -> Iterator[PrefixNode]:
        """Every node but the root, parents first."""
        found = [self.root]
        for node in found:
            found += node.children.values()
        return iter(found[1:])


def _shared(a: np.ndarray, b: np.ndarray) -> int:
    """Return how many tokens two texts share from the first on."""
    size = min(len(a), len(b))
    differ = np.flatnonzero(a[:size] != b[:size])
    return int(differ[0]) if differ.size else size
