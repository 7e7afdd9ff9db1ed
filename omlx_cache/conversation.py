"""A chat as token ids that only ever grow: a turn adds its tokens behind those a cache holds.

Rendering the whole chat again at each turn could tokenize an old answer differently from the tokens
that were generated, and then no cache could be reused. So a turn is rendered once, as the text
between the previous answer and the next one, and appended:

    <system, user 1, "assistant:">  answer 1  <end, user 2, "assistant:">  answer 2  <end, ...
    `------ opening ids -------'   generated  `--- continuation ids ---'  generated
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

ANSWER_MARK = "\u241e\u241eanswer\u241e\u241e"


class Conversation:
    """Grow one chat's token ids turn by turn.

    Args:
        tokenizer: a Hugging Face tokenizer. Without a chat template, ``User:`` / ``Assistant:`` in
            plain text stand in for one, and ``has_template`` is False.
        end_ids: the tokens that end an answer (``generation_config.eos_token_id``).
        system: the system prompt; None leaves it to the template.

    Example:
        >>> chat = Conversation(tokenizer, end_ids={2})           # doctest: +SKIP
        >>> ids = chat.ask("What is 1 + 1?")                      # doctest: +SKIP
        >>> chat.answer([34, 2])                                  # doctest: +SKIP
        >>> longer = chat.ask("And 2 + 2?")                       # doctest: +SKIP
        >>> longer[: len(ids) + 1] == [*ids, 34]                  # doctest: +SKIP
        True
    """

    def __init__(
        self,
        tokenizer,
        end_ids: Sequence[int] | set[int] = (),
        *,
        system: str | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._end_ids = frozenset(end_ids)
        self._system = system
        self._ids: list[int] = []
        self._starts: list[int] = []  # of each turn's ids
        self._answered = True
        self.has_template = bool(getattr(tokenizer, "chat_template", None))

    def ask(self, message: str) -> list[int]:
        """Append a user message and return the ids of the whole chat, ready for the next answer.

        Raises:
            ValueError: the last message has no answer yet.
        """
        if not self._answered:
            raise ValueError(
                "Conversation.ask: the last message has no answer yet; call answer(ids) first"
            )
        text = self._continuation(message) if self._starts else self._opening(message)
        self._starts.append(len(self._ids))
        self._ids += self._tokenizer(text, add_special_tokens=False)["input_ids"]
        self._answered = False
        return list(self._ids)

    def answer(self, ids: Sequence[int]) -> None:
        """Append the answer's ids, without its end token: the next turn's text begins with that."""
        ids = list(ids)
        while ids and ids[-1] in self._end_ids:
            ids.pop()
        self._ids += ids
        self._answered = True

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return len(self._ids)

    @property
    def ids(self) -> list[int]:
        """The token ids so far; a copy."""
        return list(self._ids)

    @property
    def num_turns(self) -> int:
        """User messages so far."""
        return len(self._starts)

    def to_data(self) -> dict[str, list[int]]:
        """Return the ids, and where each turn's begin, as plain data for JSON.

        Raises:
            RuntimeError: the last message has no answer yet.
        """
        if not self._answered:
            raise RuntimeError(
                "Conversation.to_data: the last message must have its answer, got none yet; wait "
                "for the turn that is running"
            )
        return {"ids": list(self._ids), "starts": list(self._starts)}

    def restore(self, data: Mapping[str, Sequence[int]]) -> None:
        """Become the chat that `to_data` returned, with this tokenizer and system prompt."""
        self._ids, self._starts = list(data["ids"]), list(data["starts"])
        self._answered = True

    def rewind(self, turn: int) -> None:
        """Forget a turn and all that follow it, answered or not.

        Args:
            turn: number of the turn, counted from 0.

        Raises:
            ValueError: there is no such turn.
        """
        if not 0 <= turn < len(self._starts):
            raise ValueError(
                f"Conversation.rewind: turn must be from 0 to {len(self._starts) - 1}, got {turn}; "
                f"num_turns says how many there are"
            )
        del self._ids[self._starts[turn] :], self._starts[turn:]
        self._answered = True

    def _opening(self, message: str) -> str:
        if not self.has_template:
            system = "" if self._system is None else f"{self._system}\n"
            return f"{system}User: {message}\nAssistant:"
        first = [] if self._system is None else [{"role": "system", "content": self._system}]
        return self._render([*first, {"role": "user", "content": message}])

    def _continuation(self, message: str) -> str:
        if not self.has_template:
            return f"\nUser: {message}\nAssistant:"
        rendered = self._render(
            [
                {"role": "user", "content": "-"},
                {"role": "assistant", "content": ANSWER_MARK},
                {"role": "user", "content": message},
            ]
        )
        _, mark, rest = rendered.rpartition(ANSWER_MARK)
        if not mark:
            raise ValueError(
                "Conversation: the tokenizer's chat template does not render the assistant's "
                "messages; use a tokenizer whose template does, or one without a template"
            )
        return rest

    def _render(self, messages: list[dict[str, str]]) -> str:
        return self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
