"""What a line that begins with ``/`` does in the chat."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from omlx_cache.tools.chat_room import ChatRoom
from omlx_cache.tools.errors import WrongSettingError


class Leave(Exception):
    """The chat is over."""


class Retry(Exception):
    """The last message is to be answered once more."""


@dataclass(frozen=True)
class Command:
    """One command: what it takes, what it does, and how. ``run`` returns what to print."""

    argument: str
    words: str
    run: Callable[[ChatRoom, str], str]


def run_command(room: ChatRoom, line: str) -> str:
    """Run a line such as ``/save chat.omlx`` and return what to print.

    Raises:
        WrongSettingError: it can't be done; the message says why, in one line.
        Leave, Retry: the command asks for that.
        OutOfBlocksError: a chat that is loaded doesn't fit.
    """
    name, _, argument = line.strip().removeprefix("/").partition(" ")
    argument = argument.strip()
    command = COMMANDS.get(name)
    if command is None:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean /{near[0]}? " if near else ""
        raise WrongSettingError(
            f"unknown command /{name}; {hint}/help lists them, and a message that begins with / "
            f"needs a space before it"
        )
    if bool(argument) != bool(command.argument):
        expected = command.argument or "no argument"
        raise WrongSettingError(
            f"/{name} takes {expected}, got {argument or 'none'}; type {_usage(name)}"
        )
    return command.run(room, argument)


def _save(room: ChatRoom, path: str) -> str:
    room.save(Path(path).expanduser())
    return f"saved {path}: {_size(room)}"


def _load(room: ChatRoom, path: str) -> str:
    room.load(Path(path).expanduser())
    return f"loaded {path}: {_size(room)}"


def _reset(room: ChatRoom, argument: str) -> str:
    room.reset()
    return "a new chat"


def _undo(room: ChatRoom, argument: str) -> str:
    message = room.undo()
    return f"taken back: {message}"


def _retry(room: ChatRoom, argument: str) -> str:
    raise Retry


def _history(room: ChatRoom, argument: str) -> str:
    found = [f"{entry['role']}: {entry['content']}" for entry in room.chat.messages]
    return "\n".join(found) or "nothing was said yet"


def _stats(room: ChatRoom, argument: str) -> str:
    sums, report = room.sums, room.report()
    lines = [f"chat: {_size(room)}"]
    if report is None:
        return "\n".join([*lines, "cache: nothing was computed yet"])
    speed = (
        f", {sums.decode_tokens / sums.decode_seconds:.1f} tokens/s" if sums.decode_tokens else ""
    )
    first = sums.first_token_seconds / sums.answers
    return "\n".join(
        [
            *lines,
            f"answers: {sums.answers}, {sums.tokens:,} tokens{speed}, first token after "
            f"{first:.2f} s on average",
            f"prompts: {sums.prompt_tokens:,} tokens, {sums.reused_tokens:,} "
            f"({sums.reused_tokens / sums.prompt_tokens:.0%}) found in the cache",
            str(report),
        ]
    )


def _config(room: ChatRoom, argument: str) -> str:
    return room.config.to_yaml().rstrip()


def _help(room: ChatRoom, argument: str) -> str:
    width = max(len(_usage(name)) for name in COMMANDS)
    return "\n".join(f"{_usage(n):<{width}}  {c.words}" for n, c in COMMANDS.items())


def _exit(room: ChatRoom, argument: str) -> str:
    raise Leave


def _usage(name: str) -> str:
    return f"/{name} {COMMANDS[name].argument}".rstrip()


def _size(room: ChatRoom) -> str:
    turns = room.num_turns
    return f"{turns} turn{'' if turns == 1 else 's'}, {room.chat.num_tokens:,} tokens"


COMMANDS = {
    "save": Command("PATH", "write the chat into a file: text, tokens and cache blocks", _save),
    "load": Command(
        "PATH", "go on with a chat that /save wrote, without computing it again", _load
    ),
    "stats": Command("", "sizes, speeds and the cache", _stats),
    "config": Command("", "the cache's configuration, as YAML", _config),
    "history": Command("", "the chat so far", _history),
    "undo": Command("", "take the last message and its answer back", _undo),
    "retry": Command("", "ask for another answer in place of the last one", _retry),
    "reset": Command("", "begin anew, with the same system prompt", _reset),
    "help": Command("", "this list", _help),
    "exit": Command("", "leave; so does Ctrl-D", _exit),
}
