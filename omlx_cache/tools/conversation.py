"""User messages of real text, for chats that are measured."""

from __future__ import annotations

from omlx_cache.tools.texts import passages

QUESTIONS = (
    "In one short sentence, what is this text about?",
    "Which single rule in this text matters most? Answer in one short sentence.",
    "Name one keyword that this text mentions and what it does, in one short sentence.",
    "What should a beginner remember from this text? Answer in one short sentence.",
)


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
