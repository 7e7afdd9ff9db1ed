"""What a sequence has stored, and the arithmetic of its blocks: pure Python, no tensors.

Positions count a sequence's real tokens from 0. With ``S = sink_tokens`` and ``B = block_size``::

    position   0 .. S-1    S .. S+B-1    S+B .. S+2B-1    ...
    stored in  sink page   block 0       block 1          ...
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from omlx_kernels.layout import Tier


@dataclass(frozen=True)
class StoredBlock:
    """Where the ``block_size`` tokens from position ``start`` on are: physical block of a tier."""

    start: int
    tier: Tier
    index: int


@dataclass
class Sequence:
    """One row of the cache.

    Attributes:
        length: tokens stored so far, sinks included, padding excluded.
        sink_page: physical sink page; None before the first token, or without sinks.
        blocks: live blocks in the order of their positions.
        offloaded: blocks in CPU memory, in the order of their positions.
        dropped: starts of the blocks that pruning has dropped, inside of the window.
        whole: tokens, from the first on, whose keys and values were computed with all of their
            window at hand; None is all. Those behind are right for this row alone.
        mass: by the start of a block, the attention that it has got lately; see
            `omlx_cache.block_mass`. Empty where nobody asks.
        promise: by the start of an offloaded block, what the last step expected of it; see
            `omlx_cache.recall`.
    """

    length: int = 0
    sink_page: int | None = None
    blocks: list[StoredBlock] = field(default_factory=list)
    offloaded: list[StoredBlock] = field(default_factory=list)
    dropped: set[int] = field(default_factory=set)
    whole: int | None = None
    mass: dict[int, float] = field(default_factory=dict)
    promise: dict[int, float] = field(default_factory=dict)

    def copy(self) -> Sequence:
        """Return a row that holds the same."""
        return replace(
            self,
            blocks=list(self.blocks),
            offloaded=list(self.offloaded),
            dropped=set(self.dropped),
            mass=dict(self.mass),
            promise=dict(self.promise),
        )

    def lose(self, start: int) -> None:
        """Note that the block that begins at ``start`` is dropped: later tokens don't see it."""
        self.dropped.add(start)
        self.mass.pop(start, None)
        self.see_less()

    def see_less(self) -> None:
        """Note that tokens behind the present length are computed without some of their window."""
        if self.whole is None:
            self.whole = self.length

    def forget_before(self, position: int) -> None:
        """Forget what is known of the absent blocks that begin before ``position``."""
        self.dropped = {start for start in self.dropped if start >= position}
        self.mass = {start: mass for start, mass in self.mass.items() if start >= position}

    def forget_from(self, position: int) -> None:
        """Forget what is known of the absent blocks that begin at ``position`` or later."""
        self.dropped = {start for start in self.dropped if start < position}
        if self.whole is not None and self.whole >= position:
            self.whole = position if self.dropped else None
        self.mass = {start: mass for start, mass in self.mass.items() if start < position}

    @property
    def num_absent(self) -> int:
        """Blocks that the row has, but not on the device."""
        return len(self.offloaded) + len(self.dropped)


@dataclass(frozen=True)
class Geometry:
    """How positions map to blocks, and when a block leaves.

    Args:
        block_size: tokens a block holds.
        sink_tokens: tokens that live in the sink page.
        window_size: keys that a query sees, itself included; None is all.
    """

    block_size: int
    sink_tokens: int
    window_size: int | None

    def num_blocks(self, length: int) -> int:
        """Blocks that ``length`` tokens have filled or begun."""
        return -(-max(0, length - self.sink_tokens) // self.block_size)

    def new_starts(self, length: int, new_tokens: int) -> range:
        """Starts of the blocks that ``new_tokens`` more tokens begin."""
        first, last = self.num_blocks(length), self.num_blocks(length + new_tokens)
        origin, size = self.sink_tokens, self.block_size
        return range(origin + first * size, origin + last * size, size)

    def num_full(self, length: int) -> int:
        """Blocks that ``length`` tokens have filled."""
        return max(0, length - self.sink_tokens) // self.block_size

    def num_released(self, length: int) -> int:
        """Blocks, from the first on, that no query at position ``length`` or later can see.

        A query at ``p`` sees positions ``> p - window_size``, so the block that ends at position
        ``e`` is out of sight when ``e <= length - window_size``.
        """
        if self.window_size is None:
            return 0
        return max(0, (length - self.window_size - self.sink_tokens + 1) // self.block_size)

    def first_live(self, length: int) -> int:
        """Return the start of the first block that a later query can see."""
        return self.sink_tokens + self.num_released(length) * self.block_size

    def is_released(self, block: StoredBlock, length: int) -> bool:
        """Whether no query at position ``length`` or later can see ``block``."""
        return block.start < self.first_live(length)
