"""How long does a chat's first token take in turn 20, against turn 2?

Chats of 20 turns with the real SmolLM2, on a `ChatSession` (each turn computes its own message) and
as the stock model holds them (each turn reads the whole chat). Messages are of about one length in
tokens, so that the turns of a session differ in nothing but their history. The bar is 1.5.

    python bench/bench_chat.py                  # three chats of each, and --json OUT
    pytest bench/bench_chat.py                  # the check, and a chat of the session

Only the ratios within one run mean anything. Some four minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import omlx_cache
from omlx_cache.conversation import Conversation
from omlx_cache.tools.loading import load_model, load_tokenizer
from omlx_cache.tools.machine import machine, versions
from omlx_cache.tools.smollm2 import smollm2_checkpoint
from omlx_cache.tools.texts import token_ids

TURNS, MESSAGE, ANSWER = 20, 100, 24  # turns, and tokens of each message and answer
SAY = {"max_new_tokens": ANSWER, "min_new_tokens": ANSWER, "do_sample": False}
BAR = 1.5


class FirstToken:
    """A streamer that notes when the first token comes."""

    def __init__(self) -> None:
        self.start, self.seconds = time.perf_counter(), 0.0
        self._calls = 0

    def put(self, ids: torch.Tensor) -> None:
        """Take the prompt first, then each token."""
        self._calls += 1
        if self._calls == 2:
            self.seconds = time.perf_counter() - self.start

    def end(self) -> None:
        """Do nothing."""


def messages(tokenizer, chat: int) -> list[str]:
    """Return the messages of a chat: consecutive pieces of one text."""
    ids = token_ids("quality", tokenizer, TURNS * MESSAGE, offset=chat * TURNS * MESSAGE)
    return [tokenizer.decode(ids[i : i + MESSAGE]) for i in range(0, len(ids), MESSAGE)]


def with_session(model, tokenizer, chat: int) -> list[float]:
    """Hold a chat on a `ChatSession`; return the seconds to the first token of each turn."""
    found = []
    with omlx_cache.patched(model, prefix_cache=True):
        session = omlx_cache.ChatSession(model, tokenizer)
        for message in messages(tokenizer, chat):
            streamer = FirstToken()
            session.send(message, streamer=streamer, **SAY)
            found.append(streamer.seconds)
    return found


def with_stock(model, tokenizer, chat: int) -> list[float]:
    """Hold it on the stock model, which reads all of it in each turn."""
    conversation, found = Conversation(tokenizer, {tokenizer.eos_token_id}), []
    for message in messages(tokenizer, chat):
        ids = torch.tensor([conversation.ask(message)], device=model.device)
        mask, streamer = torch.ones_like(ids), FirstToken()
        out = model.generate(input_ids=ids, attention_mask=mask, streamer=streamer, **SAY)
        conversation.answer(out[0, ids.shape[1] :].tolist())
        found.append(streamer.seconds)
    return found


CONTENDERS: dict[str, Callable[..., list[float]]] = {
    "ChatSession": with_session,
    "stock": with_stock,
}


def prepare() -> tuple:
    """Return the model, in float32 on the CPU or as the GPU likes it, and its tokenizer."""
    path = smollm2_checkpoint()
    return load_model(path), load_tokenizer(path)


def ratio(chats: list[list[float]]) -> float:
    """Return the median over chats of: the last turn's seconds over those of the second."""
    return statistics.median(turns[-1] / turns[1] for turns in chats)


def test_turn_20_is_as_fast_as_turn_2(benchmark):
    model, tokenizer = prepare()
    with_session(model, tokenizer, 0)  # warm up
    chats: list[list[float]] = []

    def hold() -> None:
        chats.append(with_session(model, tokenizer, len(chats)))

    benchmark.pedantic(hold, rounds=3)
    benchmark.extra_info["turn 20 / turn 2"] = ratio(chats)
    assert ratio(chats) <= BAR, chats


def main() -> None:
    """Hold the chats in turns, and print what the first tokens took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    model, tokenizer = prepare()
    seconds: dict[str, list[list[float]]] = {name: [] for name in CONTENDERS}
    for chat in range(arguments.chats):
        for name, hold in CONTENDERS.items():
            seconds[name].append(hold(model, tokenizer, chat))
    for name, chats in seconds.items():
        second, last = (statistics.median(turns[i] for turns in chats) for i in (1, -1))
        print(f"{name:12} turn 2 {second:6.3f} s, turn {TURNS} {last:6.3f} s: {ratio(chats):.2f}x")
    if arguments.json:
        data = {"machine": machine(), "versions": versions(), "first_token_s": seconds}
        arguments.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
