"""Exchange the attention of a patched model's modules for the stock one, for the length of a call.

Modules find their attention, and the masks for it, by the configuration that they hold, so that is
what is exchanged. It is one for all threads: paged steps and stock calls of different threads wait
for each other.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition, get_ident
from typing import Any

from torch import nn

logger = logging.getLogger(__name__)


class ConfigSwitch:
    """Which attention a patched model's modules read from their configurations.

    Attributes:
        is_stock: whether it is the one from before the patch.
    """

    def __init__(self) -> None:
        self.is_stock = False
        self.configs: list[tuple[nn.Module, Any, Any]] = []  # module, stock, paged
        self._changed = Condition()
        self._paged: Counter[int] = Counter()  # steps that each thread runs
        self._holder: int | None = None
        self._depth = 0
        self._told: set[str] = set()

    def add(self, module: nn.Module, paged: Any) -> None:
        """Give ``module`` the configuration ``paged``, and remember its own."""
        self.configs.append((module, module.config, paged))
        module.config = paged

    def withdraw(self) -> None:
        """Give all modules their own configurations back, for good."""
        self._set(stock=True)
        self.configs = []

    @contextmanager
    def paged(self) -> Iterator[None]:
        """Run a step of the paged attention; waits for stock calls of other threads."""
        me = get_ident()
        if self._holder == me:  # as the draft of a stock call
            with self._reading(stock=False):
                yield
            return
        with self._changed:
            self._changed.wait_for(lambda: self._holder is None)
            self._paged[me] += 1
        try:
            yield
        finally:
            with self._changed:
                self._paged[me] -= 1
                self._paged += Counter()  # drops what is zero
                self._changed.notify_all()

    @contextmanager
    def stock(self, why: str) -> Iterator[None]:
        """Run a call on the stock attention; waits for paged steps of other threads.

        Args:
            why: what the call asks for, told in a warning.
        """
        me = get_ident()
        if self._holder != me and why not in self._told:
            self._told.add(why)
            logger.warning(
                "omlx_cache: %s runs as on the unpatched model, without the paged cache and its "
                "settings; leave it out to use them",
                why,
            )
        with self._changed:
            self._changed.wait_for(
                lambda: self._holder in (None, me) and not self._paged.keys() - {me}
            )
            self._holder, self._depth = me, self._depth + 1
        try:
            with self._reading(stock=True):
                yield
        finally:
            with self._changed:
                self._depth -= 1
                self._holder = me if self._depth else None
                self._changed.notify_all()

    @contextmanager
    def _reading(self, *, stock: bool) -> Iterator[None]:
        before = self.is_stock
        self._set(stock=stock)
        try:
            yield
        finally:
            self._set(stock=before)

    def _set(self, *, stock: bool) -> None:
        for module, own, paged in self.configs:
            module.config = own if stock else paged
        self.is_stock = stock

    def __deepcopy__(self, memo: dict) -> ConfigSwitch:
        """Copy for a copied model; what runs on the original is nothing to the copy."""
        copied = memo[id(self)] = ConfigSwitch()
        copied.configs = copy.deepcopy(self.configs, memo)
        return copied
