"""How slow work says how far it is: a callable, silent by default; a bar or lines in a console."""

from __future__ import annotations

import time
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Progress as RichBar

PLAIN_SECONDS = 10.0


class Progress(Protocol):
    """Is told the step that runs now, and how much of it is done where that is known."""

    def __call__(self, step: str, done: int = 0, total: int | None = None) -> None:
        """Report that ``done`` of ``total`` parts (None: unknown) of ``step`` are finished."""


def silent(step: str, done: int = 0, total: int | None = None) -> None:
    """Ignore every report.

    >>> silent("quantizing", 3, 30)
    """


class ConsoleProgress:
    """Show progress in a console: a bar per step on a terminal, a line now and then in a pipe.

    Args:
        console: where to draw.
        plain_seconds: in a pipe, the least time between two lines about the same step.

    Example:
        >>> with ConsoleProgress(Console(force_terminal=False)) as progress:
        ...     progress("counting", 0, 2)
        ...     progress("counting", 2, 2)
        counting ...
        counting: 2/2
    """

    def __init__(self, console: Console, plain_seconds: float = PLAIN_SECONDS) -> None:
        self._console = console
        self._plain_seconds = plain_seconds
        self._step: str | None = None
        self._last_line = 0.0
        self._task: TaskID | None = None
        self._bar: RichBar | None = None
        if console.is_terminal:
            self._bar = RichBar(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=console,
            )

    def __enter__(self) -> ConsoleProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, exc_type, exc, traceback) -> None:
        if self._bar is not None:
            if exc_type is None:
                self._finish_step()
            self._bar.stop()

    def __call__(self, step: str, done: int = 0, total: int | None = None) -> None:
        """Show that ``done`` of ``total`` parts of ``step`` are finished."""
        if self._bar is None:
            self._print_line(step, done, total)
            return
        if step != self._step or self._task is None:
            self._finish_step()
            self._task = self._bar.add_task(step, total=total)
            self._step = step
        self._bar.update(self._task, completed=done, total=total)

    def _finish_step(self) -> None:
        """Fill the bar of the step that just ended: its total may never have been known."""
        if self._bar is None or self._task is None:
            return
        total = self._bar.tasks[-1].total or 1
        self._bar.update(self._task, completed=total, total=total)

    def _print_line(self, step: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        if step != self._step:
            self._step, self._last_line = step, now
            self._console.print(f"{step} ...", highlight=False, soft_wrap=True)
        elif total and (done == total or now - self._last_line >= self._plain_seconds):
            self._last_line = now
            self._console.print(f"{step}: {done}/{total}", highlight=False, soft_wrap=True)
