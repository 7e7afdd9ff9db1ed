"""What a row sees whose last column in a step is padding.

A prompt that is padded on the right ends in a column without a token, and ``generate`` takes the
row's first new token from it all the same. The column stores nothing, and other columns don't see
it, but it looks at the tokens before it, as the masks of transformers have it::

    mask     1 1 1 0 0        the query of the last column sees the three tokens,
             1 1 1 1 1        as if it stood in the column of the third

Columns of padding before the last one are nobody's business: what they see is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from omlx_cache.host_tier import CPU
from omlx_cache.row_plan import RowPlan
from omlx_cache.sequences import Sequence as StoredSequence
from omlx_cache.sequences import StoredBlock
from omlx_cache.step_tables import SplitSize
from omlx_cache.tables import blocks_of_rows, send, tables_of_rows
from omlx_kernels.metadata import AttentionMetadata


@dataclass
class LastColumns:
    """The rows of a step whose last column is padding behind tokens.

    Attributes:
        rows: their numbers in the batch.
        plans: what the step does to them.
        recalled: their blocks in CPU memory that they attend to.
        split_size: as in `StepPlan`.
    """

    rows: list[int]
    plans: list[RowPlan]
    recalled: list[list[StoredBlock]]
    split_size: SplitSize
    _indices: dict[torch.device, torch.Tensor] = field(default_factory=dict)
    _metas: dict[tuple[torch.device, bool], AttentionMetadata] = field(default_factory=dict)

    @classmethod
    def of_step(
        cls,
        plans: Sequence[RowPlan],
        valid: np.ndarray | None,
        recall: Callable[[StoredSequence], list[StoredBlock]],
        split_size: SplitSize,
    ) -> LastColumns | None:
        """Find the rows; None where there are none.

        Args:
            plans: of all rows.
            valid: [rows, columns] bool, which columns of the step are real tokens; None: all.
            recall, split_size: as in `StepPlan`.
        """
        if valid is None or not valid.shape[1] or valid[:, -1].all():
            return None
        rows = [i for i in np.flatnonzero(~valid[:, -1]).tolist() if plans[i].length]
        if not rows:
            return None
        chosen = [plans[i] for i in rows]
        recalled = [p.recalled if p.new_tokens else recall(p.sequence) for p in chosen]
        return cls(rows, chosen, recalled, split_size)

    def index(self, device: torch.device) -> torch.Tensor:
        """Return the rows' numbers, [*] int64, sent to ``device`` on first use."""
        if device not in self._indices:
            self._indices[device] = torch.tensor(self.rows, device=device)
        return self._indices[device]

    def metas(self, device: torch.device) -> tuple[AttentionMetadata, AttentionMetadata | None]:
        """Return the tables of the rows' blocks on ``device``, and of those in CPU memory."""
        here = self._meta(device, is_host=False)
        return here, self._meta(CPU, is_host=True) if any(self.recalled) else None

    def _meta(self, device: torch.device, *, is_host: bool) -> AttentionMetadata:
        if (device, is_host) not in self._metas:
            blocks = self.recalled if is_host else [plan.blocks for plan in self.plans]
            arrays = tables_of_rows(
                blocks,
                [None if is_host else plan.sink_page for plan in self.plans],
                [plan.length for plan in self.plans],
                [1] * len(self.plans),
                self.split_size(blocks_of_rows(blocks), device),
            )
            meta = AttentionMetadata(**send(arrays, device), max_query_len=1)
            self._metas[device, is_host] = meta
        return self._metas[device, is_host]
