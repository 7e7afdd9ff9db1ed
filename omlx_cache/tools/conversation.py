"""A chat as token ids that only ever grow: a turn adds its tokens behind those a cache holds.

Rendering the whole chat again at each turn could tokenize an old answer differently from the tokens
that were generated, and then no cache could be reused. So a turn is rendered once, as the text
between the previous answer and the next one, and appended:

    <system, user 1, "assistant:">  answer 1  <end, user 2, "assistant:">  answer 2  <end, ...
    `------ opening ids -------'   generated  `--- continuation ids ---'  generated
"""

from __future__ import annotations

from collections.abc import Sequence

from omlx_cache.tools.texts import passages

QUESTIONS = (
    "In one short sentence, what is this text about?",
    "Which single rule in this text matters most? Answer in one short sentence.",
    "Name one keyword that this text mentions and what it does, in one short sentence.",
    "What should a beginner remember from this text? Answer in one short sentence.",
)
ANSWER_MARK = "\u241e\u241eanswer\u241e\u241e"


def long_messages(tokenizer, count: int, tokens: int) -> list[str]:
    """Return ``count`` user messages: about ``tokens`` tokens of real text, then a question.

    Raises:
        ValueError: there is not enough text for so many or so long messages.
    """
    texts = passages("chat", count, tokens, tokenizer)
    return [
        f"Read this text.\n\n{text}\n\n{QUESTIONS[number % len(QUESTIONS)]}"
        for number, text in enumerate(texts)
    ]


class Conversation:
    """Grow one chat's token ids turn by turn.

    Args:
        tokenizer: a Hugging Face tokenizer. Without a chat template, ``User:`` / ``Assistant:`` in
            plain text stand in for one, and ``has_template`` is False.
        end_ids: the tokens that end an answer (``generation_config.eos_token_id``).

    Example:
        >>> chat = Conversation(tokenizer, end_ids={2})           # doctest: +SKIP
        >>> ids = chat.ask("What is 1 + 1?")                      # doctest: +SKIP
        >>> chat.answer([34, 2])                                  # doctest: +SKIP
        >>> longer = chat.ask("And 2 + 2?")                       # doctest: +SKIP
        >>> longer[: len(ids) + 1] == [*ids, 34]                  # doctest: +SKIP
        True
    """

    def __init__(self, tokenizer, end_ids: Sequence[int] | set[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._end_ids = frozenset(end_ids)
        self._ids: list[int] = []
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
        text = self._continuation(message) if self._ids else self._opening(message)
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

    def _opening(self, message: str) -> str:
        if not self.has_template:
            return f"User: {message}\nAssistant:"
        return self._render([{"role": "user", "content": message}])

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
