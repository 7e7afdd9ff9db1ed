"""How much attention each block of a row has got lately.

In every step the newest query of a row spreads a mass of 1 over the blocks (in each head and
layer); the mean over heads and layers is added to what the row's blocks have, which halves every
`HALF_LIFE` tokens. The kernels know the mass of a block from its log-sum-exp: it costs no second
look at the keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from omlx_cache.sequences import Sequence as Row

HALF_LIFE = 256
"""Tokens after which a mass counts half."""


class StepMass:
    """The masses of one step, summed over the layers on the devices where they were computed."""

    def __init__(self) -> None:
        self._sums: dict[torch.device, torch.Tensor] = {}
        self._layers = 0

    def add(self, mass: torch.Tensor) -> None:
        """Add a layer's, [num_splits, num_q_heads]: a share for each block that a row lists."""
        mean = mass.mean(1)
        known = self._sums.get(mass.device)
        self._sums[mass.device] = mean if known is None else known.add_(mean)
        self._layers += 1

    def collect(self) -> np.ndarray | None:
        """Return the mean over the layers, [num_splits]; None where no layer has run.

        Reads back from the devices.
        """
        if not self._layers:
            return None
        parts = [part.cpu().numpy() for part in self._sums.values()]
        return np.sum(parts, axis=0) / self._layers


def add_step(
    rows: Sequence[Row], new_tokens: Sequence[int], masses: Iterable[tuple[int, int, float]]
) -> None:
    """Add the masses of a step to those of the rows' blocks.

    Args:
        rows: after the step.
        new_tokens: of each row.
        masses: (row, start of a block, mass in the step).
    """
    for row, count in zip(rows, new_tokens, strict=True):
        if count:
            fading = 0.5 ** (count / HALF_LIFE)
            row.mass = {start: mass * fading for start, mass in row.mass.items()}
    for index, start, mass in masses:
        row = rows[index]
        row.mass[start] = row.mass.get(start, 0.0) + float(mass)
