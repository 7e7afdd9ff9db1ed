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

from omlx_cache.compat import cache_name
from omlx_cache.conversation import Conversation
from omlx_cache.tools.agreement import Agreement, check_own_answer, follow_reference
from omlx_cache.tools.yardstick import yardstick


@dataclass(frozen=True)
class Bytes:
    """Memory of a cache, in bytes: now, and the most so far."""

    now: int
    peak: int


@dataclass
class Turn:
    """What was measured in one turn.

    Attributes:
        context_tokens: tokens of the chat when the answer begins.
        new_tokens: those of them that the cache did not hold yet.
        first_token_seconds: from the call of ``generate`` to the first token of the answer.
        decode_tokens, decode_seconds: the answer's other tokens, and the time that they took.
        cache: the cache's memory after the turn.
        answer_ids, answer: what the model generated.
        same: how the answer compares to the reference; in a run without one, to the same answer
            computed by the same model in one pass. None where the cache could not be rewound.
    """

    context_tokens: int
    new_tokens: int
    first_token_seconds: float
    decode_tokens: int
    decode_seconds: float
    cache: Bytes
    answer_ids: list[int]
    answer: str
    same: Agreement | None = None


@dataclass
class ChatRun:
    """One chat on one cache; ``yardstick_seconds`` as measured before and after each turn."""

    turns: list[Turn] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    gpu_peak_bytes: int | None = None
    yardstick_seconds: list[float] = field(default_factory=list)

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
        cache_bytes: measures ``cache``; called between turns, outside the measured time.
        answer_tokens: the most tokens of an answer.
        listener: what the screen wants to know.
        reference: answers that enter the history instead of the model's own, so that two runs see
            the same prompts (see `follow_reference`). If the cache can't be rewound to take one,
            the run goes on with its own answers and notes it.

    Returns:
        The measurements, turn by turn.

    Mutates: ``cache``.
    """
    chat = Conversation(tokenizer, _end_ids(model))
    run = ChatRun()
    device = next(model.parameters()).device
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    for number, message in enumerate(messages):
        ids = chat.ask(message)
        held = cache.get_seq_length()
        listener.begin(number, held, len(ids) - held)
        run.yardstick_seconds.append(yardstick())
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        turn = _run_turn(model, tokenizer, ids, cache, answer_tokens, listener.text)
        run.yardstick_seconds.append(yardstick())
        turn.cache = cache_bytes()
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(device) - before
            run.gpu_peak_bytes = max(run.gpu_peak_bytes or 0, peak)
        history: Sequence[int] = turn.answer_ids
        if reference is None:
            turn.same = check_own_answer(model, cache, ids, turn.answer_ids)
        else:
            turn.same = follow_reference(model, cache, ids, turn.answer_ids, reference[number])
            if turn.same is None:
                run.notes.append(
                    f"The cache can't take back turn {number + 1}'s answer: from there on the "
                    f"patched run continues with its own answers, and they are not compared."
                )
                reference = None
            else:
                history = reference[number]
        chat.answer(history)
        run.turns.append(turn)
        listener.end(turn)
    return run


def _run_turn(model, tokenizer, ids: list[int], cache, answer_tokens: int, write) -> Turn:
    inputs = torch.tensor([ids], device=next(model.parameters()).device)
    held = cache.get_seq_length()
    streamer = TimedStreamer(tokenizer, write)
    started = time.perf_counter()
    output = model.generate(
        input_ids=inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=answer_tokens,
        do_sample=False,
        pad_token_id=pad_id(tokenizer),
        streamer=streamer,
        **{cache_name(type(model).forward): cache},
    )
    return Turn(
        context_tokens=len(ids),
        new_tokens=len(ids) - held,
        first_token_seconds=streamer.times[0] - started,
        decode_tokens=len(streamer.times) - 1,
        decode_seconds=streamer.times[-1] - streamer.times[0],
        cache=Bytes(0, 0),
        answer_ids=output[0, len(ids) :].tolist(),
        answer="".join(streamer.pieces),
    )


def pad_id(tokenizer) -> int | None:
    """Return the id that ``generate`` pads with: the tokenizer's, or that of its end of text."""
    padding = tokenizer.pad_token_id
    return tokenizer.eos_token_id if padding is None else padding


def _end_ids(model) -> set[int]:
    end = model.generation_config.eos_token_id
    if end is None:
        return set()
    return set(end) if isinstance(end, list) else {end}
