"""A pool with room for a quarter of a chat: how fast does it go on, and what does it forget?

SmolLM2 in float32 reads 4096 tokens of technical text in blocks of 64, with ``max_gpu_blocks`` at a
quarter of what they fill. Then it reads on, token by token: some more of the text, and passages
from all depths of it, which come again and must be continued ("needles"). Each step is timed; what
it says is held against the cache without a bound. Contenders take turns in one process; their rows
are means over several texts.

    python bench/bench_bounded.py                  # bench/results/bounded.json; some 20 minutes
    python bench/bench_bounded.py --texts 1 --tokens 1024 --json out.json      # a quick look
    python docs/render_tuning.py                   # put the table into docs/tuning.md

Only the ratios of the times within one run mean anything. On a machine without a GPU, "device" and
"CPU memory" are the same memory, and the time of offloading is that of attending in two parts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from contender import Contender
from transformers import PreTrainedModel

from omlx_cache.compat import cache_name
from omlx_cache.sequences import Geometry
from omlx_cache.tools.divergence import compare
from omlx_cache.tools.loading import load_model, load_tokenizer
from omlx_cache.tools.machine import machine, versions
from omlx_cache.tools.output import write_text
from omlx_cache.tools.quality_run import targets_of
from omlx_cache.tools.quality_tasks import Task, text_task
from omlx_cache.tools.smollm2 import smollm2_checkpoint
from omlx_cache.tools.texts import token_ids

RESULTS = Path(__file__).parent / "results" / "bounded.json"
BLOCK_SIZE, SINKS = 64, 4
BASE = {
    "block_size": BLOCK_SIZE,
    "sink_tokens": SINKS,
    "prefill_chunk": 256,
    "window_size": None,
}
FIRST_TEXT, BETWEEN_TEXTS = 27_000, 9_000  # those before chose the score of topk
RECALLED = 0.5  # of a quarter: the blocks that recall: topk attends to beside those on the device
UNBOUNDED, EXACT = "no bound", "cpu_offload, recall all"
TURN = 8  # tokens that a contender reads in one turn


def contenders(tokens: int) -> dict[str, dict]:
    """Return the settings, with a quarter of the blocks that ``tokens`` fill as the bound."""
    room = Geometry(BLOCK_SIZE, SINKS, None).num_blocks(tokens) // 4
    bound, away = {"max_gpu_blocks": room}, {"max_gpu_blocks": room, "cpu_offload": True}
    topk = {"recall": "topk", "recall_blocks": max(1, int(RECALLED * room))}
    settings = {
        UNBOUNDED: {},
        EXACT: away,
        "cpu_offload, recall topk": away | topk,
        "pruning topk": bound | {"pruning": "topk"},
        "pruning random": bound | {"pruning": "random"},
        "pruning oldest": bound | {"pruning": "oldest"},
    }
    return {name: BASE | setting for name, setting in settings.items()}


class Reader(Contender):
    """A contender that reads given tokens one by one, and keeps what it expects after each.

    Attributes:
        logits: [vocabulary] float32 after each token.
    """

    def __init__(self, model: PreTrainedModel, ids: torch.Tensor, setting: dict) -> None:
        self.logits: list[torch.Tensor] = []
        super().__init__(model, ids, setting)

    @torch.no_grad()
    def read(self, ids: torch.Tensor) -> None:
        """Read tokens, [num_tokens], and note what each took."""
        kwargs = {cache_name(type(self.model).forward): self.cache, "logits_to_keep": 1}
        with self._patch():
            for token in ids:
                start = time.perf_counter()
                logits = self.model(token.view(1, 1), **kwargs).logits[0, -1]
                if logits.is_cuda:
                    torch.cuda.synchronize()
                self.step_s.append(time.perf_counter() - start)
                self.logits.append(logits.float().cpu())


def measure(model: PreTrainedModel, task: Task, tokens: int) -> dict[str, dict]:
    """Return a row for each contender.

    Args:
        model: not patched.
        task: a text and needles, of which everything asked for lies behind ``tokens``.
        tokens: that are read as a prompt.
    """
    ids = torch.tensor(task.ids, device=next(model.parameters()).device)
    readers = {
        name: Reader(model, ids[None, :tokens], setting)
        for name, setting in contenders(tokens).items()
    }
    for turn in ids[tokens:].split(TURN):
        for reader in readers.values():
            reader.read(turn)
    reference = torch.stack(readers[UNBOUNDED].logits)
    return {name: row(task, tokens, reference, reader) for name, reader in readers.items()}


def row(task: Task, tokens: int, reference: torch.Tensor, reader: Reader) -> dict:
    """Return what a contender took, and how far it is from the reference."""
    found, report = torch.stack(reader.logits), reader.cache.report()
    asked = {part: [p - tokens for p in places] for part, places in task.asked.items()}
    text = torch.tensor([task.ids[: task.asked["text"][-1] + 1]])
    agreement = compare(reference[asked["text"]], found[asked["text"]], text)
    right = found[asked["needle"]].argmax(-1) == targets_of(task)["needle"]
    return {
        "setting": reader.setting,
        "tokens_per_s": 1 / statistics.median(reader.step_s),
        "first_token_s": reader.first_token_s,
        "device_blocks": report.active_blocks,
        "device_bytes": report.total_bytes,
        "cpu_bytes": report.offloaded_bytes,
        "cached_tokens": report.cached_tokens,
        "recall_hit_rate": report.recall_hit_rate,
        **asdict(agreement),
        "needle": right.float().mean().item(),
    }


def check(rows: dict[str, dict]) -> None:
    """Check that what must change nothing changes nothing; a red check gives no number."""
    found = rows[EXACT]
    if found["top1"] < 0.98 or found["kld"] > 1e-3:
        raise SystemExit(f"{EXACT} must say what {UNBOUNDED} says, got {found}")
    for name, each in rows.items():
        bound = each["setting"].get("max_gpu_blocks")
        if bound is not None and each["device_blocks"] > bound:
            raise SystemExit(f"{name} must hold its bound of {bound} blocks, got {each}")


def mean(rows: Sequence[dict]) -> dict:
    """Return a contender's row over several texts: the mean of each number, and the setting."""
    keys = [key for key, value in rows[0].items() if isinstance(value, int | float)]
    return rows[0] | {key: statistics.fmean(row[key] for row in rows) for key in keys}


def prepare(tokens: int, scored: int, texts: int) -> tuple[PreTrainedModel, list[Task]]:
    """Return the model, and texts of ``tokens + scored`` tokens with their needles."""
    path = smollm2_checkpoint()
    tokenizer = load_tokenizer(path)
    separator = tokenizer("\n\n", add_special_tokens=False)["input_ids"]
    tasks = [
        text_task(token_ids("quality", tokenizer, tokens + scored, first), scored, separator)
        for first in range(FIRST_TEXT, FIRST_TEXT + texts * BETWEEN_TEXTS, BETWEEN_TEXTS)
    ]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return load_model(path, dtype=torch.float32, device=device), tasks


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=4096, help="of the prompt")
    parser.add_argument("--scored", type=int, default=128, help="more of the text, then needles")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the rows go")
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    model, tasks = prepare(given.tokens, given.scored, given.texts)
    of_texts: dict[str, list[dict]] = {}
    for task in tasks:
        rows = measure(model, task, given.tokens)
        check(rows)
        for name, each in rows.items():
            of_texts.setdefault(name, []).append(each)
    rows = {name: mean(found) for name, found in of_texts.items()}
    for name, each in rows.items():
        speed = each["tokens_per_s"] / rows[UNBOUNDED]["tokens_per_s"]
        print(
            f"{name:26} {each['tokens_per_s']:6.2f} tokens/s ({speed:.2f}x)  first token "
            f"{each['first_token_s']:6.2f} s  {each['device_blocks']:3.0f} blocks  KLD "
            f"{each['kld']:.6f}  top-1 {each['top1']:.2%}  needles {each['needle']:.1%}"
        )
    setup = {
        "texts": given.texts,
        "tokens": given.tokens,
        "scored": given.scored,
        "threads": given.threads,
    }
    data = {"setup": setup, "machine": machine(), "versions": versions(), "results": rows}
    write_text(given.json, json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
