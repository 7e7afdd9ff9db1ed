"""What the columns of a padded batch hold: which are real tokens, of which row, and which ids.

Drawn for three rows, of which the second has ended and the third took its first tokens from the
prefix store::

    valid    . . x x x x x      ended: no    ahead: 0
             . . . . . . .             yes          0     a row that has ended is all padding
             . x x|x x x x             no           2     the next 2 tokens are stored already
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


class Columns:
    """The columns of one cache so far.

    Attributes:
        valid: [rows, columns] bool, which columns hold a token of their row; None while all do.
        ended: [rows] bool, rows that take no more tokens; None while there are none.
        ahead: [rows] int, how many of the next tokens are stored already; None while none are.
        ids: the ids of the columns, as [rows, *] int64 tensors one after the other; None where
            they aren't recorded, or not known.
    """

    def __init__(self) -> None:
        self.valid: np.ndarray | None = None
        self.ended: np.ndarray | None = None
        self.ahead: np.ndarray | None = None
        self.ids: list[torch.Tensor] | None = None
        self._is_fresh = False

    @property
    def is_fresh(self) -> bool:
        """Whether nothing was added yet to what `start` took from the store."""
        return self._is_fresh

    def start(self, valid: np.ndarray, lengths: np.ndarray, ids: torch.Tensor) -> None:
        """Begin with the columns of which every row has all tokens.

        Args:
            valid: [rows, columns] bool, which of these columns are real tokens.
            lengths: [rows] tokens that each row has, at least those in these columns.
            ids: [rows, columns].
        """
        ahead = lengths - valid.sum(1)
        self.valid = None if valid.all() else valid
        self.ahead = ahead if ahead.any() else None
        self.ids = [ids] if ids.shape[1] else []
        self._is_fresh = True

    def stored(self, rows: int, columns: int) -> np.ndarray:
        """Return ``valid`` as an array of its own."""
        return np.ones((rows, columns), bool) if self.valid is None else self.valid.copy()

    def to_compute(self, valid: np.ndarray) -> np.ndarray:
        """Return which of the next columns, [rows, *] bool, must be computed and stored."""
        if self.ended is not None:
            valid = valid & ~self.ended[:, None]
        if self.ahead is not None:
            valid = valid & (valid.cumsum(1) > self.ahead[:, None])
        return valid

    def add(self, valid: np.ndarray, past: int, ids: torch.Tensor | None) -> None:
        """Take the next columns, behind ``past`` others.

        Args:
            valid: [rows, *] bool, which are real tokens.
            past: columns so far.
            ids: [rows, *] token ids; None: not known, so that none are from now on.
        """
        self._is_fresh = False
        if self.ended is not None:
            valid = valid & ~self.ended[:, None]
        if self.ahead is not None:
            self.ahead = np.maximum(self.ahead - valid.sum(1), 0)
            self.ahead = self.ahead if self.ahead.any() else None
        if self.valid is None and not valid.all():
            self.valid = np.ones((valid.shape[0], past), bool)
        if self.valid is not None:
            self.valid = np.concatenate([self.valid, valid], 1)
        if self.ids is not None:
            self.ids = None if ids is None else [*self.ids, ids.detach().long()]

    def hidden_by(self, mask: np.ndarray) -> np.ndarray:
        """Return which stored tokens a later mask hides, [rows, columns] bool.

        Args:
            mask: [rows, columns] bool, over all columns so far.

        Raises:
            ValueError: for a mask that shows what is padding, or hides other tokens than a row's
                newest ones.
        """
        stored = self.stored(*mask.shape)
        if self.ended is not None:
            mask = np.where(self.ended[:, None], stored, mask)
        hidden = stored & ~mask
        last_kept = mask.shape[1] - (stored & mask)[:, ::-1].argmax(1)
        in_the_middle = hidden & (np.arange(mask.shape[1]) < last_kept[:, None] - 1)
        in_the_middle &= (stored & mask).any(1, keepdims=True)
        if (mask & ~stored).any() or in_the_middle.any():
            raise ValueError(
                "PagedCache: attention_mask must agree with what is cached, got one that reveals "
                "padding or hides tokens in the middle of a row; use a new cache"
            )
        return hidden

    def hide(self, hidden: np.ndarray) -> None:
        """Make padding of what `hidden_by` returned."""
        self.valid = self.stored(*hidden.shape) & ~hidden

    def end(self, rows: Sequence[int], num_rows: int, columns: int) -> None:
        """Make ``rows`` rows of padding, now and later."""
        self.valid = self.stored(num_rows, columns)
        self.valid[rows] = False
        if self.ended is None:
            self.ended = np.zeros(num_rows, bool)
        self.ended[rows] = True

    def crop(self, kept: int) -> None:
        """Forget all but the first ``kept`` columns."""
        if self.valid is not None:
            self.valid = self.valid[:, :kept]
        if self.ids:
            self.ids = [torch.cat(self.ids, 1)[:, :kept]]

    def select(self, rows: Sequence[int]) -> None:
        """Make row ``i`` what row ``rows[i]`` was."""
        for name in ("valid", "ended", "ahead"):
            array = getattr(self, name)
            setattr(self, name, None if array is None else array[rows])
        if self.ids:
            ids = torch.cat(self.ids, 1)
            self.ids = [ids[torch.tensor(rows, device=ids.device)]]

    def tokens(self) -> list[np.ndarray]:
        """Return the recorded ids of each row's tokens, [*] int64."""
        if not self.ids:
            return []
        ids = torch.cat(self.ids, 1).cpu().numpy()
        if self.valid is None:
            return list(ids)
        return [row[valid] for row, valid in zip(ids, self.valid, strict=True)]
