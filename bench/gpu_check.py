"""What a GPU says of the kernels: are they right, and how fast beside SDPA and a plain copy?

    python bench/gpu_check.py                                # at most 8 minutes; table and JSON
    TRITON_INTERPRET=1 python bench/gpu_check.py --tiny      # the same on a CPU: proves the script

First every op against the float64 oracle (`gpu_correctness`), then decode and extend over lengths,
batches and models, then tokens a second of a whole model (`gpu_end_to_end`). What was wrong is not
timed. The smallest steps come first, so that a budget that runs out has left out the largest ones;
what is left out is listed with the reason.

| contender | reads |
|---|---|
| hot, k8v8, k4v4, mixed | the tiers of `problems.MIXES`, by this package's kernels |
| sdpa | contiguous keys and values in bfloat16, by PyTorch's choice of kernel |
| per-token int8 | `per_token_int8`; decode only |
| copy | as many bytes as k8v8, half read and half written: the ceiling |

Exits with 1 where anything was wrong or failed.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import gpu_correctness
import gpu_end_to_end
import torch
import triton
import typer
from gpu_correctness import NotEnoughMemoryError
from measuring import machine, median_ms
from per_token_int8 import PerTokenInt8
from problems import DTYPES, MODELS, Attention, Shape, Step
from rich.console import Console
from rich.table import Table
from torch.nn.attention.bias import causal_lower_right

from omlx_kernels import ops

CHECKS_SHARE = 0.4
"""The part of the budget after which no further check is begun."""
END_TO_END_SHARE = 0.25
"""The part of the budget that is kept for the whole model."""
SERVES_A_MODEL = {"append_kv", "convert_blocks", "decode", "extend"}
TIERS = ("hot", "k8v8", "k4v4", "mixed")
CONTENDERS = (*TIERS, "sdpa", "per-token int8", "copy")


@dataclass(frozen=True)
class Timing:
    """One step to time: new tokens, stored tokens and sequences of a model's layer."""

    op: str
    model: str
    shape: Shape
    tokens: int
    batch: int
    query_len: int
    num_sms: int
    dtype: str = "bfloat16"

    def step(self, mix: str, sink_tokens: int = 4) -> Step:
        """Return the step with its old blocks in these tiers."""
        lengths = (self.tokens,) * self.batch
        return Step(
            self.shape, self.dtype, lengths, mix, self.query_len, None, self.num_sms,
            sink_tokens=sink_tokens,
        )  # fmt: skip

    def row(self) -> dict:
        """Return what names the step in a result."""
        return {
            "op": self.op,
            "model": self.model,
            "shape": str(self.shape),
            "tokens": self.tokens,
            "batch": self.batch,
            "query_len": self.query_len,
        }


def timings(num_sms: int, *, tiny: bool) -> list[Timing]:
    """Return what is timed, the smallest first."""
    models = {"tiny": Shape(4, 2, 64)} if tiny else MODELS
    lengths = (400,) if tiny else (1024, 4096, 16384, 32768, 131072)
    batches = (2,) if tiny else (1, 8, 32)
    queries = {"decode": 1, "extend": 16 if tiny else 512}
    found = [
        Timing(op, name, shape, tokens, batch, query_len, num_sms)
        for (op, query_len), (name, shape), tokens, batch in itertools.product(
            queries.items(), models.items(), lengths, batches
        )
    ]
    return sorted(found, key=lambda t: t.tokens * t.batch)


def sdpa(timing: Timing, device: torch.device) -> Callable[[], torch.Tensor]:
    """Return PyTorch's attention over as many keys and values, contiguous, causal."""
    shape, dtype = timing.shape, DTYPES[timing.dtype]

    def random(heads: int, tokens: int) -> torch.Tensor:
        size = (timing.batch, heads, tokens, shape.head_dim)
        return torch.randn(size, dtype=dtype, device=device)

    q = random(shape.num_q_heads, timing.query_len)
    k, v = (random(shape.num_kv_heads, timing.tokens) for _ in "kv")
    is_gqa = shape.num_q_heads != shape.num_kv_heads
    mask = causal_lower_right(timing.query_len, timing.tokens) if timing.query_len > 1 else None
    return lambda: torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, enable_gqa=is_gqa
    )


def prepare(
    timing: Timing, contender: str, device: torch.device
) -> tuple[Callable[[], object], int]:
    """Return a contender's call and the bytes of keys and values that it reads."""
    hot = timing.step("hot", sink_tokens=0)
    if contender in TIERS:
        step = timing.step(contender)
        require(step.num_bytes(), device)
        return Attention(step, device).run, step.num_bytes()
    if contender == "per-token int8":
        require(hot.num_bytes() // 2, device)
        layer = PerTokenInt8(hot, device)
        return layer.run, layer.num_bytes
    if contender == "sdpa":
        require(hot.num_bytes(), device)
        shape = timing.shape
        kv = 2 * timing.batch * timing.tokens * shape.num_kv_heads * shape.head_dim
        return sdpa(timing, device), kv * DTYPES[timing.dtype].itemsize
    num_bytes = timing.step("k8v8").num_bytes()
    require(num_bytes, device)
    source = torch.ones(num_bytes // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2 * source.numel()


def require(num_bytes: int, device: torch.device) -> None:
    """Raise NotEnoughMemoryError where the device lacks this and a third more."""
    if device.type != "cuda":
        return
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    if 4 * num_bytes > 3 * free:
        needed = f"{num_bytes / 2**30:.1f} GiB of blocks"
        raise NotEnoughMemoryError(f"{needed}, {free / 2**30:.1f} GiB free")


def check_per_token_int8(device: torch.device) -> None:
    """Compare the ablation's kernel with float64, on ragged lengths."""
    step = Step(Shape(4, 2, 64), "bfloat16", (300, 70), "hot", block_size=64, sink_tokens=0)
    PerTokenInt8(step, device).check()


def measure(
    found: list[Timing], sound: set[str], device: torch.device, deadline: float
) -> Iterator[dict]:
    """Yield a row for each step and contender: ms and GB/s, or why there are none."""
    for timing, contender in itertools.product(found, CONTENDERS):
        if contender == "per-token int8" and timing.op != "decode":
            continue
        row = timing.row() | {"contender": contender, "ms": None, "gb_per_s": None, "reason": ""}
        needed = {"sdpa": None, "copy": None, "per-token int8": "per-token int8"}
        op = needed.get(contender, timing.op)
        if op is not None and op not in sound:
            row["reason"] = f"{op} was not found right"
        elif time.monotonic() > deadline:
            row["reason"] = "out of time"
        else:
            try:
                run, num_bytes = prepare(timing, contender, device)
                row["ms"] = median_ms(run, device)
                row["gb_per_s"] = num_bytes / row["ms"] / 1e6
            except (NotEnoughMemoryError, torch.OutOfMemoryError) as error:
                row["reason"] = f"memory: {error}"[:200]
            except Exception as error:  # the other contenders still count
                row["reason"] = f"FAILED: {type(error).__name__}: {error}"[:500]
            run = None  # frees the blocks before the next ones are made
        yield row


def print_results(checks: list[dict], rows: list[dict]) -> None:
    """Print what was wrong or left out, and a table of milliseconds with a row a step."""
    for check in checks:
        if check["result"] != "ok":
            print(f"{check['result']}: {check['op']}, {check['check']}: {check['reason']}")
    print(f"{sum(c['result'] == 'ok' for c in checks)} of {len(checks)} checks passed")
    table = Table("op", "model", "tokens", "batch", *CONTENDERS, title="ms (GB/s)", box=None)
    keys = ("op", "model", "tokens", "batch")
    for step, group in itertools.groupby(rows, lambda row: tuple(row[key] for key in keys)):
        cells = dict.fromkeys(CONTENDERS, "")
        for row in group:
            is_timed = row["ms"] is not None
            text = f"{row['ms']:.3f} ({row['gb_per_s']:.0f})" if is_timed else "-"
            cells[row["contender"]] = text
        table.add_row(*map(str, step), *cells.values())
    Console(width=150).print(table)
    for reason in dict.fromkeys(row["reason"] for row in rows if row["reason"]):
        print(f"not timed: {reason}")


def main(
    tiny: bool = typer.Option(False, help="next to no work, for the interpreter on a CPU"),
    budget_s: int = typer.Option(
        480, help="seconds after which nothing is begun, and a model is stopped"
    ),
    out: Path = typer.Option(Path("gpu_check.json"), help="where the JSON goes"),
) -> None:
    """Check every op on the device, then time decode, extend and a whole model."""
    start = time.monotonic()
    device = torch.device("cpu" if triton.knobs.runtime.interpret else "cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("no GPU at hand; on a CPU: TRITON_INTERPRET=1 and --tiny")
    if device.type == "cpu" and not tiny:
        raise typer.BadParameter("the interpreter takes hours for this; add --tiny")
    num_sms = 82
    if device.type == "cuda":
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    with ops.use_implementation("triton"):
        own = [("per-token int8", "ragged", lambda: check_per_token_int8(device))]
        todo = [*own, *gpu_correctness.checks(device, tiny=tiny)]
        checks = gpu_correctness.run(todo, start + CHECKS_SHARE * budget_s)
        sound = gpu_correctness.sound_ops(checks)
        found = timings(num_sms, tiny=tiny)
        rows = list(measure(found, sound, device, start + (1 - END_TO_END_SHARE) * budget_s))
    if wrong := sorted(SERVES_A_MODEL - sound):
        model = gpu_end_to_end.nothing(f"{', '.join(wrong)} not found right")
    else:
        if device.type == "cuda":
            torch.cuda.empty_cache()
        model = gpu_end_to_end.in_own_process(start + budget_s - time.monotonic(), tiny=tiny)
    result = {"machine": machine(device), "tiny": tiny, "checks": checks, "timings": rows}
    result["end_to_end"] = model
    result["seconds"] = round(time.monotonic() - start, 1)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print_results(checks, rows)
    gpu_end_to_end.print_rows(model)
    print(f"{result['seconds']} s; {out}")
    bad = any(check["result"] in ("WRONG", "FAILED") for check in checks)
    bad = bad or bool(gpu_end_to_end.failures(model))
    if bad or any(row["reason"].startswith("FAILED") for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
