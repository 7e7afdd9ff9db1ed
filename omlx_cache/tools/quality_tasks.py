"""What the quality of a cache is measured on, built from real text; everything teacher-forced.

One task is a text with needles::

    haystack ............................... [needle 1] [needle 2] ... [needle 5]
    |  scored for perplexity, KLD, top-1  |   a passage of the haystack comes again: its first
    `-- its second half ------------------'   tokens are the cue, the rest must be retrieved

the other a chat, in which the user sends messages and then asks for each of them to be repeated.
The answers are the messages' own beginnings. Both are read once, on one cache; what counts is
whether the right token is the most likely one, given the right tokens before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from omlx_cache.conversation import Conversation
from omlx_cache.tools.texts import passages

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
CUE, ANSWER = 16, 32


@dataclass
class Task:
    """Token ids, and what is asked at which of them.

    Attributes:
        name: of the task.
        ids: the text.
        asked: part name -> positions; at each the distribution of the next token is looked at.
    """

    name: str
    ids: list[int]
    asked: dict[str, list[int]] = field(default_factory=dict)

    def append_recalled(self, part: str, ids: Sequence[int]) -> None:
        """Append a cue and its continuation, and ask for each token of the continuation."""
        first = len(self.ids) + CUE - 1
        self.ids += ids[: CUE + ANSWER]
        self.asked.setdefault(part, []).extend(range(first, len(self.ids) - 1))

    def positions(self) -> list[int]:
        """Return every asked position, ascending."""
        return sorted(p for positions in self.asked.values() for p in positions)


def text_task(haystack: Sequence[int], scored: int, separator: Sequence[int]) -> Task:
    """Return the task over a text, with a needle from each of `DEPTHS` of it.

    Args:
        haystack: ids of the text.
        scored: how many of its last positions count for perplexity, KLD and top-1.
        separator: ids between the text and the needles, such as those of a blank line.

    Raises:
        ValueError: the text is too short for its needles.
    """
    size = len(haystack)
    if size < 4 * (CUE + ANSWER):
        raise ValueError(f"text_task: haystack must have {4 * (CUE + ANSWER)} tokens, got {size}")
    task = Task("text", list(haystack), {"text": list(range(size - scored, size))})
    for depth in DEPTHS:
        first = min(int(depth * size), size - CUE - ANSWER)
        task.ids += separator
        task.append_recalled("needle", haystack[first : first + CUE + ANSWER])
    return task


def chat_task(tokenizer, turns: int, tokens: int) -> Task:
    """Return a chat of ``turns`` messages, each of which the user then asks back.

    Args:
        tokenizer: a Hugging Face tokenizer, with or without a chat template.
        turns: messages.
        tokens: of each, about.

    Raises:
        ValueError: there is not enough text for so many or so long messages.
    """
    chat, task = Conversation(tokenizer), Task("chat", [])
    texts = passages("chat", turns, max(tokens, CUE + ANSWER), tokenizer)
    for number, text in enumerate(texts, 1):
        chat.ask(f"Message {number}:\n\n{text}")
        chat.answer(tokenizer("I have read it.", add_special_tokens=False)["input_ids"])
    for number, text in enumerate(texts, 1):
        task.ids = chat.ask(f"Repeat message {number}.")
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        task.append_recalled("recall", ids)
        chat.answer(ids[: CUE + ANSWER])
    return task
