"""The rows of one cache: what each holds in every layer group, and in which columns of the batch.

Hugging Face's ``get_seq_length()`` counts *columns* of the padded batch; the kernels' ``seq_lens``
count a row's real tokens. This file is where the two meet: whatever is done to rows is done to the
layer groups and to the `Columns` alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from omlx_cache.columns import Columns
from omlx_cache.layer_group import LayerGroup
from omlx_cache.masks import row_indices
from omlx_cache.paged_layer import PagedLayer
from omlx_cache.sequences import Sequence as Row


class CacheRows:
    """The rows of one cache between its steps.

    Methods that change what the rows hold are called under the cache's lock; see `CacheSteps.hold`.

    Args:
        groups: the cache's layer groups.
        layers: the cache's layers, in the model's order.

    Attributes:
        groups: as given.
        columns: which columns of each row are real tokens, and their ids.
    """

    def __init__(self, groups: Sequence[LayerGroup], layers: Sequence[PagedLayer]) -> None:
        self.groups, self._layers = groups, layers
        self.columns = Columns()

    @property
    def num_rows(self) -> int:
        """Rows of the batch; 0 before the first step."""
        return len(self.groups[0].rows)

    @property
    def num_columns(self) -> int:
        """Columns so far, padding included."""
        return self._layers[0].num_columns

    @num_columns.setter
    def num_columns(self, count: int) -> None:
        for layer in self._layers:
            layer.num_columns = count

    def ensure(self, batch_size: int) -> None:
        """Make empty rows where there are none yet."""
        for group in self.groups:
            if not group.rows:
                group.rows = [Row() for _ in range(batch_size)]

    def clear(self) -> None:
        """Release every row, and begin again at column 0."""
        for group in self.groups:
            group.clear()
        self.restore(0, None)

    def restore(self, columns: int, valid: np.ndarray | None) -> None:
        """Say what the columns of rows that were put back are; see `Columns.valid`."""
        self.columns = Columns()
        self.columns.valid = valid
        self.num_columns = columns

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last columns of every row, or raise before anything is changed.

        Args:
            tokens_to_remove: how many, as zero or a negative number.
        """
        count, columns = -int(tokens_to_remove), self.num_columns
        if not 0 <= count <= columns:
            raise ValueError(
                f"PagedCache.crop: tokens_to_remove must be between -{columns} and 0, got "
                f"{tokens_to_remove}"
            )
        kept, valid = columns - count, self.columns.valid
        self._crop([count] * self.num_rows if valid is None else valid[:, kept:].sum(1).tolist())
        self.columns.crop(kept)
        self.num_columns = kept

    def hide(self, hidden: np.ndarray) -> None:
        """Drop the newest tokens of some rows, or raise before anything is changed.

        Args:
            hidden: [rows, columns] bool, their columns, which are padding from now on.
        """
        self._crop(hidden.sum(1).tolist())
        self.columns.hide(hidden)

    def _crop(self, removed: list[int]) -> None:
        """Remove the last tokens of each row, or raise before anything is changed."""
        for group in self.groups:
            group.check_crop(removed)
        for group in self.groups:
            group.crop(removed)

    def select(self, indices: torch.Tensor) -> None:
        """Keep the rows ``indices``; a row may come several times, and then shares its blocks."""
        if not self.num_rows:
            return
        chosen = row_indices(indices, self.num_rows)
        if not chosen:
            self.clear()
            return
        for group in self.groups:
            group.select(chosen)
        self.columns.select(chosen)

    def repeat(self, repeats: int) -> None:
        """Repeat each row ``repeats`` times, next to each other; the copies share blocks."""
        self.select(torch.arange(self.num_rows).repeat_interleave(repeats))

    def end(self, rows: list[int]) -> None:
        """Free what some rows hold: they have ended, and whatever comes for them is padding."""
        for group in self.groups:
            group.empty(rows)
        self.columns.end(rows, self.num_rows, self.num_columns)
