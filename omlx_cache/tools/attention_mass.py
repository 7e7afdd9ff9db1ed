"""Collect the attention that each block of a sequence gets, and say how concentrated it is.

The *mass* of a block is the share of a query's attention that falls on the block's tokens: the
softmax weights added up over them. It is averaged over a layer's heads and over the observed
queries. A layer's masses add up to 1, less what a learned sink takes.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch

from omlx_cache.observer import SINKS, blocks_of_splits
from omlx_kernels.metadata import AttentionMetadata


@dataclass(frozen=True)
class MassTable:
    """Mean mass by layer and block.

    Attributes:
        starts: position of each block's first token, ascending; `SINKS` for the sink page, first.
        tokens: [blocks] tokens that each holds.
        mass: [layers, blocks]; 0 where a layer's query doesn't see the block.
        cached: [layers, blocks] bool, what a layer still held at the last observed step.
    """

    starts: list[int]
    tokens: np.ndarray
    mass: np.ndarray
    cached: np.ndarray

    @property
    def length(self) -> int:
        """Tokens of the sequence at the last observed step."""
        return self.starts[-1] + int(self.tokens[-1]) if self.starts[-1] >= 0 else self.tokens[-1]

    def kept_by_sinks(self) -> np.ndarray:
        """Return the mass of the sink page, [layers]; 0 without one."""
        return self.mass[:, np.asarray(self.starts) == SINKS].sum(1)

    def kept_by_newest(self, tokens: int) -> np.ndarray:
        """Return the mass of sinks and blocks wholly within the newest ``tokens``, [layers].

        What a window of ``tokens`` keeps is at least this: it also cuts through a block.
        """
        starts = np.asarray(self.starts)
        inside = (starts == SINKS) | (starts >= self.length - tokens)
        return self.mass[:, inside].sum(1)

    def kept_by_top(self, count: int) -> np.ndarray:
        """Return the mass of the sinks and each layer's ``count`` heaviest blocks, [layers]."""
        blocks = self.mass[:, np.asarray(self.starts) != SINKS]
        return self.kept_by_sinks() + np.sort(blocks, axis=1)[:, ::-1][:, :count].sum(1)

    def sparsity(self, mass: float) -> np.ndarray:
        """Return the share of the cached tokens that get less than ``mass`` together, [layers].

        Whole blocks (and the sink page) are counted, the lightest for their size first.
        """
        return np.array([self._sparsity(layer, mass) for layer in range(len(self.mass))])

    def _sparsity(self, layer: int, mass: float) -> float:
        cached = self.cached[layer]
        tokens, masses = self.tokens[cached], self.mass[layer, cached]
        order = np.argsort(masses / tokens, kind="stable")
        left_out = np.cumsum(masses[order]) < mass * masses.sum()
        return float(tokens[order][left_out].sum() / tokens.sum())


class MassRecorder:
    """An `Observer` of one sequence that adds up the masses of its blocks."""

    def __init__(self) -> None:
        self._sums: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        self._steps: dict[int, int] = defaultdict(int)
        self._last: dict[int, set[int]] = {}
        self._length = 0

    def __call__(self, layer: int, meta: AttentionMetadata, mass: torch.Tensor) -> None:
        """Add one layer's masses of one step."""
        rows, starts = blocks_of_splits(meta)
        for start, value in zip(starts, mass[rows].mean(1).tolist(), strict=True):
            self._sums[layer][start] += value
        self._steps[layer] += 1
        self._last[layer] = set(starts)
        self._length = int(meta.seq_lens[0])

    def table(self, block_size: int, sink_tokens: int) -> MassTable:
        """Return the means over the observed steps.

        Raises:
            ValueError: when nothing was observed.
        """
        if not self._steps:
            raise ValueError("MassRecorder.table: no step was observed; call cache.observe first")
        starts = sorted({start for sums in self._sums.values() for start in sums})
        layers = sorted(self._sums)
        return MassTable(
            starts,
            np.array(
                [
                    min(sink_tokens, self._length)
                    if start == SINKS
                    else min(block_size, self._length - start)
                    for start in starts
                ]
            ),
            np.array([[self._sums[i][s] / self._steps[i] for s in starts] for i in layers]),
            np.array([[s in self._last[i] for s in starts] for i in layers]),
        )
