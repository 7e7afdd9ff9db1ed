"""What the demo shows while a chat runs: a turn's message, a sign of life, then the text."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from omlx_cache.tools.chat_run import Listener, Turn

EXCERPT = 60


class Screen:
    """Draw one run's turns in a console; works the same on a terminal and in a pipe.

    Args:
        console: where to draw.
        name: the run's name, ``"stock"`` or ``"patched"``.
        messages: the user's messages, for an excerpt of each.
    """

    def __init__(self, console: Console, name: str, messages: Sequence[str]) -> None:
        self._console = console
        self._name = name
        self._messages = messages
        self._waiting: Status | None = None
        self._in_text = False
        console.rule(name)

    def listener(self) -> Listener:
        """Return what ``run_chat`` calls."""
        return Listener(begin=self._begin, text=self._text, end=self._end)

    def _begin(self, number: int, context_tokens: int, new_tokens: int) -> None:
        excerpt = " ".join(self._messages[number].split())[:EXCERPT]
        self._console.print(
            f"\n[bold]{self._name}, turn {number + 1}/{len(self._messages)}[/bold]: {new_tokens:,} "
            f"new tokens, "
            f"{context_tokens:,} in the cache\n[dim]user: {escape(excerpt)} ...[/dim]",
            highlight=False,
        )
        self._waiting = self._console.status("reading")
        self._waiting.start()

    def _text(self, piece: str) -> None:
        if not piece:
            return
        self._stop_waiting()
        self._in_text = True
        self._console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)

    def _end(self, turn: Turn) -> None:
        self._stop_waiting()
        if self._in_text:
            self._console.print()
        self._in_text = False
        speed = (
            f", {turn.decode_tokens / turn.decode_seconds:.1f} tokens/s"
            if turn.decode_tokens
            else ""
        )
        self._console.print(
            f"[dim]first token after {turn.first_token_seconds:.2f} s{speed}, cache "
            f"{turn.cache.now / 2**20:.2f} MiB[/dim]",
            highlight=False,
        )

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.stop()
            self._waiting = None
