"""Which blocks are worth least: the ones that leave when there is no room, or that pruning drops.

A block can leave when every row that holds it has filled it and left it behind its recent tokens.
The sinks lie in a page of their own and never leave.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from omlx_cache.config import CacheConfig
from omlx_cache.sequences import Geometry, Sequence, StoredBlock

SEED = 0
"""Added to the seeds of ``random``'s draws; a benchmark takes several, far apart."""


@dataclass
class Candidate:
    """A block that can leave, and the rows that hold it."""

    block: StoredBlock
    rows: list[Sequence]

    @property
    def mass(self) -> float:
        """The attention that it has got lately, from the row that looks at it most."""
        return max(row.mass.get(self.block.start, 0.0) for row in self.rows)


@dataclass(frozen=True)
class EvictionPolicy:
    """What the configuration says about blocks that leave.

    Attributes:
        ranking: which block is worth least: the ``oldest``; with ``topk`` the one that gets the
            least attention; with ``random`` any, each with the same chance.
        drops: whether blocks may be dropped where there is no room for them.
        prune_ratio: share of the blocks behind the recent tokens that is dropped in any case.
        recent_tokens: newest tokens whose blocks stay.
    """

    ranking: str
    drops: bool
    prune_ratio: float
    recent_tokens: int

    @classmethod
    def from_config(cls, config: CacheConfig) -> EvictionPolicy:
        """Read ``pruning``, ``prune_ratio`` and ``recent_tokens``."""
        ranking = config.pruning or "oldest"
        return cls(ranking, config.pruning is not None, config.prune_ratio, config.recent_tokens)

    @property
    def needs_mass(self) -> bool:
        """Whether the ranking asks how much attention a block gets."""
        return self.ranking == "topk"

    def num_old(self, geometry: Geometry, length: int) -> int:
        """Return how many full blocks of a row lie behind its recent tokens and in its window."""
        old = geometry.num_full(length - self.recent_tokens)
        return max(0, old - geometry.num_released(length))

    def is_old(self, geometry: Geometry, block: StoredBlock, length: int) -> bool:
        """Whether a block of a row may leave."""
        return block.start + geometry.block_size <= length - self.recent_tokens

    def least_valuable(self, candidates: Iterable[Candidate], count: int) -> list[Candidate]:
        """Return the ``count`` candidates to let go first, in that order."""
        return sorted(candidates, key=self._value)[: max(count, 0)]

    def _value(self, candidate: Candidate) -> tuple[float, int]:
        start = candidate.block.start
        if self.ranking == "topk":
            return candidate.mass, start
        if self.ranking == "random":
            # One draw a position, for good: what stays is a uniform sample of the whole history.
            return random.Random(SEED + start).random(), start
        return 0.0, start
