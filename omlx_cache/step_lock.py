"""One step at a time over blocks that several caches share."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import Protocol


class Stepping(Protocol):
    """What takes turns: the steps of a cache."""

    def drop_dead_step(self) -> None:
        """End the turn of a step that this thread began and that can't go on."""


class StepLock:
    """Who of several caches may touch their common blocks: one, for a whole step or a moment.

    Unlike `threading.RLock` it can be let go for an owner that is gone: a step inside a compiled
    graph that fails never ends by itself.

    Args:
        at_end: called with the lock held, each time before it is let go.
    """

    def __init__(self, at_end: Callable[[], None] = lambda: None) -> None:
        self._lock = Lock()
        self._at_end = at_end
        self._thread: int | None = None
        self._depth = 0
        self._stepping: Callable[[], Stepping | None] = lambda: None

    def begin_turn(self, cache: Stepping) -> None:
        """Wait for the lock and hold it for a step of ``cache``.

        Raises:
            RuntimeError: when this thread is in a step already, of another cache.
        """
        self._drop_dead_steps(cache)
        if self._is_mine():
            raise RuntimeError(
                "PagedCache: with prefix_cache, a model must run one step at a time, got a second "
                "one inside of a step of the same thread; run it after the first"
            )
        self._take()
        self._stepping = weakref.ref(cache)

    def end_turn(self, cache: Stepping) -> None:
        """Let the lock go, if a step of ``cache`` holds it."""
        if self._stepping() is cache:
            self.free()

    @contextmanager
    def alone(self, cache: Stepping) -> Iterator[None]:
        """Let nobody begin a step meanwhile; inside of a step of this thread, nothing changes."""
        self._drop_dead_steps(cache)
        with self:
            yield

    def __enter__(self) -> None:
        if not self._is_mine():
            self._take()
        else:
            self._depth += 1

    def __exit__(self, *exception: object) -> None:
        self._depth -= 1
        if not self._depth:
            self.free()

    def visit(self) -> None:
        """Call ``at_end``, unless somebody holds the lock and will do so."""
        if self._lock.acquire(blocking=False):
            self.free()

    def free(self) -> None:
        """Let the lock go, whoever holds it."""
        try:
            self._at_end()
        finally:
            self._depth, self._thread, self._stepping = 0, None, lambda: None
            self._lock.release()

    def _is_mine(self) -> bool:
        return self._thread == get_ident()

    def _take(self) -> None:
        self._lock.acquire()
        self._thread, self._depth = get_ident(), 1

    def _drop_dead_steps(self, cache: Stepping) -> None:
        """Undo what this thread has left behind, with ``cache`` or with another one."""
        cache.drop_dead_step()
        other = self._stepping() if self._is_mine() else None
        if other is not None:
            other.drop_dead_step()
