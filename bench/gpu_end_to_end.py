"""Tokens a second of a whole model: stock transformers against the patched model.

    python bench/gpu_end_to_end.py                               # on a GPU; a table, and JSON
    TRITON_INTERPRET=1 python bench/gpu_end_to_end.py --tiny     # on a CPU: proves the script

`bench/gpu_check.py` runs this in a process of its own, so that the memory is free before it and a
model that takes too long costs only its own numbers: each row is written as it comes.

The model is a random one of LLaMA-2-7B's shape (`random_llama`); the output says whether its
linears are 4-bit GPTQ or bfloat16, and why. A contender reads a text twice, the first time so that
every kernel is compiled, and then decodes; nothing is captured in a graph. Before that its logits
are compared with the stock model's: a model that is wrong is not timed.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import triton
import typer
from contender import Contender
from random_llama import config_of, random_llama
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

import omlx_cache
from omlx_kernels import ops

LENGTHS = (1024, 4096, 16384)
STEPS = 32
UNRELATED = 0.25
"""Relative distance of logits from the stock model's that means a fault. Logits that have nothing
to do with each other are 1.4 apart; a fault that is smaller is for the checks of the ops."""


def contenders(*, tiny: bool) -> dict[str, dict | None]:
    """Return what is compared, by name: overrides to patch with, None for the stock model."""
    size = 64 if tiny else 1024
    common = {"block_size": size, "recent_tokens": size} if tiny else {}
    return {
        "DynamicCache": None,
        "8-bit": common | {"window_size": None},
        "mixed": common | {"window_size": None, "tiers": {"k8v4": size, "k4v4": None}},
        f"window {size}": common | {"window_size": size},
    }


def distance(model: PreTrainedModel, ids: torch.Tensor, setting: dict | None) -> float:
    """Return how far the last 16 logits are from the stock model's, relative.

    A window is compared on the tokens that it holds.

    Raises:
        AssertionError: where they are not finite or further than `UNRELATED`.
    """
    setting = setting or {}
    ids = ids[:, : setting.get("window_size")]
    with torch.no_grad():
        want = model(ids, logits_to_keep=16).logits.float()
        with omlx_cache.patched(model, **setting) if setting else nullcontext():
            got = model(ids, logits_to_keep=16).logits.float()
    found = ((got - want).norm() / want.norm()).item()
    assert found <= UNRELATED, f"logits are {found:.2g} from the stock model's"  # NaN fails, too
    return found


def timed(model: PreTrainedModel, ids: torch.Tensor, setting: dict | None, steps: int) -> dict:
    """Read ``ids`` and decode; return seconds, tokens a second and the cache's MiB."""
    if ids.is_cuda:
        Contender(model, ids, setting).decode(1)
        gc.collect()  # a cycle would keep that cache beside the next one
    contender = Contender(model, ids, setting)
    contender.decode(steps)
    return {
        "first_token_s": contender.first_token_s,
        "prefill_tokens_per_s": ids.shape[1] / contender.first_token_s,
        "decode_tokens_per_s": 1 / statistics.median(contender.step_s),
        "cache_mib": contender.num_bytes() / 2**20,
    }


def measure(
    model: PreTrainedModel, lengths: tuple[int, ...], steps: int, deadline: float, *, tiny: bool
) -> Iterator[dict]:
    """Yield a row for each length and contender, the shortest first: numbers, or why none."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, max(lengths)), generator=generator)
    ids = ids.to(model.device)
    wrong: dict[str, str] = {}
    for tokens in lengths:
        for name, setting in contenders(tiny=tiny).items():
            row = {"tokens": tokens, "contender": name, "reason": wrong.get(name, "")}
            try:
                if time.monotonic() > deadline:
                    row["reason"] = row["reason"] or "out of time"
                if not row["reason"]:
                    if tokens == lengths[0]:
                        row["distance"] = distance(model, ids[:, :tokens], setting)
                    row |= timed(model, ids[:, :tokens], setting, steps)
            except torch.OutOfMemoryError as error:
                row["reason"] = f"memory: {error}"[:200]
            except Exception as error:  # the other contenders still count
                kind = "WRONG" if isinstance(error, AssertionError) else "FAILED"
                wrong[name] = row["reason"] = f"{kind}: {type(error).__name__}: {error}"[:500]
            yield row


def nothing(reason: str) -> dict:
    """Return the result of a run that has no numbers."""
    return {"model": "", "weights": "", "why": "", "rows": [], "reason": reason}


def in_own_process(timeout_s: float, *, tiny: bool) -> dict:
    """Run this script in a process of its own, for at most ``timeout_s``; return what it wrote."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as said:
        out, reason = Path(folder) / "rows.json", ""
        command = [sys.executable, __file__, "--out", str(out), "--budget-s", str(int(timeout_s))]
        try:
            done = subprocess.run(
                command + ["--tiny"] * tiny, stdout=said, stderr=said, timeout=max(1, timeout_s)
            )
        except subprocess.TimeoutExpired:
            reason = f"out of time, after {timeout_s:.0f} s"
        else:
            if done.returncode:
                said.seek(0)
                reason = f"FAILED: exit {done.returncode}: {said.read()[-400:]}"
        found = json.loads(out.read_text()) if out.is_file() else nothing(reason)
    return found | {"reason": reason if reason and not failures(found) else found["reason"]}


def failures(found: dict) -> list[str]:
    """Return the reasons that mean a fault, not a lack of time or memory."""
    reasons = [found["reason"], *(row["reason"] for row in found["rows"])]
    return [reason for reason in reasons if reason.startswith(("WRONG", "FAILED"))]


def print_rows(found: dict) -> None:
    """Print a table of tokens a second with a row a length, and what was left out."""
    rows = found["rows"]
    if rows:
        names = list(dict.fromkeys(row["contender"] for row in rows))
        title = (
            f"tokens/s of {found['model']}, {found['weights']} ({found['why']}): prefill, decode"
        )
        table = Table("tokens", *names, title=title, box=None)
        for tokens in dict.fromkeys(row["tokens"] for row in rows):
            cells = dict.fromkeys(names, "-")
            for row in rows:
                if row["tokens"] == tokens and not row["reason"]:
                    numbers = row["prefill_tokens_per_s"], row["decode_tokens_per_s"]
                    cells[row["contender"]] = "{:.0f}, {:.1f}".format(*numbers)
            table.add_row(str(tokens), *cells.values())
        Console(width=150).print(table)
    for reason in dict.fromkeys([found["reason"], *(row["reason"] for row in rows)]):
        if reason:
            print(f"end to end: {reason}")


def main(
    tiny: bool = typer.Option(False, help="next to no work, for the interpreter on a CPU"),
    budget_s: int = typer.Option(120, help="seconds after which nothing is begun"),
    out: Path = typer.Option(Path("gpu_end_to_end.json"), help="where the JSON goes"),
) -> None:
    """Time a random LLaMA-2-7B, stock and patched."""
    deadline = time.monotonic() + budget_s
    device = torch.device("cpu" if triton.knobs.runtime.interpret else "cuda", 0)
    lengths, steps = ((150,), 2) if tiny else (LENGTHS, STEPS)
    config = config_of(tiny=tiny, max_tokens=max(lengths) + 2 * STEPS)
    try:
        model, weights, why = random_llama(config, device)
    except torch.OutOfMemoryError as error:
        found = nothing(f"memory: {error}"[:200])
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print_rows(found)
        return
    layers, hidden = config.num_hidden_layers, config.hidden_size
    name = "a tiny Llama" if tiny else "a random LLaMA-2-7B"
    found = {"model": name, "weights": weights, "why": why, "rows": [], "reason": ""}
    found["shape"] = f"{layers} layers of {hidden} channels"
    with ops.use_implementation("triton"):
        for row in measure(model, lengths, steps, deadline, tiny=tiny):
            found["rows"].append(row)
            out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print_rows(found)
    if failures(found):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
