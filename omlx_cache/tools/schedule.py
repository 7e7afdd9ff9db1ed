"""In which pieces a text is fed to a model: chunks of the prompt, probes of decoding, the end.

Everything is teacher-forced, so the pieces only decide what is timed and observed, not the text::

    tokens  0 ....... 512 ....... 1028 ....... 1544 ....... 2016 .. 2048
    kind    [ prefill ]pp[ prefill ]pp[ prefill ]pp[ prefill ]pp[ decode ]     p: probe, one token
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PROBES, PROBE_TOKENS = 16, 4

Kind = Literal["prefill", "probe", "decode"]


@dataclass(frozen=True)
class Piece:
    """Tokens ``first .. last - 1``, fed in one call; probes and decode pieces are one token."""

    kind: Kind
    first: int
    last: int


def pieces(tokens: int, chunk: int | None, decode: int) -> list[Piece]:
    """Cut a text.

    Args:
        tokens: length of the text.
        chunk: tokens of a prefill piece; None is the whole prompt at once (then without probes).
        decode: tokens at the end that come one at a time; the rest is more than `PROBE_TOKENS`.

    Example:
        >>> [(p.kind, p.first, p.last) for p in pieces(30, 12, 2) if p.last - p.first > 1]
        [('prefill', 0, 12), ('prefill', 16, 24)]
        >>> [p.kind for p in pieces(30, 12, 2)][-6:]
        ['probe', 'probe', 'probe', 'probe', 'decode', 'decode']
    """
    prompt = tokens - decode
    chunked = prompt - PROBE_TOKENS  # the prompt ends with a probe
    step = chunk or chunked
    probe_every = max(1, round(chunked / step / PROBES))
    cut: list[Piece] = []
    first, chunks = 0, 0
    while first < chunked:
        last = min(first + step, chunked)
        cut.append(Piece("prefill", first, last))
        first, chunks = last, chunks + 1
        if chunks % probe_every == 0 and first + PROBE_TOKENS < chunked:
            cut += _tokens("probe", first, first + PROBE_TOKENS)
            first += PROBE_TOKENS
    return cut + _tokens("probe", chunked, prompt) + _tokens("decode", prompt, tokens)


def _tokens(kind: Kind, first: int, last: int) -> list[Piece]:
    return [Piece(kind, i, i + 1) for i in range(first, last)]
