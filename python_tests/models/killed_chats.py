"""Processes that hold a chat with ``disk_cache`` and are killed, and the next that go on with it.

One process imports PyTorch and makes the model; each chat is a fork of it, so that a run takes
fractions of a second. Used by test_disk_cache.py; prints one JSON object, or fails.

    python killed_chats.py KILLS
"""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from tiny import greedy, random_ids, tiny_model

import omlx_cache

TURNS, MESSAGE, ANSWER = 5, 60, 6
CONFIG = {"block_size": 64, "prefill_chunk": 64, "cache_bits": 16, "window_size": None}


def forked(call: Callable, delay: float | None = None) -> tuple[list, bool]:
    """Run ``call(report)`` in a fork; return what it reported, and whether it was killed.

    Args:
        call: what to run.
        delay: seconds until it is killed; None lets it live.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        status = 1
        try:
            with open(writer, "wb", buffering=0) as pipe:
                call(lambda value: pipe.write(pickle.dumps(value)))
            status = 0
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    os.close(writer)
    if delay is not None:
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
    found = []
    with open(reader, "rb") as pipe:
        while True:
            try:
                found.append(pickle.load(pipe))
            except (EOFError, pickle.UnpicklingError):
                break
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status)
    assert killed or os.waitstatus_to_exitcode(status) == 0, "a chat failed"
    return found, killed


def prompt(text: torch.Tensor, chat: int, turn: int) -> torch.Tensor:
    return torch.cat([text, random_ids(1, MESSAGE, seed=100 * chat + turn)], 1)


def hold(model, chat: int, text: torch.Tensor, turns: range, report: Callable) -> None:
    """Go on with a chat; report each turn as (turn, its whole text, reused tokens)."""
    for turn in turns:
        ids = prompt(text, chat, turn)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        text = torch.cat([ids, greedy(model, inputs, ANSWER)], 1)
        reused = omlx_cache.report(model).reused_tokens if model.config.patched else 0
        if model.config.patched:
            assert omlx_cache.flush(model)
        report((turn, text, reused))


class Chat:
    """A chat that was held once without interruption, and that is held again with interruptions."""

    def __init__(self, model, number: int, directory: Path) -> None:
        self.model, self.number, self.directory = model, number, directory
        empty = torch.empty((1, 0), dtype=torch.long)
        said, _ = forked(lambda report: hold(model, number, empty, range(TURNS), report))
        self.texts = [empty, *(text for _, text, _ in said)]

    def go_on(self, turn: int, delay: float | None) -> tuple[list, bool]:
        """Hold the turns from ``turn`` on in a process that is killed after ``delay`` seconds."""

        def run(report: Callable) -> None:
            omlx_cache.patch(self.model, **CONFIG, disk_cache=self.directory)
            self.model.config.patched = True
            hold(self.model, self.number, self.texts[turn], range(turn, TURNS), report)

        return forked(run, delay)


def main(kills: int) -> None:
    torch.set_num_threads(1)
    choose, directory = random.Random(0), Path(tempfile.mkdtemp(dir=memory()))
    model = tiny_model()
    model.config.patched = False
    totals = {"killed": 0, "turns": 0, "continued": 0}
    life, number = None, 0

    def is_over() -> bool:
        return totals["killed"] >= kills and totals["continued"] > 0

    try:
        while not is_over():
            number += 1
            chat, turn = Chat(model, number, directory), 0
            while turn < TURNS and not is_over():
                began = time.monotonic()
                said, killed = chat.go_on(
                    turn, None if life is None else choose.uniform(0.1, 1.3) * life
                )
                if life is None:
                    life = time.monotonic() - began
                elif not killed:
                    life *= 0.9  # it was measured when the machine was busier
                elif not said:
                    life *= 1.1  # ... or less busy
                totals["killed"] += killed
                for done, text, reused in said:
                    assert torch.equal(text, chat.texts[done + 1]), "a chat went on differently"
                    # At least what was acknowledged, but for the token that was never computed.
                    expected = max(0, chat.texts[done].shape[1] - 1)
                    assert reused >= expected, f"lost: {reused} of {expected} tokens are there"
                    totals["turns"] += 1
                    totals["continued"] += done == turn and 0 < expected <= reused
                turn += len(said)
    finally:
        shutil.rmtree(directory)
    assert not any(name.endswith(".damaged") for name in os.listdir(directory.parent))
    print(json.dumps(totals))


def memory() -> str | None:
    """Return a directory in memory, where there is one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


if __name__ == "__main__":
    main(int(sys.argv[1]))
