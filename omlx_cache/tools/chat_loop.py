"""Talk to a `ChatRoom`: at a terminal, or line by line in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

import torch
from rich.console import Console
from rich.status import Status

import omlx_cache
from omlx_cache.tools.chat_answer import Answer, printable, status_line
from omlx_cache.tools.chat_commands import Leave, Retry, run_command
from omlx_cache.tools.chat_room import ChatRoom
from omlx_cache.tools.errors import NotServedError, WrongSettingError

PROMPT, MORE = "> ", "... "
LEAVE_HINT = "Ctrl-C again, Ctrl-D or /exit leaves"

GOES_ON_AFTER = (
    WrongSettingError,
    NotServedError,
    omlx_cache.OutOfBlocksError,
    torch.OutOfMemoryError,
    MemoryError,
)
"""What ends a pipe, and is one line at a terminal: the chat is as it was before."""


class Loop:
    """Hold a chat.

    Args:
        room: the chat.
        out: where answers go, and what commands print.
        notes: where the lines about an answer go, and errors.
    """

    def __init__(self, room: ChatRoom, out: Console, notes: Console) -> None:
        self._room, self._out, self._notes = room, out, notes
        self._waiting: Status | None = None

    def pipe(self) -> None:
        """Take one message a line from standard input, up to its end.

        Raises:
            WrongSettingError: standard input is no text, or a command can't be done.
            KeyboardInterrupt: Ctrl-C stopped an answer; nobody is there to go on.
            Whatever ``generate`` raises.
        """
        with suppress(Leave):
            for line in _lines():
                if line.strip() and self._take(line):
                    raise KeyboardInterrupt

    def terminal(self) -> None:
        """Ask for messages until the user leaves."""
        with suppress(ImportError):
            import readline  # noqa: F401 -- gives input() its editing and history
        self._note("type a message, or /help; Ctrl-C stops an answer")
        was_interrupted = False
        while True:
            try:
                line = _ask()
            except EOFError:
                self._out.print()
                return
            except KeyboardInterrupt:
                self._out.print()
                if was_interrupted:
                    return
                was_interrupted = True
                self._note(LEAVE_HINT)
                continue
            except UnicodeError:
                self._error("the message must be UTF-8, got other bytes; it was not sent")
                continue
            was_interrupted = False
            if not line.strip():
                continue
            try:
                self._take(line)
            except Leave:
                return
            except KeyboardInterrupt:
                self._out.print()
                self._note("stopped before an answer; the chat is as it was")
            except GOES_ON_AFTER as error:
                self._error(str(error) or type(error).__name__)

    def _take(self, line: str) -> bool:
        """Run a command or send a message; return whether Ctrl-C stopped an answer."""
        if not line.startswith("/"):
            return self._say(partial(self._room.say, line.strip()))
        try:
            text = run_command(self._room, line)
        except Retry:
            return self._say(self._room.retry)
        self._write(f"{text}\n")
        return False

    def _say(self, ask: Callable[[Callable[[str], None]], Answer]) -> bool:
        if self._notes.is_terminal:
            self._waiting = self._notes.status("reading")
            self._waiting.start()
        try:
            turn = ask(self._write)
        finally:
            self._stop_waiting()
        self._write("\n")
        self._note(status_line(turn))
        return turn.is_stopped

    def _write(self, text: str) -> None:
        if text:
            self._stop_waiting()
            self._out.file.write(printable(text))
            self._out.file.flush()

    def _note(self, text: str) -> None:
        self._notes.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)

    def _error(self, text: str) -> None:
        self._notes.print(f"error: {text}", markup=False, highlight=False, soft_wrap=True)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.stop()
            self._waiting = None


def _lines() -> Iterator[str]:
    for number, data in enumerate(sys.stdin.buffer, 1):
        try:
            if b"\0" in data:
                raise ValueError("a zero byte")
            yield data.decode("utf-8-sig" if number == 1 else "utf-8")
        except ValueError as error:
            reason = error.reason if isinstance(error, UnicodeDecodeError) else str(error)
            raise WrongSettingError(
                f"standard input must be UTF-8 text, one message a line, got {reason} in line "
                f"{number}; convert it, e.g. iconv -f latin1 -t utf-8"
            ) from error


def _ask() -> str:
    """Read a message; a line that ends in a backslash goes on in the next one."""
    is_shown = sys.stdout.isatty()
    lines = [input(PROMPT if is_shown else "")]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input(MORE if is_shown else ""))
    text = "\n".join(lines)
    text.encode()  # a terminal of another encoding leaves surrogates
    return text
