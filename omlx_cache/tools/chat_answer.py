"""One answer of a chat in the terminal: streamed, timed, and stopped by Ctrl-C."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jinja2 import TemplateError

import omlx_cache
from omlx_cache.cache_report import CacheReport
from omlx_cache.compat import StoppingCriteria, StoppingCriteriaList
from omlx_cache.tools.chat_run import TimedStreamer
from omlx_cache.tools.errors import WrongSettingError


@dataclass(frozen=True)
class Answer:
    """What was measured of one answer.

    Attributes:
        tokens: that were generated, the one that ends the answer included.
        prompt_tokens: of the whole chat up to the answer.
        reused_tokens: those of them that were found in the cache.
        first_token_seconds: from the message to the answer's first token; None without one.
        decode_seconds: the time that the other tokens took.
        is_stopped: whether Ctrl-C ended it.
        is_cut: whether it ended at the most tokens that were allowed.
        report: the cache after it.
    """

    tokens: int
    prompt_tokens: int
    reused_tokens: int
    first_token_seconds: float | None
    decode_seconds: float
    is_stopped: bool
    is_cut: bool
    report: CacheReport


class Interrupts:
    """What Ctrl-C does during an answer.

    Before the first token nothing was said yet: it raises, and the turn is taken back. Afterwards
    it asks the answer to end at its next token, so that what was said stays. A second one raises.
    """

    def __init__(self, streamer: TimedStreamer) -> None:
        self._streamer = streamer
        self.is_asked = False

    def __call__(self, signal_number: int, frame: Any) -> None:
        """Handle SIGINT."""
        if self.is_asked or not self._streamer.times:
            raise KeyboardInterrupt
        self.is_asked = True

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Be the handler for a while."""
        before = signal.signal(signal.SIGINT, self)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


class StopWhenAsked(StoppingCriteria):
    """Ends ``generate`` after the token at which Ctrl-C was pressed."""

    def __init__(self, interrupts: Interrupts) -> None:
        self._interrupts = interrupts

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Say of each row of ``input_ids`` whether it ends here, [rows] bool."""
        asked = self._interrupts.is_asked
        return torch.full((input_ids.shape[0],), asked, device=input_ids.device)


def answer(
    chat: omlx_cache.ChatSession,
    model: torch.nn.Module,
    tokenizer: Any,
    message: str,
    generation: dict[str, Any],
    write: Callable[[str], None],
    turn: int | None = None,
) -> Answer:
    """Send a message, and hand the answer to ``write`` as it comes.

    Args:
        chat, model, tokenizer: what answers.
        message: of the user.
        generation: for ``model.generate``.
        write: gets pieces of text.
        turn: the turn that the message replaces, with all that followed it; None: it is a new one.

    Raises:
        KeyboardInterrupt: Ctrl-C before the answer's first token, or twice; the chat is as before.
        WrongSettingError: the tokenizer's chat template refuses the chat.
        Whatever ``generate`` raises; the chat is as before.
    """
    streamer = TimedStreamer(tokenizer, write)
    interrupts = Interrupts(streamer)
    send = chat.send if turn is None else partial(chat.edit, turn)
    started = time.perf_counter()
    with interrupts.handled():
        try:
            send(
                message,
                streamer=streamer,
                stopping_criteria=StoppingCriteriaList([StopWhenAsked(interrupts)]),
                **generation,
            )
        except TemplateError as error:
            raise WrongSettingError(
                f"the tokenizer's chat template must take this chat, it refuses: {error}; where it "
                f"knows no system prompt, leave out --system"
            ) from error
    times = streamer.times
    return Answer(
        tokens=len(times),
        prompt_tokens=chat.prompt_tokens,
        reused_tokens=chat.reused_tokens,
        first_token_seconds=times[0] - started if times else None,
        decode_seconds=times[-1] - times[0] if times else 0.0,
        is_stopped=interrupts.is_asked,
        is_cut=len(times) == generation["max_new_tokens"],
        report=omlx_cache.report(model),
    )


def status_line(turn: Answer) -> str:
    """Say in one line what an answer took, and what the cache holds."""
    parts = [f"{turn.tokens} tokens"]
    if turn.tokens > 1 and turn.decode_seconds:
        parts.append(f"{(turn.tokens - 1) / turn.decode_seconds:.1f} tokens/s")
    if turn.first_token_seconds is not None:
        parts.append(f"first after {turn.first_token_seconds:.2f} s")
    if turn.is_stopped:
        parts.append("stopped")
    elif turn.is_cut:
        parts.append("cut at --max-new-tokens")
    hit_rate = turn.reused_tokens / turn.prompt_tokens
    prompt = f"prompt {turn.prompt_tokens:,} tokens, {hit_rate:.0%} reused"
    return f"[{', '.join(parts)} | {prompt} | {cache_words(turn.report)}]"


def cache_words(report: CacheReport) -> str:
    """Say what a cache takes: bytes, by tier, and blocks."""
    tiers = [
        f"{name} {size / 1e6:.2f}"
        for name, size in report.bytes_by_tier.items()
        if size >= 5000 or size == report.total_bytes
    ]
    return (
        f"cache {report.total_bytes / 1e6:.2f} MB ({', '.join(tiers)}), "
        f"{report.active_blocks}/{report.total_blocks} blocks"
    )


_CONTROL = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """Leave out control characters, with which an answer could draw anything on a terminal.

    Example:
        >>> printable("red: \\x1b[31m\\tend\\n")
        'red: [31m\\tend\\n'
    """
    return text.translate(_CONTROL)
