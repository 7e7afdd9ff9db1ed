"""Hold one chat on one cache and measure it: one loop for the stock cache and the paged one.

Each turn calls ``model.generate`` with the ids of the whole chat and the cache of the turns before,
so that only the new tokens are computed, and takes the time of each token as the streamer hands it
out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from transformers.generation.streamers import TextStreamer

from omlx_cache.tools.conversation import Conversation


@dataclass(frozen=True)
class Bytes:
    """Memory of a cache, in bytes: now, and the most so far."""

    now: int
    peak: int


@dataclass
class Turn:
    """What was measured in one turn. Times in seconds, ``decode_*`` without the first token."""

    context_tokens: int
    new_tokens: int
    first_token_seconds: float
    decode_tokens: int
    decode_seconds: float
    cache: Bytes
    answer_ids: list[int]
    answer: str


@dataclass
class ChatRun:
    """One chat on one cache."""

    turns: list[Turn] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    gpu_peak_bytes: int | None = None

    def speed(self, turns: slice) -> float | None:
        """Return tokens per second over some turns, or None where no answer had a second token."""
        tokens = sum(turn.decode_tokens for turn in self.turns[turns])
        seconds = sum(turn.decode_seconds for turn in self.turns[turns])
        return tokens / seconds if tokens else None


@dataclass(frozen=True)
class Listener:
    """What the run tells the screen: a turn begins, a piece of text came, a turn is over."""

    begin: Callable[[int, int, int], None] = lambda number, context_tokens, new_tokens: None
    text: Callable[[str], None] = lambda piece: None
    end: Callable[[Turn], None] = lambda turn: None


class TimedStreamer(TextStreamer):
    """Hand out text as it comes and note when each generated token came."""

    def __init__(self, tokenizer, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._write = write
        self._is_prompt = True
        self.times: list[float] = []
        self.pieces: list[str] = []

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt first, then one token a call."""
        if not self._is_prompt:
            self.times.append(time.perf_counter())
        self._is_prompt = False
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Pass on text that later tokens can't change any more."""
        self.pieces.append(text)
        self._write(text)


def run_chat(
    model,
    tokenizer,
    messages: Sequence[str],
    cache,
    cache_keyword: str,
    cache_bytes: Callable[[], Bytes],
    answer_tokens: int,
    listener: Listener,
    reference: Sequence[Sequence[int]] | None = None,
) -> ChatRun:
    """Hold a chat, greedily, on one cache.

    Args:
        model: a causal language model, stock or patched.
        tokenizer: its tokenizer.
        messages: the user's messages, one a turn.
        cache: an empty cache, kept over all turns.
        cache_keyword: what ``generate`` calls it: ``cache``, or ``past_key_values`` before
            transformers 5.24.
        cache_bytes: measures ``cache``; called between turns, outside the measured time.
        answer_tokens: the most tokens of an answer.
        listener: what the screen wants to know.
        reference: answers that enter the history instead of the model's own, so that two runs see
            the same prompts. Where the model's own answer differs, its tokens from the first
            difference on are cropped from the cache. If the cache can't do that, the run goes on
            with its own answers and notes it.

    Returns:
        The measurements, turn by turn.

    Mutates: ``cache``.
    """
    chat = Conversation(tokenizer, _end_ids(model))
    run = ChatRun()
    device = next(model.parameters()).device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    for number, message in enumerate(messages):
        ids = chat.ask(message)
        held = cache.get_seq_length()
        listener.begin(number, held, len(ids) - held)
        turn = _run_turn(
            model, tokenizer, ids, held, {cache_keyword: cache}, answer_tokens, listener.text
        )
        history = turn.answer_ids
        if reference is not None and turn.answer_ids != list(reference[number]):
            history = list(reference[number])
            try:
                _drop_tail(cache, _tokens_to_drop(turn.answer_ids, history))
            except NotImplementedError as error:
                run.notes.append(
                    f"from turn {number + 2} on this run continues with its own answers, because "
                    f"its cache can't take "
                    f"back tokens ({error}); later turns answer a different history"
                )
                history, reference = turn.answer_ids, None
        chat.answer(history)
        turn.cache = cache_bytes()
        run.turns.append(turn)
        listener.end(turn)
    if device.type == "cuda":
        run.gpu_peak_bytes = torch.cuda.max_memory_allocated(device) - before
    return run


def agreement(own: Sequence[int], reference: Sequence[int]) -> tuple[int, int]:
    """Count the tokens that two greedy answers share before they differ, and all of them.

    >>> agreement([5, 6, 7], [5, 6, 8, 9])
    (2, 4)
    >>> agreement([], [])
    (0, 0)
    """
    shared = 0
    for left, right in zip(own, reference, strict=False):
        if left != right:
            break
        shared += 1
    return shared, max(len(own), len(reference))


def _run_turn(model, tokenizer, ids, held, cache, answer_tokens, write) -> Turn:
    device = next(model.parameters()).device
    inputs = torch.tensor([ids], device=device)
    streamer = TimedStreamer(tokenizer, write)
    started = time.perf_counter()
    output = model.generate(
        input_ids=inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=answer_tokens,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id
        if tokenizer.pad_token_id is not None
        else tokenizer.eos_token_id,
        streamer=streamer,
        **cache,
    )
    answer_ids = output[0, len(ids) :].tolist()
    return Turn(
        context_tokens=len(ids),
        new_tokens=len(ids) - held,
        first_token_seconds=streamer.times[0] - started,
        decode_tokens=len(streamer.times) - 1,
        decode_seconds=streamer.times[-1] - streamer.times[0],
        cache=Bytes(0, 0),
        answer_ids=answer_ids,
        answer="".join(streamer.pieces),
    )


def _tokens_to_drop(own: Sequence[int], history: Sequence[int]) -> int:
    """Count the cached tokens of an answer that are not in the history (its last never was).

    >>> _tokens_to_drop([5, 6, 7, 8], [5, 9, 9])
    2
    """
    shared, _ = agreement(own, history)
    return max(0, len(own) - 1 - shared)


def _drop_tail(cache, count: int) -> None:
    if count:
        cache.crop(-count)


def _end_ids(model) -> set[int]:
    end = model.generation_config.eos_token_id
    if end is None:
        return set()
    return set(end) if isinstance(end, list) else {end}
