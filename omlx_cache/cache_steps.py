"""The steps of one cache: a pass of the model becomes part of its rows as a whole, or not at all.

A step waits for its turn with the blocks, is planned and begun in every layer group, runs layer by
layer, and is committed; whatever raises in between undoes it in every group.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import get_ident

import numpy as np
import torch

from omlx_cache.cache_rows import CacheRows
from omlx_cache.masks import read_mask
from omlx_cache.prefix_share import PrefixShare
from omlx_cache.step_lock import StepLock


class CacheSteps:
    """What the forward pass of a patched model does to a cache.

    Args:
        rows: of the cache.
        share: keeps the blocks of a prompt for other calls.
        lock: of all caches that draw from the same blocks.

    Attributes:
        weights: collects the weights of each layer's attention; None: nobody wants them.
    """

    def __init__(self, rows: CacheRows, share: PrefixShare, lock: StepLock) -> None:
        self._rows, self._share, self._lock = rows, share, lock
        self._step: tuple[np.ndarray, torch.Tensor | None] | None = None  # columns and their ids
        self._traced_by: int | None = None  # the thread whose compiled graph runs the step
        self.weights: list[torch.Tensor] | None = None

    def valid_columns(
        self, attention_mask: torch.Tensor | None, batch_size: int, columns: int
    ) -> np.ndarray:
        """Say which of the next ``columns`` columns are real tokens, [batch_size, columns] bool.

        Args:
            attention_mask: None (all real), or 2-D over all columns so far and the new ones, or
                over the new ones alone.
            batch_size: rows of the pass. Rows that come from the store are repeated to as many,
                where generate repeats its prompts.
            columns: of the pass.

        Raises:
            ValueError: when the mask's shape, or the batch size, does not fit what is stored, or
                when the mask disagrees with what was stored about the columns before.
            NotImplementedError: for a mask that isn't 2-D.
        """
        self._widen(batch_size)
        rows, past = self._rows.num_rows, self._rows.num_columns
        if rows and rows != batch_size:
            raise ValueError(
                f"PagedCache: the batch must have the {rows} rows that the cache holds, got "
                f"{batch_size}; use a new cache, reset() or batch_select_indices()"
            )
        if attention_mask is None:
            return np.ones((batch_size, columns), bool)
        mask = read_mask(attention_mask, batch_size, past, columns)
        if past and mask.shape[1] == past + columns:
            self._follow_mask(mask[:, :past])
        return mask[:, -columns:] if columns else mask[:, :0]

    def _widen(self, batch_size: int) -> None:
        rows = self._rows.num_rows
        if self._rows.columns.is_fresh and rows and rows < batch_size and not batch_size % rows:
            with self.hold():
                self._rows.repeat(batch_size // rows)

    def _follow_mask(self, mask: np.ndarray) -> None:
        """Drop the newest tokens of the rows in which a mask over the past now hides them.

        That is how the padding of a row that ended early looks in the next turn: it was stored as
        it was generated, and only the next mask tells that it was padding.
        """
        hidden = self._rows.columns.hidden_by(mask)
        if hidden.any():
            with self.hold():
                self._rows.hide(hidden)

    def require(self, valid: np.ndarray, chunk: int) -> None:
        """Check that the columns ``valid`` will find blocks when they come ``chunk`` at a time.

        Raises:
            OutOfBlocksError: when they will not; nothing is changed.
        """
        starts = range(0, valid.shape[1], chunk)
        with self.hold():
            self._rows.ensure(valid.shape[0])
            valid = self._rows.columns.to_compute(valid)
            steps = [valid[:, i : i + chunk].sum(1).tolist() for i in starts]
            for group in self._rows.groups:
                group.require(steps)

    @contextmanager
    def run(self, valid: np.ndarray, ids: torch.Tensor | None = None) -> Iterator[None]:
        """Run one step inside the block; see `PagedCache.step`."""
        self.begin(valid, ids)
        try:
            yield
        except BaseException:
            self._roll_back()
            raise
        self.end()

    def begin(
        self, valid: np.ndarray, ids: torch.Tensor | None = None, *, traced: bool = False
    ) -> None:
        """Plan a step and begin it; `end` ends it.

        With ``prefix_cache`` it waits for the step of any other cache of the model.

        Args:
            valid: [rows, columns] bool, which columns of the step are real tokens.
            ids: [rows, columns], their token ids; None where they aren't known.
            traced: whether the step runs inside a compiled graph, where nobody can catch an
                error: it is then undone when its thread uses the cache next.

        Raises:
            RuntimeError: when a step of this cache is running.
            OutOfBlocksError: when there are too few blocks for it; nothing is changed.
        """
        self.drop_dead_step()
        if self.is_running:
            raise RuntimeError(
                "PagedCache: a cache must be used by one call at a time, got a second one while a "
                "step is running; give each thread its own omlx_cache.PagedCache(model)"
            )
        self._lock.begin_turn(self)
        try:
            self._rows.ensure(valid.shape[0])
            todo = self._rows.columns.to_compute(valid)
            new_tokens = todo.sum(1).tolist()
            padding = None if todo.all() else todo
            for group in self._rows.groups:
                group.begin(new_tokens, padding)
        except BaseException:
            self._roll_back()
            raise
        self._step = valid, ids
        self._traced_by = get_ident() if traced else None

    def columns(self) -> np.ndarray:
        """Return which columns are real, [rows, past + columns], those of the step included."""
        new, _ = self._running_step()
        past = self._rows.columns.stored(new.shape[0], self._rows.num_columns)
        return np.concatenate([past, new], 1)

    def end(self) -> None:
        """Make what the step in progress stored part of the cache."""
        for group in self._rows.groups:
            group.commit()
        valid, ids = self._running_step()
        past = self._rows.num_columns
        self._rows.columns.add(valid, past, ids)
        self._rows.num_columns = past + valid.shape[1]
        if valid.shape[1] > 1:  # a prompt: others may begin with it from now on
            self._share.keep(partial=False)
        self._end_turn()

    def prune(self) -> None:
        """Drop what ``prune_ratio`` says of the blocks; called after each pass of the model."""
        with self.hold():
            for group in self._rows.groups:
                group.prune()

    @contextmanager
    def collect(self, wanted: bool) -> Iterator[list[torch.Tensor]]:
        """Collect the weights with which the layers attend, if they are wanted."""
        found: list[torch.Tensor] = []
        self.weights = found if wanted else None
        try:
            yield found
        finally:
            self.weights = None

    def drop_dead_step(self) -> None:
        """Undo the step that a compiled graph of this thread began and, failing, never ended."""
        if self._traced_by == get_ident():
            self._roll_back()

    def hold(self) -> AbstractContextManager[None]:
        """Let no cache begin a step on the same blocks; inside of a step nothing changes."""
        return self._lock.alone(self)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let no cache begin a step on the same blocks.

        Raises:
            RuntimeError: when this one is in a step.
        """
        with self.hold():
            if self.is_running:
                raise RuntimeError(
                    "PagedCache: a cache can't be copied, read, saved or loaded while a step is "
                    "running"
                )
            yield

    @property
    def is_running(self) -> bool:
        """Whether a step is in progress."""
        return any(group.step is not None for group in self._rows.groups)

    def _running_step(self) -> tuple[np.ndarray, torch.Tensor | None]:
        if self._step is None:
            raise RuntimeError("PagedCache: a step must be in progress")
        return self._step

    def _roll_back(self) -> None:
        for group in self._rows.groups:
            if group.step is not None:
                group.rollback()
        self._end_turn()

    def _end_turn(self) -> None:
        self._traced_by = self._step = None
        self._lock.end_turn(self)
