"""`ChatSession`: hold a chat turn by turn, of which each turn computes only what is new."""

from __future__ import annotations

import os
from typing import Any

import torch

from omlx_cache.cache import PagedCache
from omlx_cache.compat import PreTrainedModel, cache_name
from omlx_cache.conversation import Conversation
from omlx_cache.patch_state import state_of
from omlx_cache.prefetching import prefetch
from omlx_cache.reuse import Settings, begin_with_known
from omlx_cache.storage.saved_chat import load_chat, save_chat
from omlx_cache.unwrap import unwrap


class ChatSession:
    """One chat with a model that is patched with ``prefix_cache=True``.

    The chat is kept as token ids that only grow (`Conversation`), and every turn is a
    ``generate`` over all of them. What an earlier turn has left is found by these ids, so a turn
    computes its own message alone; after an `edit`, from there on; and sessions with one system
    prompt compute it once. What has been dropped in the meantime is computed again.

    Args:
        model: the patched model; several sessions may use it, also from several threads.
        tokenizer: its tokenizer.
        system: the system prompt; None leaves it to the tokenizer's chat template.

    Attributes:
        messages: the chat so far, as ``{"role": ..., "content": ...}``; a copy.
        prompt_tokens: tokens of the last turn's prompt: the whole chat up to its answer.
        reused_tokens: those of them that were not computed again.

    Raises:
        ValueError: when the model is not patched, or without ``prefix_cache``.

    Example:
        >>> omlx_cache.patch(model, prefix_cache=True)                       # doctest: +SKIP
        >>> chat = omlx_cache.ChatSession(model, tokenizer, system="Be brief.")  # doctest: +SKIP
        >>> chat.send("What is paging?", max_new_tokens=64)                  # doctest: +SKIP
        >>> chat.edit(0, "What is a page?", max_new_tokens=64)               # doctest: +SKIP
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, *, system: str | None = None
    ) -> None:
        if not state_of(model).config.prefix_cache:
            raise ValueError(
                "ChatSession: the model must be patched with prefix_cache=True, got False; call "
                "omlx_cache.patch(model, prefix_cache=True)"
            )
        self._model, self._tokenizer, self._system = model, tokenizer, system
        self._end_ids = _end_ids(model)
        self._chat = Conversation(tokenizer, self._end_ids, system=system)
        self._turns: list[tuple[str, str]] = []  # message and answer
        self.prompt_tokens = self.reused_tokens = 0
        if system is not None and state_of(model).config.disk_cache:
            opening = Conversation(tokenizer, self._end_ids, system=system).ask("-")
            prefetch(model, torch.tensor(opening))

    @property
    def num_tokens(self) -> int:
        """Tokens of the chat so far."""
        return self._chat.num_tokens

    @property
    def messages(self) -> list[dict[str, str]]:
        """The chat so far."""
        found = [] if self._system is None else [{"role": "system", "content": self._system}]
        for message, answer in self._turns:
            found.append({"role": "user", "content": message})
            found.append({"role": "assistant", "content": answer})
        return found

    def send(self, message: str, **generation: Any) -> str:
        """Send a message and return the answer.

        Args:
            message: of the user.
            **generation: for ``model.generate``, such as ``max_new_tokens`` or ``streamer``.

        Raises:
            Whatever ``generate`` raises; the chat is then as it was.
        """
        ids = self._chat.ask(message)
        try:
            answer = self._generate(ids, generation)
        except BaseException:
            self._chat.rewind(len(self._turns))
            raise
        self._chat.answer(answer)
        text = self._tokenizer.decode(answer, skip_special_tokens=True)
        self._turns.append((message, text))
        return text

    def _generate(self, ids: list[int], generation: dict[str, Any]) -> list[int]:
        """Return the ids of an answer, on a cache that begins with what is known."""
        inputs = torch.tensor([ids], device=next(self._model.parameters()).device)
        given = {"attention_mask": torch.ones_like(inputs), **generation}
        if self._tokenizer.pad_token_id is not None:
            given.setdefault("pad_token_id", self._tokenizer.pad_token_id)
        inner, cache = unwrap(self._model), PagedCache.for_patch(state_of(self._model))
        settings = Settings(inner, given.get("generation_config"), given)
        begin_with_known(cache, inputs, settings)
        self.prompt_tokens, self.reused_tokens = len(ids), cache.reused_tokens
        given[cache_name(type(inner).forward)] = cache
        try:
            output = self._model.generate(input_ids=inputs, **given)
        finally:
            cache.keep()
            state_of(self._model).used(cache, snapshot=True)
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        return sequences[0, len(ids) :].tolist()

    def prefetch(self) -> None:
        """Begin to read what the disk has of the chat: best when its user begins to type.

        Opening a session does so for its system prompt, and `load` for the whole chat; later turns
        find the chat in memory, unless others have taken its place there. See
        `omlx_cache.prefetch`.
        """
        if self._chat.num_tokens:
            prefetch(self._model, torch.tensor(self._chat.ids))

    def edit(self, turn: int, message: str, **generation: Any) -> str:
        """Replace the message of a turn, forget what followed, and return the new answer.

        Args:
            turn: number of the turn, counted from 0.
            message, **generation: as in `send`.

        Raises:
            ValueError: there is no such turn.
            Whatever ``generate`` raises; the chat is then as it was.
        """
        chat, turns = self._chat.to_data(), list(self._turns)
        self.rewind(turn)
        try:
            return self.send(message, **generation)
        except BaseException:
            self._chat.restore(chat)
            self._turns = turns
            raise

    def rewind(self, turn: int) -> None:
        """Forget a turn and all that followed.

        Args:
            turn: number of the turn, counted from 0.

        Raises:
            ValueError: there is no such turn.
        """
        self._chat.rewind(turn)
        del self._turns[turn:]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the chat into a file: its messages, its token ids and its cache blocks.

        The blocks are those that the prefix store has now: the longest beginning of the chat of
        which none has left, quantized as it is. What follows that beginning (all of the chat, where
        its first blocks are gone, or the weights have changed since) is kept as token ids, and the
        first turn after `load` computes it again; so it does the last token of the last answer,
        which no turn has read yet.

        Args:
            path: of the file, which replaces one of that name in one go.

        Raises:
            OSError: the file can't be written; one of that name is as it was.
            RuntimeError: a turn is running.
            ValueError: the model isn't patched any more.
        """
        chat = {"system": self._system, "turns": self._turns, **self._chat.to_data()}
        save_chat(path, self._model, self._tokenizer, chat)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], model: PreTrainedModel, tokenizer: Any
    ) -> ChatSession:
        """Read a chat that `save` wrote, and put its blocks back into the prefix store.

        The next turn then computes what a turn of the saved chat would have computed, and says the
        same.

        Args:
            path: of the file.
            model: the model that the chat was held with, patched as it was then.
            tokenizer: the tokenizer that the chat was held with.

        Raises:
            OSError: the file can't be read.
            ValueError: it is damaged or no chat, or one of another model, tokenizer, chat template
                or cache format; the message says which. Nothing is changed then.
            OutOfBlocksError: the blocks are more than ``max_gpu_blocks``.
        """
        session = cls(model, tokenizer)
        chat = load_chat(path, model, tokenizer)
        session._system = chat["system"]
        session._turns = [(message, answer) for message, answer in chat["turns"]]
        session._chat = Conversation(tokenizer, session._end_ids, system=session._system)
        session._chat.restore(chat)
        session.prefetch()
        return session


def _end_ids(model: PreTrainedModel) -> set[int]:
    ids = model.generation_config.eos_token_id
    return set() if ids is None else {ids} if isinstance(ids, int) else set(ids)
