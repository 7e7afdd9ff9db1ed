"""`PagedCache`: a `transformers.Cache` whose layers store paged blocks of mixed precision.

It is what callers and Hugging Face hold. What its rows are is in `CacheRows`, how a pass of the
model is added to them in `CacheSteps`, and what they share with other calls in `PrefixShare`.
"""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from omlx_cache.block_arena import BlockArena
from omlx_cache.block_pool import MemoryMeter
from omlx_cache.cache_report import CacheReport, report_of
from omlx_cache.cache_rows import CacheRows
from omlx_cache.cache_steps import CacheSteps
from omlx_cache.compat import Cache, DynamicCache
from omlx_cache.compiled import new_handle
from omlx_cache.host_tier import HostTier
from omlx_cache.layer_groups import build_layers
from omlx_cache.observer import Observer
from omlx_cache.patch_state import PatchState, state_of
from omlx_cache.prefix_share import PrefixShare
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


class PagedCache(DynamicCache):
    """The cache of one batch of sequences of a patched model; the `DynamicCache` of that model.

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
        self._is_callers = True

    @classmethod
    def for_patch(
        cls, state: PatchState, *, unquantized: bool = False, callers: bool = False
    ) -> PagedCache:
        """Make a cache for the model that ``state`` patches.

        Args:
            state: the patch.
            unquantized: for the throw-away cache of a call with ``use_cache=False``, in which
                nothing is rounded and which may take what memory it needs.
            callers: whether somebody has asked for this cache; see `is_compileable`.
        """
        cache = cls.__new__(cls)
        cache._build(state, _UNQUANTIZED if unquantized else {})
        cache._is_callers = callers
        return cache

    @property
    def is_compileable(self) -> bool:
        """Whether ``generate`` compiles the model by itself for this cache, on accelerators.

        It does for a cache of the caller's. One that it builds is used as it would use a
        `DynamicCache`: nobody has asked for a first call of minutes.
        """
        return self._is_callers

    def _build(self, state: PatchState, overrides: dict | None = None) -> None:
        self._state = weakref.ref(state)
        self.config = state.config.model_copy(update=overrides)
        self.windows = state.spec.windows
        self._store = state.prefix_store() if self.config.prefix_cache else None
        self._lock = StepLock() if self._store is None else self._store.lock
        self.meter = MemoryMeter() if self._store is None else self._store.meter
        self.handle = new_handle(self)
        self.groups, layers = build_layers(state.spec, self.config, self._arena, self.meter)
        Cache.__init__(self, layers=layers)
        self._own_layers()
        self.rows = CacheRows(self.groups, layers)
        self.prefix = PrefixShare(self._store, self.rows)
        self.steps = CacheSteps(self.rows, self.prefix, self._lock)
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

    def step(
        self, valid: np.ndarray, ids: torch.Tensor | None = None
    ) -> AbstractContextManager[None]:
        """Run one forward pass of the model over the columns ``valid``, [rows, columns] bool.

        ``ids`` are their token ids, where they are known.

        Everything that the pass stores becomes part of the cache when the block ends, and nothing
        of it when the block raises.
        """
        return self.steps.run(valid, ids)

    @property
    def valid(self) -> np.ndarray | None:
        """Which columns hold a token of their row, [rows, columns] bool; None while all do."""
        return self.rows.columns.valid

    @property
    def batch_size(self) -> int:
        """Rows that the cache holds; -1 before its first step."""
        return self.rows.num_rows or -1

    @property
    def reused_tokens(self) -> int:
        """Tokens that the rows began with and that weren't computed, over all rows."""
        return self.prefix.reused_tokens

    def reset(self) -> None:
        """Forget every sequence and give the memory back; the peak stays on record."""
        with self.steps.hold():
            self.rows.clear()

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
        with self.steps.hold():
            self.rows.crop(tokens_to_remove)

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

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Give row ``i`` what row ``beam_idx[i]`` held: block tables move, blocks don't."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row ``repeats`` times, next to each other; the copies share blocks."""
        with self.steps.hold():
            self.rows.repeat(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows ``indices`` (a row may come several times, and then shares its blocks)."""
        with self.steps.hold():
            self.rows.select(indices)

    def end_rows(self, rows: list[int]) -> None:
        """Free what ``rows`` hold: they have ended, and whatever comes for them is padding.

        Their blocks go to the prefix store first, where there is one.
        """
        with self.steps.hold():
            self.prefix.keep(partial=True, rows=rows)
            self.rows.end(rows)

    def record(self, ids: torch.Tensor, valid: np.ndarray) -> None:
        """Note the ids of all tokens from now on, and begin with what the store knows of them.

        Does nothing without a store. Afterwards `get_seq_length` says how many columns are there
        already: as many as the row of which least is known allows, and never all. A row of which
        more is known skips what it has.

        Args:
            ids: [rows, columns] of the prompts; the cache must be empty.
            valid: [rows, columns] bool, which of them are real tokens.
        """
        with self.steps.hold():
            self.prefix.begin(ids, valid)

    def expect(self, texts: list[np.ndarray]) -> None:
        """Begin to read what the disk has of texts, [*] int64, for a cache that `record` fills."""
        self.prefix.expect(texts)

    def keep(self) -> None:
        """Let the store hold what the cache holds, and note no more ids."""
        with self.steps.hold():
            self.prefix.keep(partial=True)
        self.rows.columns.ids = None

    def keep_as(self, ids: torch.Tensor) -> None:
        """Let the store hold what a cache that `load` filled holds: the texts ``ids``.

        Args:
            ids: [rows, columns], for every column of the cache.
        """
        self.rows.columns.ids = [ids]
        self.keep()

    def offload(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Refuse to move a layer's keys and values: they are blocks, shared and of mixed bits."""
        raise NotImplementedError(
            "PagedCache: a layer can't be moved to the CPU and back as transformers' offloaded "
            "caches do; bound the memory with omlx_cache.patch(model, window_size=...) or "
            "cache_bits instead"
        )

    prefetch = offload

    def __deepcopy__(self, memo: dict) -> PagedCache:
        """Copy blocks and tables, or share the blocks of a store; the copy goes its own way."""
        with self.steps.alone():
            copied = memo[id(self)] = type(self).__new__(type(self))
            memo[id(self.handle)] = new_handle(copied)
            memo[id(self._lock)] = StepLock()
            if self._store is not None:
                arenas = (group.arena for group in self.groups)
                memo.update({id(x): x for x in (self._store, self._lock, self.meter, *arenas)})
            copied.__dict__.update({k: copy.deepcopy(v, memo) for k, v in vars(self).items()})
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
        with self.steps.alone():
            save_cache(self, path, state.spec.decoder, extra=extra, compress=compress)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: torch.nn.Module) -> PagedCache:
        """Read a cache that `save` wrote, for the same model, patched; see `SavedCache.restore`."""
        return SavedCache(path).restore(model)

    def report(self) -> CacheReport:
        """Take a snapshot of what the cache holds."""
        with self._lock:
            return report_of(self)
