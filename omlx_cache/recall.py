"""Which blocks in CPU memory a step attends to.

With ``topk`` a step attends to those that the step before it expected the most of: after each layer
its newest query is held against the bounds of all blocks (`omlx_cache.key_bounds`), wherever they
lie. So the choice is known before the next step begins, and can be late by one step, never wrong
about what it attends to. How often a step would have chosen the same by its own query is the hit
rate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from omlx_cache.host_tier import HostTier
from omlx_cache.sequences import Sequence, StoredBlock


@dataclass
class Recall:
    """The choice of one layer group.

    Attributes:
        count: blocks that a row attends to in CPU memory; None is all.
        hits: blocks chosen that their own step would have chosen, over all steps.
        chosen: blocks chosen, over all steps.
    """

    count: int | None
    hits: int = 0
    chosen: int = 0

    def choose(self, row: Sequence) -> list[StoredBlock]:
        """Return the blocks in CPU memory that the next step of a row attends to."""
        if self.count is None or len(row.offloaded) <= self.count:
            return list(row.offloaded)
        best = sorted(row.offloaded, key=lambda block: self._promise(row, block))
        return sorted(best[-self.count :], key=lambda block: block.start)

    @staticmethod
    def _promise(row: Sequence, block: StoredBlock) -> tuple[float, int]:
        return row.promise.get(block.start, float("inf")), block.start

    def learn(self, row: Sequence, chosen: list[StoredBlock], promise: dict[int, float]) -> None:
        """Take notice of what a step expected of a row's blocks."""
        row.promise = promise
        if self.count is not None and len(row.offloaded) > self.count:
            now = {block.start for block in self.choose(row)}
            self.hits += sum(block.start in now for block in chosen)
            self.chosen += len(chosen)


class StepPromise:
    """What the queries of one step expect of the blocks in CPU memory, summed over the layers.

    Args:
        host: holds the blocks.
        rows: of the step, each with the row of ``q`` that holds its newest query.
    """

    def __init__(self, host: HostTier, rows: list[tuple[Sequence, int]]) -> None:
        self._host = host
        self._rows = [(row, at, list(row.offloaded)) for row, at in rows if row.offloaded]
        self._sums = [torch.zeros(len(blocks)) for _, _, blocks in self._rows]

    def add(self, layer: int, q: torch.Tensor, sm_scale: float) -> None:
        """Add what a layer expects: each head spreads 1 over the blocks, by their best scores.

        Args:
            q: [num_tokens, num_q_heads, head_dim].
            sm_scale: factor on the scores.
        """
        bounds = self._host.bounds
        if bounds is None:
            raise RuntimeError("StepPromise: recall needs the bounds of the keys in CPU memory")
        queries = q[[at for _, at, _ in self._rows]].float().cpu()
        for i, (_, _, blocks) in enumerate(self._rows):
            best = bounds.best_scores(layer, blocks, queries[i]) * sm_scale
            self._sums[i] += best.softmax(0).mean(1)

    def of_rows(self) -> list[tuple[Sequence, dict[int, float]]]:
        """Return each row with what is expected of its blocks, by their starts."""
        return [
            (row, {block.start: value for block, value in zip(blocks, sums.tolist(), strict=True)})
            for (row, _, blocks), sums in zip(self._rows, self._sums, strict=True)
        ]
