"""What columns of padding see from which a next token may be taken.

A prompt that is padded on the right ends in a column without a token, and ``generate`` takes the
row's first new token from it all the same; assisted decoding does so while drafted tokens stand
behind it. Such a column stores nothing, and no other sees it, but it looks at the tokens before
it, as the masks of transformers have it::

    mask     1 1 1 0 0        the query of the last column sees the three tokens,
             1 1 1 1 1        as if it stood in the column of the third

    mask     1 1 1 0 0 1 1    so does that of the column before the drafted tokens

What other columns of padding see is 0.
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
class AskedPadding:
    """The columns of padding in a step that look at the tokens before them.

    Attributes:
        rows, columns: where each is in the batch.
        lengths: tokens that each sees.
        plans: what the step does to its row.
        recalled: its row's blocks in CPU memory that it attends to.
        split_size: as in `StepPlan`.
    """

    rows: list[int]
    columns: list[int]
    lengths: list[int]
    plans: list[RowPlan]
    recalled: list[list[StoredBlock]]
    split_size: SplitSize
    _places: dict[torch.device, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    _metas: dict[tuple[torch.device, bool], AttentionMetadata] = field(default_factory=dict)

    @classmethod
    def of_step(
        cls,
        plans: Sequence[RowPlan],
        valid: np.ndarray | None,
        recall: Callable[[StoredSequence], list[StoredBlock]],
        split_size: SplitSize,
    ) -> AskedPadding | None:
        """Find the columns; None where there are none.

        Args:
            plans: of all rows.
            valid: [rows, columns] bool, which columns of the step are real tokens; None: all.
            recall, split_size: as in `StepPlan`.
        """
        if valid is None or not valid.shape[1]:
            return None
        stored = np.array([plan.sequence.length for plan in plans])
        seen = stored[:, None] + valid.cumsum(1)
        is_before_a_token = np.ones_like(valid)
        is_before_a_token[:, :-1] = valid[:, 1:]
        rows, columns = (~valid & is_before_a_token & (seen > 0)).nonzero()
        if not rows.size:
            return None
        chosen = [plans[row] for row in rows]
        recalled = [p.recalled if p.new_tokens else recall(p.sequence) for p in chosen]
        lengths = seen[rows, columns].tolist()
        return cls(rows.tolist(), columns.tolist(), lengths, chosen, recalled, split_size)

    def places(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Return ``rows`` and ``columns``, [*] int64, sent to ``device`` on first use."""
        if device not in self._places:
            both = torch.tensor([self.rows, self.columns], device=device)
            self._places[device] = both[0], both[1]
        return self._places[device]

    def metas(self, device: torch.device) -> tuple[AttentionMetadata, AttentionMetadata | None]:
        """Return the tables of the rows' blocks on ``device``, and of those in CPU memory."""
        here = self._meta(device, is_host=False)
        return here, self._meta(CPU, is_host=True) if any(self.recalled) else None

    def _meta(self, device: torch.device, *, is_host: bool) -> AttentionMetadata:
        if (device, is_host) not in self._metas:
            listed = self.recalled if is_host else [plan.blocks for plan in self.plans]
            blocks = [
                [block for block in row if block.start < length]
                for row, length in zip(listed, self.lengths, strict=True)
            ]
            arrays = tables_of_rows(
                blocks,
                [None if is_host else plan.sink_page for plan in self.plans],
                self.lengths,
                [1] * len(self.plans),
                self.split_size(blocks_of_rows(blocks), device),
            )
            meta = AttentionMetadata(**send(arrays, device), max_query_len=1)
            self._metas[device, is_host] = meta
        return self._metas[device, is_host]
