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


def main(kills: int) -> None:
    torch.set_num_threads(1)
    choose, directory = random.Random(0), Path(tempfile.mkdtemp(dir=memory()))
    model = tiny_model()
    model.config.patched = False
    totals = {"killed": 0, "turns": 0, "continued": 0}
    life, chat = 1.0, -1
    try:
        while totals["killed"] < kills:
            chat += 1
            empty = torch.empty((1, 0), dtype=torch.long)
            expected, _ = forked(lambda report, c=chat: hold(model, c, empty, range(TURNS), report))
            texts, turn = [text for _, text, _ in expected], 0
            while turn < TURNS and totals["killed"] < kills:

                def go_on(report: Callable, c: int = chat, t: int = turn) -> None:
                    omlx_cache.patch(model, **CONFIG, disk_cache=directory)
                    model.config.patched = True
                    hold(model, c, texts[t - 1] if t else empty, range(t, TURNS), report)

                began = time.monotonic()
                delay = choose.uniform(0, life)
                said, killed = forked(go_on, delay)
                if not killed:
                    life = min(life, time.monotonic() - began)
                totals["killed"] += killed
                for number, text, reused in said:
                    assert torch.equal(text, texts[number]), "a chat went on differently"
                    if number:  # what was acknowledged, but for the token that was never computed
                        assert reused == texts[number - 1].shape[1] - 1, "something was lost"
                    totals["turns"] += 1
                    totals["continued"] += number == turn and number > 0
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
