"""How much attention each block of a row has got lately.

In every step each of the newest `QUERIES` queries of a row spreads a mass of 1 over the blocks, in
each head and layer. The most that a block gets from any of them, in any head of any layer, is added
to what it has, which halves every `HALF_LIFE` tokens. The most and not the mean: few heads look for
what a question asks for, and they look at one place. A prompt often ends with its question, and
its last token is one of the chat template's: hence several queries (Li et al., "SnapKV", 2024).

For a decoding step the kernels know the mass of a block from its log-sum-exp: it costs no second
look at the keys. The step of a prompt asks again for its newest queries.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from omlx_cache.look import Look, Tables
from omlx_cache.sequences import Sequence as Row

HALF_LIFE = 256
"""Tokens after which a mass counts half."""

QUERIES = 16
"""Newest tokens of a step of each row whose attention counts."""


class StepMass:
    """The largest masses of one step so far, on the devices where they were computed."""

    def __init__(self) -> None:
        self._largest: dict[torch.device, torch.Tensor] = {}
        self._newest: dict[torch.device, tuple[Tables, torch.Tensor]] = {}

    def add_prompt(
        self, look: Look, q: torch.Tensor, metas: Tables, sink_q: torch.Tensor | None
    ) -> None:
        """Add the masses of a layer in the step of a prompt.

        Args:
            look: of the layer.
            q: [num_queries, num_q_heads, head_dim].
            metas: tables that list a row for each sequence; the same in all layers of a device.
            sink_q: as `Look` takes it.
        """
        if q.device not in self._newest:
            here, rows = metas[0].newest_queries(QUERIES)
            there = None if metas[1] is None else metas[1].newest_queries(QUERIES)[0]
            self._newest[q.device] = (here, there), rows
        newest, rows = self._newest[q.device]
        newest_sink_q = None if sink_q is None else sink_q[rows]
        _, mass = look(q[rows], newest, wants_mass=True, sink_q=newest_sink_q)
        if mass is not None:
            parts = mass.split([0 if meta is None else len(meta.splits) for meta in newest])
            of_queries = [part.unflatten(0, (QUERIES, -1)).amax(0) for part in parts if len(part)]
            self.add(torch.cat(of_queries))

    def add(self, mass: torch.Tensor) -> None:
        """Add a layer's, [num_splits, num_q_heads]: a share for each block that a row lists."""
        largest = mass.amax(1)
        known = self._largest.get(mass.device)
        self._largest[mass.device] = largest if known is None else known.maximum(largest)

    def collect(self) -> np.ndarray | None:
        """Return the largest of all layers, [num_splits]; None where no layer has run.

        Reads back from the devices.
        """
        if not self._largest:
            return None
        return np.max([largest.cpu().numpy() for largest in self._largest.values()], axis=0)


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
