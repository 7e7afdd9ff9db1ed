"""What `patch` leaves on a model: enough to run it, to build caches for it, and to undo it."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING

from torch import nn

from omlx_cache.config import CacheConfig
from omlx_cache.config_switch import ConfigSwitch
from omlx_cache.fingerprint import fingerprint
from omlx_cache.inspection import ModelSpec
from omlx_cache.prefix_store import PrefixStore
from omlx_cache.stand_ins import StandIn
from omlx_cache.unwrap import unwrap

if TYPE_CHECKING:
    from omlx_cache.cache import PagedCache
    from omlx_cache.cache_report import CacheReport

_ATTRIBUTE = "_omlx_patch"
_store_lock = Lock()


@dataclass
class PatchState:
    """The patch of one model.

    Attributes:
        config: configuration of the caches that the model builds from now on.
        spec: what was read from the model.
        switch: the configurations that modules read, ours and their own.
        hooks: (module, number) of the forward hooks that were added.
        methods: what stands in for methods of the model.
        last_cache: the cache that the model used last, while it lives.
        last_report: that cache's last snapshot, which outlives it.
        store: what later calls may reuse; see `prefix_store`.
    """

    config: CacheConfig
    spec: ModelSpec
    switch: ConfigSwitch = field(default_factory=ConfigSwitch)
    hooks: list[tuple[nn.Module, int]] = field(default_factory=list)
    methods: list[StandIn] = field(default_factory=list)
    last_cache: weakref.ref[PagedCache] | None = None
    last_report: CacheReport | None = None
    store: PrefixStore | None = None

    def prefix_store(self) -> PrefixStore | None:
        """Return the store that caches draw from now; None where the configuration has none.

        A change of the configuration, of weights or of adapters begins an empty one.
        """
        if not self.config.prefix_cache:
            return None
        key = self.config, fingerprint(self.spec.decoder)
        with _store_lock:
            old = self.store
            if old is None or (old.config, old.fingerprint) != key:
                self.store = PrefixStore(*key)
            current = self.store
        if old is not None and old is not current:
            old.close()
        return current

    def close_store(self) -> None:
        """Give back what the store keeps."""
        with _store_lock:
            old, self.store = self.store, None
        if old is not None:
            old.close()

    def original(self, owner: nn.Module, name: str) -> Callable:
        """Return the method that the patch shadows, bound, on ``owner``."""
        return next(s for s in self.methods if s.module is owner and s.name == name).original()

    def used(self, cache: PagedCache, *, snapshot: bool) -> None:
        """Remember ``cache`` as the last one, without keeping it alive.

        Args:
            cache: what the model just used.
            snapshot: also note what it holds, for when it will be gone; once a call, not a step.
        """
        self.last_cache = weakref.ref(cache)
        if self.store is not None and not self.store.has_run:
            # GPTQ kernels replace a layer's weights by a packed form when it runs first.
            self.store.fingerprint, self.store.has_run = fingerprint(self.spec.decoder), True
        if snapshot:
            self.last_report = cache.report()

    def __getstate__(self) -> dict:
        raise TypeError(
            "omlx_cache: a patched model can't be pickled; call omlx_cache.unpatch(model) first, "
            "or use model.save_pretrained(), which works on a patched model"
        )

    def __deepcopy__(self, memo: dict) -> PatchState:
        """Copy for a copied model; caches of the original are not the copy's."""
        copied = memo[id(self)] = PatchState(self.config, self.spec)  # modules refer back to it
        copied.spec = copy.deepcopy(self.spec, memo)
        copied.switch = copy.deepcopy(self.switch, memo)
        copied.hooks = copy.deepcopy(self.hooks, memo)
        copied.methods = copy.deepcopy(self.methods, memo)
        return copied


def find_state(model: nn.Module) -> PatchState | None:
    """Return the patch of ``model`` (or of the model inside a wrapper); None if it has none."""
    return attached_state(unwrap(model))


def attached_state(module: nn.Module) -> PatchState | None:
    """Return the patch that is attached to this very module (a causal LM, or its decoder)."""
    return module.__dict__.get(_ATTRIBUTE)


def attach_state(module: nn.Module, state: PatchState) -> None:
    """Attach ``state`` to a module, in front: pickling meets what refuses it before all else."""
    others = {k: v for k, v in module.__dict__.items() if k != _ATTRIBUTE}
    module.__dict__.clear()
    module.__dict__.update({_ATTRIBUTE: state, **others})


def detach_state(module: nn.Module) -> None:
    """Remove what `attach_state` attached."""
    module.__dict__.pop(_ATTRIBUTE, None)


def state_of(model: nn.Module) -> PatchState:
    """Return the patch of ``model``.

    Raises:
        ValueError: when it is not patched.
    """
    state = find_state(model)
    if state is None:
        raise ValueError(
            f"omlx_cache: the model must be patched, got an unpatched {type(model).__name__}; "
            f"call omlx_cache.patch(model) first"
        )
    return state
