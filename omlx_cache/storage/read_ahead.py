"""Read what will be asked for before it is asked for: never wrong, only early or late.

Whatever is read ahead is what a reader would have got at that moment, or nothing. What is asked for
while it is being read is waited for; what hasn't been begun is read by whoever asks.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import Condition, Thread
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

_WAITING, _RUNNING, _DONE = "waiting", "running", "done"


@dataclass
class _Slot(Generic[T]):
    """One key that was announced."""

    batch: int
    state: str = _WAITING
    value: T | None = None
    num_bytes: int = 0
    seconds: float = 0.0


class ReadAhead(Generic[T]):
    """A reader, and a thread that reads ahead of it while there is something to read.

    Args:
        read: reads what is under a key; None: there is nothing. Called by several threads.
        size_of: bytes that a value holds.
        max_bytes: bound on what was read and not asked for yet; one value always may be. Where it
            is reached, what an earlier `expect` named leaves for what a later one does.

    Attributes:
        hits: keys that were asked for when they had been read, or were being read.
        misses: those that had not.
        seconds_saved: what hits took to read, less what was waited for them.

    Example:
        >>> ahead = ReadAhead({b"a": "text"}.get, len, max_bytes=100)
        >>> ahead.expect([b"a"])
        >>> ahead.wait()
        >>> ahead.take(b"a"), ahead.take(b"b"), ahead.hits, ahead.misses
        ('text', None, 1, 1)
    """

    def __init__(
        self, read: Callable[[bytes], T | None], size_of: Callable[[T], int], max_bytes: int
    ) -> None:
        self._read, self._size_of, self._max_bytes = read, size_of, max_bytes
        self.hits = self.misses = 0
        self.seconds_saved = 0.0
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._process = os.getpid()
        self._changed = Condition()
        self._slots: dict[bytes, _Slot[T]] = {}  # in the order of `expect`
        self._batch = self._bytes = 0
        self._is_running = False

    def _lock(self) -> Condition:
        if self._process != os.getpid():  # a forked child has no thread that reads
            self._begin_anew()
        return self._changed

    def expect(self, keys: Iterable[bytes]) -> None:
        """Begin to read what is under some keys, in their order; returns at once."""
        with self._lock():
            self._batch += 1
            for key in keys:
                slot = self._slots.pop(key, None) or _Slot(self._batch)
                slot.batch = self._batch
                self._slots[key] = slot
            self._run_if_needed()

    def take(self, key: bytes) -> T | None:
        """Return what is under a key, and forget it; reads it where that wasn't begun."""
        with self._lock():
            slot = self._slots.get(key)
            if slot is not None and slot.state is _RUNNING:
                start = time.perf_counter()
                self._changed.wait_for(lambda: slot.state is not _RUNNING)
                self.seconds_saved -= time.perf_counter() - start
            if slot is not None and self._slots.get(key) is slot:  # else another was faster
                del self._slots[key]
                if slot.state is _DONE:
                    self._bytes -= slot.num_bytes
                    self.seconds_saved += slot.seconds
                    self.hits += 1
                    self._run_if_needed()
                    return slot.value
            self.misses += 1
        return self._read(key)

    def wait(self) -> None:
        """Wait until all that was announced, and for which there is room, has been read."""
        with self._lock():
            self._changed.wait_for(lambda: not self._is_running)

    def _next(self) -> tuple[bytes, _Slot[T]] | None:
        """Return what to read next, once there is room for it; None: nothing.

        The first of what was announced last comes first.
        """
        waiting = [(k, s) for k, s in self._slots.items() if s.state is _WAITING]
        if not waiting:
            return None
        found = max(waiting, key=lambda each: each[1].batch)
        for key, slot in list(self._slots.items()):
            if self._bytes < self._max_bytes:
                break
            if slot.state is _DONE and slot.batch < found[1].batch:
                self._bytes -= slot.num_bytes
                del self._slots[key]
        return found if self._bytes < self._max_bytes else None

    def _run_if_needed(self) -> None:
        if not self._is_running and self._next() is not None:
            self._is_running = True
            try:
                Thread(target=self._run, name="omlx_cache read ahead", daemon=True).start()
            except RuntimeError:  # the interpreter is shutting down: whoever asks will read
                self._is_running = False

    def _run(self) -> None:
        while True:
            with self._changed:
                found = self._next()
                if found is None:
                    self._is_running = False
                    self._changed.notify_all()
                    return
                key, slot = found
                slot.state = _RUNNING
            start, value, size = time.perf_counter(), None, 0
            try:
                value = self._read(key)
                size = 0 if value is None else self._size_of(value)
                is_read = True
            except Exception:
                logger.warning("omlx_cache: reading ahead failed", exc_info=True)
                is_read = False
            with self._changed:
                slot.value, slot.seconds = value, time.perf_counter() - start
                if is_read:
                    slot.state, slot.num_bytes = _DONE, size
                    self._bytes += size
                else:
                    slot.state = _WAITING  # to whoever waits for it: it has to be read
                    del self._slots[key]
                self._changed.notify_all()
