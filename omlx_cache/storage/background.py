"""Jobs that run behind their submitter's back, one after the other."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable
from threading import Condition, Thread

logger = logging.getLogger(__name__)


class BackgroundJobs:
    """A bounded queue of jobs, and the thread that runs them while there are any.

    The thread ends with the last job, so nothing has to be closed, and the interpreter waits for it
    at its end: whatever was submitted runs, unless the process is killed. A forked child begins
    with an empty queue: its parent runs what was in it.

    Args:
        max_bytes: bound on what the waiting jobs hold, in bytes. A job of more is taken alone.

    Example:
        >>> jobs, done = BackgroundJobs(max_bytes=100), []
        >>> jobs.submit(lambda: done.append("first"), 60)
        True
        >>> jobs.drain()
        >>> done
        ['first']
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._process = os.getpid()
        self._changed = Condition()
        self._jobs: deque[tuple[Callable[[], None], int]] = deque()
        self._bytes = 0  # of the jobs that wait, and of the one that runs
        self._is_running = False

    def _lock(self) -> Condition:
        if self._process != os.getpid():
            self._begin_anew()
        return self._changed

    @property
    def is_idle(self) -> bool:
        """Whether all jobs have run."""
        with self._lock():
            return not self._is_running

    def has_room(self, num_bytes: int) -> bool:
        """Whether a job that holds ``num_bytes`` would be taken now."""
        with self._lock():
            return self._fits(num_bytes)

    def _fits(self, num_bytes: int) -> bool:
        return not self._bytes or self._bytes + num_bytes <= self.max_bytes

    def submit(self, job: Callable[[], None], num_bytes: int = 0) -> bool:
        """Queue a job behind the others; one that raises is logged.

        Args:
            job: what to run.
            num_bytes: that it holds until it has run; 0 always fits.

        Returns:
            Whether there was room. If not, the job is not taken.
        """
        with self._lock():
            if num_bytes and not self._fits(num_bytes):
                return False
            self._jobs.append((job, num_bytes))
            self._bytes += num_bytes
            if self._is_running:
                return True
            self._is_running = True
        try:
            Thread(target=self._run, name="omlx_cache disk").start()
        except RuntimeError:  # the interpreter is shutting down
            self._run()
        return True

    def drain(self) -> None:
        """Wait until all jobs have run."""
        with self._lock():
            self._changed.wait_for(lambda: not self._is_running)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._jobs:
                    self._is_running = False
                    self._changed.notify_all()
                    return
                job, num_bytes = self._jobs.popleft()
            try:
                job()
            except Exception:
                logger.exception("omlx_cache: a job in the background failed")
            del job  # and what it holds
            with self._changed:
                self._bytes -= num_bytes
                self._changed.notify_all()
