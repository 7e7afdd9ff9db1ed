"""What is measured of a contender, each in a process of its own (`peers_worker`).

quality  reads a text, then the text's continuation in small pieces, as decoding would; compares the
         logits of the continuation with those of the contender's base, in float32.
memory   reads a long text in the dtype of use: bytes of the cache, and how far the process's peak
         rose above what the loaded model takes.
speed    reads texts of several lengths, and decodes: the contender and the stock model with its
         own cache take turns in one process, so that the ratio of both holds on a busy machine.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from peers_contenders import STOCK, Contender, Reader, Session, Source, by_name

from omlx_cache.tools.divergence import compare
from omlx_cache.tools.progress import Progress, silent
from omlx_cache.tools.yardstick import disturbance, yardstick

QUALITY_DTYPE, USE_DTYPE = torch.float32, torch.bfloat16
PIECE = 32  # tokens of the continuation that are read at a time
WARM_UP = 64
TURN = 8  # tokens that are decoded in one turn
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Plan:
    """How much is read.

    Attributes:
        ids: the text; what follows the longest length is left over.
        context, scored: tokens of ``quality``, read and then compared.
        memory: tokens of ``memory``.
        lengths: tokens of ``speed``.
        seconds: of decoding, for each length.
        scratch: a directory in which the logits of a base are kept for the next contender.
    """

    ids: Sequence[int]
    context: int = 2048
    scored: int = 256
    memory: int = 8192
    lengths: tuple[int, ...] = (512, 2048, 8192)
    seconds: float = 3.0
    scratch: Path | None = None


def quality(
    contender: Contender, source: Source, plan: Plan, progress: Progress = silent
) -> dict[str, float]:
    """Return ``kld`` in nats, ``top1`` and ``perplexity_ratio``; see `Agreement`."""
    reader = contender.open(source, QUALITY_DTYPE)
    base = _base_logits(contender, reader, source, plan, progress)
    progress(f"{contender.name}: quality")
    found = _continue(reader, plan)
    scored = torch.tensor([plan.ids[plan.context : plan.context + plan.scored]])
    return asdict(compare(base, found, scored)) | {"tokens": plan.context, "scored": plan.scored}


def _base_logits(
    contender: Contender, reader: Reader, source: Source, plan: Plan, progress: Progress
) -> torch.Tensor:
    name = re.sub(r"[^a-z0-9]+", "-", contender.base.lower())
    kept = None if plan.scratch is None else plan.scratch / f"{name}.pt"
    if kept is not None and kept.exists():
        return torch.load(kept)
    progress(f"{contender.base}: quality, to compare with")
    if contender.base != contender.name:
        reader = by_name(contender.base).open(source, QUALITY_DTYPE)
    logits = _continue(reader, plan)
    if kept is not None:
        torch.save(logits, kept)
    return logits


def _continue(reader: Reader, plan: Plan) -> torch.Tensor:
    """Return the logits [scored, vocabulary] at the tokens that follow the context."""
    session = reader.start(plan.context + plan.scored)
    session.feed(plan.ids[: plan.context], 1)
    end = plan.context + plan.scored
    pieces = [plan.ids[i : min(i + PIECE, end)] for i in range(plan.context, end, PIECE)]
    return torch.cat([session.feed(piece, len(piece)) for piece in pieces])


def memory(
    contender: Contender, source: Source, plan: Plan, progress: Progress = silent
) -> dict[str, int | None]:
    """Return ``cache_bytes`` and ``peak_bytes`` after ``tokens``.

    The peak is that of the process's resident memory while it reads the text and decodes a few
    tokens, less what it was with the model loaded and warm. It is None where the system doesn't say
    (not Linux), and counts what the allocator keeps: read it as "about".
    """
    progress(f"{contender.name}: memory")
    reader = contender.open(source, USE_DTYPE)
    _warm_up(reader, plan)
    before = _reset_peak()
    session = reader.start(plan.memory + TURN)
    _decode(session, _read(session, plan.ids[: plan.memory]))
    peak = None if before is None else _resident("VmHWM") - before
    return {"tokens": plan.memory, "cache_bytes": session.num_bytes(), "peak_bytes": peak}


def _reset_peak() -> int | None:
    """Set the process's peak to what is resident now, and return that; None where it can't be."""
    try:
        CLEAR.write_text("5")
        return _resident("VmRSS")
    except OSError:
        return None


def _resident(name: str) -> int:
    lines = STATUS.read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


def speed(
    contender: Contender, source: Source, plan: Plan, progress: Progress = silent
) -> dict[str, dict]:
    """Return, by length, what decoding and the first token take, and the stock model's beside it.

    ``disturbance`` is how much longer a fixed piece of work took at worst than at best while this
    was measured: above 1.5 other programs were busy, and only ``ratio`` means anything.
    """
    readers = [contender.open(source, USE_DTYPE)]
    if contender.name != STOCK:
        readers.insert(0, by_name(STOCK).open(source, USE_DTYPE))
    for reader in readers:
        _warm_up(reader, plan)
    results = {}
    for number, tokens in enumerate(plan.lengths):
        progress(f"{contender.name}: speed", number, len(plan.lengths))
        results[str(tokens)] = _take_turns(readers, plan.ids[:tokens], plan.seconds)
    return results


def _take_turns(readers: Sequence[Reader], ids: Sequence[int], seconds: float) -> dict:
    """Measure the last reader beside the first one, which may be the same."""
    marks = [yardstick()]
    runs = [_Run(reader, ids, _room(ids, seconds)) for reader in readers]
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or not runs[0].steps:
        for run in runs:
            run.decode()
        marks.append(yardstick())
    base, found = runs[0], runs[-1]
    speeds = [1 / statistics.median(run.steps) for run in runs]
    return {
        "tokens_per_s": speeds[-1],
        "stock_tokens_per_s": speeds[0],
        "ratio": speeds[-1] / speeds[0],
        "first_token_s": found.first_token_s,
        "stock_first_token_s": base.first_token_s,
        "cache_bytes": found.session.num_bytes(),
        "threads": torch.get_num_threads(),
        "disturbance": disturbance(marks),
    }


def _room(ids: Sequence[int], seconds: float) -> int:
    """Return the tokens that a session needs room for; nobody here decodes 200 a second."""
    return len(ids) + int(200 * seconds) + TURN


class _Run:
    """A session that has read a text; each turn decodes a few tokens of its own choice."""

    def __init__(self, reader: Reader, ids: Sequence[int], room: int) -> None:
        self.session, self.steps = reader.start(room), []
        start = time.perf_counter()
        self.token = _read(self.session, ids)
        self.first_token_s = time.perf_counter() - start

    def decode(self) -> None:
        for _ in range(TURN):
            start = time.perf_counter()
            self.token = _read(self.session, [self.token])
            self.steps.append(time.perf_counter() - start)


def _read(session: Session, ids: Sequence[int]) -> int:
    return session.feed(ids, 1)[-1].argmax().item()


def _decode(session: Session, token: int) -> None:
    for _ in range(TURN):
        token = _read(session, [token])


def _warm_up(reader: Reader, plan: Plan) -> None:
    """Read and decode a little: threads start, kernels are chosen, buffers grow."""
    session = reader.start(WARM_UP + TURN)
    _decode(session, _read(session, plan.ids[:WARM_UP]))


MEASURES = {"quality": quality, "memory": memory, "speed": speed}
