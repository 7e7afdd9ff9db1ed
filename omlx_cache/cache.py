"""`PagedCache`: a `transformers.Cache` whose layers store paged blocks of mixed precision.

Hugging Face's ``get_seq_length()`` counts *columns* of the padded batch; the kernels' ``seq_lens``
count a row's real tokens. This file is where the two meet: `PagedCache` keeps which columns of
each row were real (`Columns`), and hands only those to the layer groups.
"""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import numpy as np
import torch

from omlx_cache.block_arena import BlockArena
from omlx_cache.block_pool import MemoryMeter
from omlx_cache.cache_report import CacheReport, report_of
from omlx_cache.columns import Columns
from omlx_cache.compat import Cache
from omlx_cache.compiled import new_handle
from omlx_cache.host_tier import HostTier
from omlx_cache.layer_groups import build_layers
from omlx_cache.masks import read_mask, row_indices
from omlx_cache.observer import Observer
from omlx_cache.patch_state import PatchState, state_of
from omlx_cache.prefix_store import Reads
from omlx_cache.sequences import Sequence
from omlx_cache.step_lock import StepLock
from omlx_cache.storage.saved_cache import SavedCache, save_cache

_UNQUANTIZED = {
    "cache_bits": 16,
    "tiers": None,
    "target_saving": None,
    "max_gpu_blocks": None,
    "prefix_cache": False,
    "pruning": None,
    "prune_ratio": 0.0,
    "cpu_offload": False,
    "max_cpu_blocks": None,
    "disk_cache": False,
}


class PagedCache(Cache):
    """The cache of one batch of sequences of a patched model.

    A patched ``generate()`` or ``model(..., use_cache=True)`` builds one by itself. Make your own
    to keep a chat's history between calls::

        cache = omlx_cache.PagedCache(model)
        model.generate(**turn_1, cache=cache)   # past_key_values=cache before transformers 5.24
        model.generate(**turn_2, cache=cache)   # the whole chat so far; only the rest is computed

    Args:
        model: a model on which `omlx_cache.patch` was called; its configuration applies.

    Raises:
        ValueError: when the model is not patched.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._build(state_of(model))

    @classmethod
    def for_patch(cls, state: PatchState, *, unquantized: bool = False) -> PagedCache:
        """Make a cache for the model that ``state`` patches.

        Args:
            state: the patch.
            unquantized: for the throw-away cache of a call with ``use_cache=False``, in which
                nothing is rounded and which may take what memory it needs.
        """
        cache = cls.__new__(cls)
        cache._build(state, _UNQUANTIZED if unquantized else {})
        return cache

    def _build(self, state: PatchState, overrides: dict | None = None) -> None:
        self._state = weakref.ref(state)
        self.config = state.config.model_copy(update=overrides)
        self.windows = state.spec.windows
        self._store = state.prefix_store() if self.config.prefix_cache else None
        self._lock = StepLock() if self._store is None else self._store.lock
        self.meter = MemoryMeter() if self._store is None else self._store.meter
        self.reused_tokens, self.reads = 0, Reads()
        self._columns = Columns()
        self._step: tuple[np.ndarray, torch.Tensor | None] | None = None  # columns and their ids
        self.weights: list[torch.Tensor] | None = None  # collects each layer's, where it is a list
        self._traced_by: int | None = None  # the thread whose compiled graph runs the step
        self.handle = new_handle(self)
        self.groups, layers = build_layers(state.spec, self.config, self._arena, self.meter)
        super().__init__(layers=layers)
        self._own_layers()
        if self.config.disk_cache and self._store is not None:
            with self._lock:
                self._store.open_disk(self, state.spec)
        self._release_when_gone()

    def _own_layers(self) -> None:
        for layer in self.layers:
            layer.owner = weakref.ref(self)

    def _release_when_gone(self) -> None:
        """Give back what the cache holds of the store's blocks when the cache is collected."""
        if self._store is not None:
            goodbye = weakref.finalize(self, self._store.abandon, tuple(self.groups))
            goodbye.atexit = False

    def _arena(self, key: Hashable) -> BlockArena:
        if self._store is None:
            return BlockArena(self.config.max_gpu_blocks, HostTier.from_config(self.config))
        with self._lock:
            return self._store.arena(key)

    def valid_columns(
        self, attention_mask: torch.Tensor | None, batch_size: int, columns: int
    ) -> np.ndarray:
        """Say which of the next ``columns`` columns are real tokens, [batch_size, columns] bool.

        Args:
            attention_mask: None (all real), or 2-D over all columns so far and the new ones, or
                over the new ones alone.

        Raises:
            ValueError: when the mask's shape, or the batch size, does not fit what is stored, or
                when the mask disagrees with what was stored about the columns before.
            NotImplementedError: for a mask that isn't 2-D.
        """
        self._widen(batch_size)
        rows = self.groups[0].rows
        past = self.get_seq_length()
        if rows and len(rows) != batch_size:
            raise ValueError(
                f"PagedCache: the batch must have the {len(rows)} rows that the cache holds, got "
                f"{batch_size}; use a new cache, reset() or batch_select_indices()"
            )
        if attention_mask is None:
            return np.ones((batch_size, columns), bool)
        mask = read_mask(attention_mask, batch_size, past, columns)
        if past and mask.shape[1] == past + columns:
            self._follow_mask(mask[:, :past])
        return mask[:, -columns:] if columns else mask[:, :0]

    def _follow_mask(self, mask: np.ndarray) -> None:
        """Drop the newest tokens of the rows in which a mask over the past now hides them.

        That is how the padding of a row that ended early looks in the next turn: it was stored as
        it was generated, and only the next mask tells that it was padding.
        """
        hidden = self._columns.hidden_by(mask)
        if hidden.any():
            self._crop_rows(hidden.sum(1).tolist())
            self._columns.hide(hidden)

    def _widen(self, batch_size: int) -> None:
        """Repeat rows that come from the store, where generate repeats its prompts."""
        rows = len(self.groups[0].rows)
        if self._columns.is_fresh and rows and rows < batch_size and not batch_size % rows:
            self.batch_repeat_interleave(batch_size // rows)

    def require(self, valid: np.ndarray, chunk: int) -> None:
        """Check that the columns ``valid`` will find blocks when they come ``chunk`` at a time.

        Raises:
            OutOfBlocksError: when they will not; nothing is changed.
        """
        starts = range(0, valid.shape[1], chunk)
        with self._lock.alone(self):
            self._ensure_rows(valid.shape[0])
            valid = self._columns.to_compute(valid)
            steps = [valid[:, i : i + chunk].sum(1).tolist() for i in starts]
            for group in self.groups:
                group.require(steps)

    @contextmanager
    def step(self, valid: np.ndarray, ids: torch.Tensor | None = None) -> Iterator[None]:
        """Run one forward pass of the model over the columns ``valid``, [rows, columns] bool.

        ``ids`` are their token ids, where they are known.

        Everything that the pass stores becomes part of the cache when the block ends, and nothing
        of it when the block raises.
        """
        self.begin_step(valid, ids)
        try:
            yield
        except BaseException:
            self._roll_back()
            raise
        self.end_step()

    def begin_step(
        self, valid: np.ndarray, ids: torch.Tensor | None = None, *, traced: bool = False
    ) -> None:
        """Plan a step and begin it; `end_step` ends it.

        With ``prefix_cache`` it waits for the step of any other cache of the model.

        Args:
            valid: [rows, columns] bool, which columns of the step are real tokens.
            ids: [rows, columns], their token ids; None where they aren't known.
            traced: whether the step runs inside a compiled graph, where nobody can catch an
                error: it is then undone when its thread uses the cache next.
        """
        self.drop_dead_step()
        if self._is_in_step():
            raise RuntimeError(
                "PagedCache: a cache must be used by one call at a time, got a second one while a "
                "step is running; give each thread its own omlx_cache.PagedCache(model)"
            )
        self._lock.begin_turn(self)
        try:
            self._ensure_rows(valid.shape[0])
            todo = self._columns.to_compute(valid)
            new_tokens = todo.sum(1).tolist()
            padding = None if todo.all() else todo
            for group in self.groups:
                group.begin(new_tokens, padding)
        except BaseException:
            self._roll_back()
            raise
        self._step = valid, ids
        self._traced_by = get_ident() if traced else None

    @contextmanager
    def collect(self, wanted: bool) -> Iterator[list[torch.Tensor]]:
        """Collect the weights with which the layers attend, if they are wanted."""
        found: list[torch.Tensor] = []
        self.weights = found if wanted else None
        try:
            yield found
        finally:
            self.weights = None

    def columns_in_step(self) -> np.ndarray:
        """Return which columns are real, [rows, past + columns], those of the step included."""
        new, _ = self._running_step()
        return np.concatenate([self._columns.stored(new.shape[0], self.get_seq_length()), new], 1)

    def end_step(self) -> None:
        """Make what the step in progress stored part of the cache."""
        for group in self.groups:
            group.commit()
        valid, ids = self._running_step()
        past = self.get_seq_length()
        self._columns.add(valid, past, ids)
        self._set_columns(past + valid.shape[1])
        if valid.shape[1] > 1:  # a prompt: others may begin with it from now on
            self._keep(partial=False)
        self._end_turn()

    def prune(self) -> None:
        """Drop what ``prune_ratio`` says of the blocks; called after each pass of the model."""
        with self._lock.alone(self):
            for group in self.groups:
                group.prune()

    def _running_step(self) -> tuple[np.ndarray, torch.Tensor | None]:
        if self._step is None:
            raise RuntimeError("PagedCache: a step must be in progress")
        return self._step

    def drop_dead_step(self) -> None:
        """Undo the step that a compiled graph of this thread began and, failing, never ended."""
        if self._traced_by == get_ident():
            self._roll_back()

    def _roll_back(self) -> None:
        for group in self.groups:
            if group.step is not None:
                group.rollback()
        self._end_turn()

    def _end_turn(self) -> None:
        self._traced_by = self._step = None
        self._lock.end_turn(self)

    def _is_in_step(self) -> bool:
        return any(group.step is not None for group in self.groups)

    def _ensure_rows(self, batch_size: int) -> None:
        for group in self.groups:
            if not group.rows:
                group.rows = [Sequence() for _ in range(batch_size)]

    @property
    def valid(self) -> np.ndarray | None:
        """Which columns hold a token of their row, [rows, columns] bool; None while all do."""
        return self._columns.valid

    def restore_columns(self, columns: int, valid: np.ndarray | None) -> None:
        """Say what the columns of rows that were put back are; see `valid`."""
        self._columns = Columns()
        self._columns.valid = valid
        self._set_columns(columns)

    def _set_columns(self, columns: int) -> None:
        for layer in self.layers:
            layer.num_columns = columns

    def reset(self) -> None:
        """Forget every sequence and give the memory back; the peak stays on record."""
        with self._lock.alone(self):
            for group in self.groups:
                group.clear()
        self._columns = Columns()
        self._set_columns(0)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last columns of every row.

        Args:
            tokens_to_remove: how many, as zero or a negative number (the convention of
                transformers). After `activate_past_recording`, also releases what the window has
                left behind.

        Raises:
            ValueError: for a positive number, more columns than there are, or columns without
                which the window would reach back to blocks that it has already released (call
                `activate_past_recording` before the step that is to be undone).

        A block of 8 bits that is cut in the middle is re-opened in the model's dtype; its tokens
        keep their rounded values.
        """
        count, columns = -int(tokens_to_remove), self.get_seq_length()
        if not 0 <= count <= columns:
            raise ValueError(
                f"PagedCache.crop: tokens_to_remove must be between -{columns} and 0, got "
                f"{tokens_to_remove}"
            )
        rows = len(self.groups[0].rows)
        kept = columns - count
        removed = [count] * rows
        if self._columns.valid is not None:
            removed = self._columns.valid[:, kept:].sum(1).tolist()
        self._crop_rows(removed)
        self._columns.crop(kept)
        self._set_columns(kept)

    def activate_past_recording(self) -> None:
        """Keep what the windows leave behind until the next `crop`, so that it can go back.

        Assisted decoding calls this, and `crop` after each of its steps.
        """
        for group in self.groups:
            group.keep_past = True

    def observe(self, observer: Observer | None) -> None:
        """Have ``observer`` told which share of the attention each block gets; None ends it.

        It takes effect at the next step, costs a little time in every step, and changes no result
        but for the order of summation.
        """
        for group in self.groups:
            group.observer = observer

    def _crop_rows(self, removed: list[int]) -> None:
        """Remove the last tokens of each row, or raise before anything is changed."""
        with self._lock.alone(self):
            for group in self.groups:
                group.check_crop(removed)
            for group in self.groups:
                group.crop(removed)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Give row ``i`` what row ``beam_idx[i]`` held: block tables move, blocks don't."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row ``repeats`` times, next to each other; the copies share blocks."""
        rows = len(self.groups[0].rows)
        self.batch_select_indices(torch.arange(rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows ``indices`` (a row may come several times, and then shares its blocks)."""
        rows = len(self.groups[0].rows)
        if not rows:
            return
        chosen = row_indices(indices, rows)
        if not chosen:
            self.reset()
            return
        with self._lock.alone(self):
            for group in self.groups:
                group.select(chosen)
        self._columns.select(chosen)

    def end_rows(self, rows: list[int]) -> None:
        """Free what ``rows`` hold: they have ended, and whatever comes for them is padding.

        Their blocks go to the prefix store first, where there is one.
        """
        with self._lock.alone(self):
            self._keep(partial=True, rows=rows)
            for group in self.groups:
                group.empty(rows)
        self._columns.end(rows, len(self.groups[0].rows), self.get_seq_length())

    def record(self, ids: torch.Tensor, valid: np.ndarray) -> None:
        """Note the ids of all tokens from now on, and begin with what the store knows of them.

        Does nothing without a store. Afterwards `get_seq_length` says how many columns are there
        already: as many as the row of which least is known allows, and never all. A row of which
        more is known skips what it has.

        Args:
            ids: [rows, columns] of the prompts; the cache must be empty.
            valid: [rows, columns] bool, which of them are real tokens.
        """
        if self._store is None:
            return
        ids = ids.detach().long()  # texts are compared by their bytes
        with self._lock.alone(self):
            before = self._store.reads
            columns, lengths = self._store.begin(self.groups, ids.cpu().numpy(), valid)
            self.reads = self._store.reads.since(before)
        self._columns.start(valid[:, :columns], lengths, ids[:, :columns])
        self._set_columns(columns)
        self.reused_tokens = int(lengths.sum())

    def expect(self, texts: list[np.ndarray]) -> None:
        """Begin to read what the disk has of texts, [*] int64, for a cache that `record` fills."""
        if self._store is not None:
            self._store.expect(self.groups, texts)

    def keep(self) -> None:
        """Let the store hold what the cache holds, and note no more ids."""
        with self._lock.alone(self):
            self._keep(partial=True)
        self._columns.ids = None

    def keep_as(self, ids: torch.Tensor) -> None:
        """Let the store hold what a cache that `load` filled holds: the texts ``ids``.

        Args:
            ids: [rows, columns], for every column of the cache.
        """
        self._columns.ids = [ids]
        self.keep()

    def _keep(self, *, partial: bool, rows: list[int] | None = None) -> None:
        """Let the store hold what some rows hold (None: all), with their last block or without."""
        if self._store is not None and self._columns.ids:
            texts = self._columns.tokens()
            chosen = range(len(texts)) if rows is None else rows
            self._store.keep(self.groups, {i: texts[i] for i in chosen}, partial=partial)

    @property
    def batch_size(self) -> int:
        """Rows that the cache holds; -1 before its first step."""
        return len(self.groups[0].rows) or -1

    def offload(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Refuse to move a layer's keys and values: they are blocks, shared and of mixed bits."""
        raise NotImplementedError(
            "PagedCache: a layer can't be moved to the CPU and back as transformers' offloaded "
            "caches do; bound the memory with omlx_cache.patch(model, window_size=...) or "
            "cache_bits instead"
        )

    prefetch = offload

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let no cache begin a step on the blocks that this one draws from.

        Raises:
            RuntimeError: when this one is in a step.
        """
        with self._lock.alone(self):
            if self._is_in_step():
                raise RuntimeError(
                    "PagedCache: a cache can't be copied, read, saved or loaded while a step is "
                    "running"
                )
            yield

    def __deepcopy__(self, memo: dict) -> PagedCache:
        """Copy blocks and tables, or share the blocks of a store; the copy goes its own way."""
        with self.alone():
            copied = memo[id(self)] = type(self).__new__(type(self))
            own = {"handle": new_handle(copied), "_lock": StepLock()}
            if self._store is not None:
                own["_lock"] = self._lock
                common = self._store, self.meter, *(group.arena for group in self.groups)
                memo.update({id(part): part for part in common})
            copied.__dict__.update(
                {k: own[k] if k in own else copy.deepcopy(v, memo) for k, v in vars(self).items()}
            )
            copied._own_layers()
            if self._store is not None:
                for group in copied.groups:
                    group.join()
                copied._release_when_gone()
        return copied

    def __reduce__(self) -> str | tuple:
        raise TypeError(
            "PagedCache: a cache can't be pickled; its blocks live on the model's devices, and it "
            "serves one process only. Copy it with copy.deepcopy(cache), or cache.save(path)"
        )

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        extra: Mapping[str, Any] | None = None,
        compress: bool = True,
    ) -> None:
        """Write every sequence into a file, from which `load` continues; see `save_cache`."""
        state = self._state()
        if state is None:
            raise RuntimeError(
                "PagedCache.save: the model that filled the cache must still be patched, got none; "
                "save the cache before omlx_cache.unpatch(model)"
            )
        with self.alone():
            save_cache(self, path, state.spec.decoder, extra=extra, compress=compress)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: torch.nn.Module) -> PagedCache:
        """Read a cache that `save` wrote, for the same model, patched; see `SavedCache.restore`."""
        return SavedCache(path).restore(model)

    def report(self) -> CacheReport:
        """Take a snapshot of what the cache holds."""
        with self._lock:
            return report_of(self)
