"""The chat command at a terminal: a real one with Ctrl-C typed as a character."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console
from tiny_chat import save_tiny_chat_model

import omlx_cache
from omlx_cache.tools.chat_loop import Loop
from omlx_cache.tools.chat_room import ChatRoom
from omlx_cache.tools.loading import load_model, load_tokenizer

PATIENCE = 120.0  # seconds; a start takes some ten on two busy cores
CTRL_C = b"\x03"


class Terminal:
    """A process in a terminal of its own."""

    def __init__(self, command: list[str]) -> None:
        self.output = b""
        self.pid, self._descriptor = pty.fork()
        if not self.pid:
            os.environ["TERM"] = "xterm"
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a background job ignores it
            os.execv(command[0], command)

    def type(self, keys: bytes) -> None:
        """Press keys, and forget what was printed so far."""
        self.output = b""
        os.write(self._descriptor, keys)

    def interrupt(self) -> None:
        """Press Ctrl-C, once what waits for a line really waits.

        Python (3.11 to 3.14) notices a signal that comes after the prompt was written, but before
        readline waits for a key, at the next key only.
        """
        time.sleep(1.0)
        self.type(CTRL_C)

    def wait_for(self, is_there: Callable[[bytes], object]) -> None:
        """Read what is printed until it is what is waited for."""
        end = time.monotonic() + PATIENCE
        while not is_there(self.output):
            ready, _, _ = select.select([self._descriptor], [], [], end - time.monotonic())
            assert ready, self.output
            try:
                data = os.read(self._descriptor, 65536)
            except OSError:  # how Linux says that the other side is closed
                data = b""
            assert data, self.output
            self.output += data

    def exit_code(self) -> int:
        """Wait until the process has ended."""
        try:
            self.wait_for(lambda output: False)
        except AssertionError:
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def close(self) -> None:
        """End the process if it runs."""
        os.close(self._descriptor)  # hangs up
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def prompt(output: bytes) -> bool:
    return re.sub(rb"\x1b\[\??[\d;]*[a-zA-Z]", b"", output).endswith(b"> ")


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    model = save_tiny_chat_model(tmp_path, eos_token_id=None)
    command = [sys.executable, "-m", "omlx_cache.tools.chat", "--model", str(model)]
    opened = Terminal([*command, "--device", "cpu", "--max-new-tokens", "3000"])
    try:
        yield opened
    finally:
        opened.close()


def test_ctrl_c_stops_the_answer_and_not_the_program(terminal: Terminal):
    terminal.wait_for(prompt)
    terminal.type(b"Hello \\\n")
    terminal.wait_for(lambda output: output.endswith(b"... "))
    terminal.type(b"you\n")
    terminal.wait_for(lambda output: len(output.rpartition(b"reading")[2]) > 300)
    terminal.type(CTRL_C)
    terminal.wait_for(lambda output: b"stopped | prompt" in output and prompt(output))
    terminal.type(b"/history\n")
    terminal.wait_for(prompt)
    assert b"user: Hello \r\nyou\r\nassistant: " in terminal.output
    assert len(terminal.output) > 200, "what was said is not in the chat"

    terminal.type(b"/lod x\n")
    terminal.wait_for(prompt)
    assert b"did you mean /load?" in terminal.output
    terminal.interrupt()
    terminal.wait_for(lambda output: b"Ctrl-C again" in output and prompt(output))
    terminal.type(b"/stats\n")
    terminal.wait_for(prompt)
    assert b"1 turn, " in terminal.output
    terminal.interrupt()
    terminal.wait_for(lambda output: b"Ctrl-C again" in output and prompt(output))
    terminal.interrupt()
    assert terminal.exit_code() == 0


def test_lines_that_go_on_errors_and_ctrl_d(tmp_path: Path, monkeypatch, capsys):
    directory = save_tiny_chat_model(tmp_path, eos_token_id=None)
    model = omlx_cache.patch(load_model(directory, device="cpu"), prefix_cache=True)
    room = ChatRoom(model, load_tokenizer(directory), None, {"max_new_tokens": 3})
    typed = ["two \\", "lines", "", "/undo", "/undo", "\udcff", KeyboardInterrupt, "Hi", EOFError]

    def read(prompt: str) -> str:
        item = typed.pop(0)
        if isinstance(item, str):
            return item
        raise item

    monkeypatch.setattr("builtins.input", read)
    Loop(room, Console(), Console(stderr=True)).terminal()
    out, notes = capsys.readouterr()
    assert "taken back: two \nlines" in out
    assert notes.count("| prompt ") == 2
    assert "error: there must be a turn to take back" in notes
    assert "error: the message must be UTF-8" in notes
    assert "Ctrl-C again, Ctrl-D or /exit leaves" in notes
    assert (room.num_turns, typed) == (1, [])
