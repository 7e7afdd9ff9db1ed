"""The chat that a terminal or a pipe talks to: the session, how it answers, and its sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import omlx_cache
from omlx_cache.config import CacheConfig
from omlx_cache.patch_state import state_of
from omlx_cache.storage.saved_chat import is_saved_chat
from omlx_cache.tools.chat_answer import Answer, answer
from omlx_cache.tools.errors import WrongSettingError, setting_errors


@dataclass
class Sums:
    """What all answers took together; attributes as those of `Answer`."""

    answers: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    first_token_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_tokens: int = 0

    def add(self, turn: Answer) -> None:
        """Count an answer."""
        self.answers += 1
        self.tokens += turn.tokens
        self.prompt_tokens += turn.prompt_tokens
        self.reused_tokens += turn.reused_tokens
        self.first_token_seconds += turn.first_token_seconds or 0.0
        self.decode_seconds += turn.decode_seconds
        self.decode_tokens += max(0, turn.tokens - 1)


class ChatRoom:
    """One chat at a time with one model.

    Args:
        model: patched, with ``prefix_cache``.
        tokenizer: its tokenizer.
        system: the system prompt; None leaves it to the chat template.
        generation: for ``model.generate``; ``max_new_tokens`` must be there.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tokenizer: Any,
        system: str | None,
        generation: dict[str, Any],
    ) -> None:
        self._model, self._tokenizer, self._system = model, tokenizer, system
        self._generation = generation
        self.sums = Sums()
        self.reset()

    @property
    def config(self) -> CacheConfig:
        """The cache's configuration."""
        return state_of(self._model).config

    @property
    def num_turns(self) -> int:
        """Turns of the chat."""
        return sum(entry["role"] == "user" for entry in self.chat.messages)

    def reset(self) -> None:
        """Begin anew, with the same system prompt."""
        self.chat = omlx_cache.ChatSession(self._model, self._tokenizer, system=self._system)

    def say(self, message: str, write: Callable[[str], None]) -> Answer:
        """Send a message; see `answer`."""
        return self._answer(message, write, None)

    def retry(self, write: Callable[[str], None]) -> Answer:
        """Answer the last message once more; the answer before it stays where that fails.

        Raises:
            WrongSettingError: there is none.
        """
        return self._answer(self._last_message(), write, self.num_turns - 1)

    def _answer(self, message: str, write: Callable[[str], None], turn: int | None) -> Answer:
        given = self._model, self._tokenizer, message, self._generation, write
        found = answer(self.chat, *given, turn=turn)
        self.sums.add(found)
        return found

    def undo(self) -> str:
        """Take the last turn back, and return its message.

        Raises:
            WrongSettingError: there is none.
        """
        message = self._last_message()
        self.chat.rewind(self.num_turns - 1)
        return message

    def _last_message(self) -> str:
        if not self.num_turns:
            raise WrongSettingError("there must be a turn to take back, got none; say something")
        return self.chat.messages[-2]["content"]

    def save(self, path: Path) -> None:
        """Write the chat into a file; one that is there already must be a chat.

        Raises:
            WrongSettingError: it can't be written, or something else is there.
        """
        if path.exists() and not is_saved_chat(path):
            raise WrongSettingError(
                f"{path} must be a new file or a saved chat, got something else of that name; "
                f"name another file"
            )
        try:
            self.chat.save(path)
        except OSError as error:
            raise WrongSettingError(
                f"{path} can't be written ({_reason(error)}); make room, or name a file in another "
                f"directory"
            ) from error

    def load(self, path: Path) -> None:
        """Go on with a chat that was saved.

        Raises:
            WrongSettingError: it can't be read, or is not one of this model; the chat stays.
            OutOfBlocksError: it doesn't fit.
        """
        try:
            with setting_errors():
                self.chat = omlx_cache.ChatSession.load(path, self._model, self._tokenizer)
        except WrongSettingError as error:
            if isinstance(error.__cause__, OSError):
                reason = _reason(error.__cause__)
                raise WrongSettingError(
                    f"{path} can't be read ({reason}); give a file that /save wrote"
                ) from error
            raise

    def report(self) -> omlx_cache.CacheReport | None:
        """Return what the cache held after the last answer; None before the first."""
        return omlx_cache.report(self._model) if self.sums.answers else None


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
