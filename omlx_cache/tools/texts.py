"""Real English technical text without a download: the language reference that ships with CPython.

``pydoc_data.topics`` holds some 370,000 characters of documentation once its repetitions are
removed (a topic such as ``if`` repeats a section of ``compound``). Whole topics are dealt out to
three parts that share no paragraph, so that a model is never measured on what it was calibrated on:

    calibration   what GPTQ sees while it quantizes
    chat          the long user messages of the demo
    quality       what perplexity, KLD and top-1 agreement are measured on

Everything is deterministic for one version of Python; versions differ a little in the text.
"""

from __future__ import annotations

import functools
import re
from typing import Literal, get_args

from omlx_cache.tools.prepared import PreparationError

Part = Literal["calibration", "chat", "quality"]
SHARES: dict[Part, float] = {"calibration": 0.18, "chat": 0.22, "quality": 0.60}
LONG_PARAGRAPH = 40
MOSTLY_REPEATED = 0.5


def part_text(part: Part) -> str:
    """Return all text of a part, topic after topic.

    Args:
        part: ``"calibration"``, ``"chat"`` or ``"quality"``.

    Raises:
        ValueError: for another name.
        PreparationError: this Python comes without ``pydoc_data.topics``.

    Example:
        >>> len(part_text("quality")) > 100_000
        True
    """
    if part not in SHARES:
        raise ValueError(f"part_text: part must be one of {get_args(Part)}, got {part!r}")
    return _parts()[part]


def token_ids(part: Part, tokenizer, count: int, offset: int = 0) -> list[int]:
    """Return ``count`` consecutive tokens of a part, without special tokens.

    Args:
        part: see ``part_text``.
        tokenizer: a Hugging Face tokenizer.
        count: number of tokens, >= 0.
        offset: number of tokens of the part to skip first.

    Raises:
        ValueError: the part has fewer than ``offset + count`` tokens.
    """
    ids = tokenizer(part_text(part), add_special_tokens=False, verbose=False)["input_ids"]
    if count < 0 or offset < 0 or offset + count > len(ids):
        raise ValueError(
            f"token_ids: part {part!r} has {len(ids)} tokens with this tokenizer, asked for "
            f"{offset} + {count}; ask for fewer, or take the part 'quality' (the longest)"
        )
    return ids[offset : offset + count]


def passages(part: Part, count: int, size: int, tokenizer=None) -> list[str]:
    """Return ``count`` consecutive passages of whole lines that don't overlap.

    Args:
        part: see ``part_text``.
        count: number of passages.
        size: length of each, at most: in tokens of ``tokenizer`` counted line by line, in
            characters without one. Only a passage of a single line may be longer.
        tokenizer: a Hugging Face tokenizer, or None.

    Returns:
        ``count`` strings, each within one line's length of ``size``.

    Raises:
        ValueError: ``count`` or ``size`` is below 1, or the part is too short for them.

    Example:
        >>> first, second = passages("chat", count=2, size=300)
        >>> len(first) <= 300 and first != second
        True
    """
    if count < 1 or size < 1:
        raise ValueError(
            f"passages: count and size must be at least 1, got count={count}, size={size}"
        )
    lines = part_text(part).splitlines(keepends=True)
    lengths = _line_lengths(lines, tokenizer)
    found: list[str] = []
    current: list[str] = []
    used = 0
    for line, length in zip(lines, lengths, strict=True):
        if current and used + length > size:
            found.append("".join(current).strip())
            if len(found) == count:
                return found
            current, used = [], 0
        if current or line.strip():
            current.append(line)
            used += length
    unit = "characters" if tokenizer is None else "tokens"
    raise ValueError(
        f"passages: part {part!r} holds {len(found)} passages of {size} {unit} ({sum(lengths)} "
        f"{unit} in all), asked for {count}; ask for fewer or shorter ones"
    )


def _line_lengths(lines: list[str], tokenizer) -> list[int]:
    if tokenizer is None:
        return [len(line) for line in lines]
    return [len(ids) for ids in tokenizer(lines, add_special_tokens=False)["input_ids"]]


@functools.cache
def _parts() -> dict[Part, str]:
    """Deal whole topics to the part that is furthest below its share, longest topic first."""
    dealt: dict[Part, list[str]] = {part: [] for part in SHARES}
    sizes = dict.fromkeys(SHARES, 0)
    for text in _topics_without_repetition():
        part = min(SHARES, key=lambda name: sizes[name] / SHARES[name])
        dealt[part].append(text)
        sizes[part] += len(text)
    return {part: "\n\n".join(texts) + "\n" for part, texts in dealt.items()}


def _topics_without_repetition() -> list[str]:
    """Return the topics, longest first, without what an earlier one had already said."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise PreparationError(
            "texts: this Python comes without pydoc_data.topics, the text that calibration and the "
            "demo use; install your distribution's full Python standard library"
        ) from error
    seen: set[str] = set()
    texts = []
    for name in sorted(topics, key=lambda topic: (-len(topics[topic]), topic)):
        paragraphs = [p.rstrip() for p in re.split(r"\n[ \t]*\n", topics[name]) if p.strip()]
        fresh = [p for p in paragraphs if _key(p) not in seen]
        length = sum(map(len, paragraphs))
        if length and sum(map(len, fresh)) >= MOSTLY_REPEATED * length:
            texts.append("\n\n".join(_unique(fresh)))
        seen.update(_key(p) for p in paragraphs if len(_key(p)) >= LONG_PARAGRAPH)
    return texts


def _unique(paragraphs: list[str]) -> list[str]:
    """Drop a long paragraph that comes again; short ones ("For example:") may."""
    kept: list[str] = []
    seen: set[str] = set()
    for paragraph in paragraphs:
        key = _key(paragraph)
        if key in seen:
            continue
        if len(key) >= LONG_PARAGRAPH:
            seen.add(key)
        kept.append(paragraph)
    return kept


def _key(paragraph: str) -> str:
    return " ".join(paragraph.split())
