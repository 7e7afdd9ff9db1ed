"""Does a chat stay fluent past the length that its model was trained for?

SmolLM2 (trained on 8192 tokens) reads one text of 35,840 tokens, and each contender's perplexity is
measured over its last 3072 tokens: all of them beyond four times the trained length. What they are
measured against is the stock model that reads the last 8192 tokens alone, so that the same tokens
lie inside of the trained length. Contenders that break are given 12,288 tokens; they break there.

    python bench/long_chat.py                       # all, into bench/results/long_chat.json
    python bench/long_chat.py --only "window 1024"  # one contender, and what it is measured against

A run that was interrupted goes on: a row that is in the file is not measured again. Perplexities
need no quiet machine; the whole run takes some five minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

import omlx_cache
from omlx_cache.compat import cache_name
from omlx_cache.tools.loading import load_model, load_tokenizer
from omlx_cache.tools.machine import machine, versions
from omlx_cache.tools.output import write_text
from omlx_cache.tools.smollm2 import smollm2_checkpoint
from omlx_cache.tools.texts import token_ids

RESULTS = Path(__file__).parent / "results" / "long_chat.json"
TRAINED = 8192
LONG = 4 * TRAINED + 3072
SCORED = 3072
CHUNK = 512
INSIDE = "stock, inside the trained length"


@dataclass(frozen=True)
class Contender:
    """A model that reads the last ``tokens`` tokens of the text.

    Attributes:
        tokens: how many it reads; the last `SCORED` of them count.
        setting: for `omlx_cache.patch`; None is the stock model.
    """

    tokens: int
    setting: Mapping[str, Any] | None


CONTENDERS = {
    INSIDE: Contender(TRAINED, None),
    "window 1024": Contender(LONG, {"window_size": 1024}),
    "window 1024 without sinks": Contender(12288, {"window_size": 1024, "sink_tokens": 0}),
    "stock": Contender(12288, None),
    "default (window 8192)": Contender(LONG, {}),
}


@torch.no_grad()
def perplexity(
    model: PreTrainedModel, ids: torch.Tensor, scored: int, setting: Mapping[str, Any] | None
) -> float:
    """Return the perplexity of the last ``scored`` tokens of a text that is read chunk by chunk.

    Args:
        model: an unpatched model.
        ids: [1, num_tokens].
        scored: how many tokens count.
        setting: for `omlx_cache.patch`; None leaves the model as it is.
    """
    if setting is not None:
        with omlx_cache.patched(model, setting):
            return _read(model, omlx_cache.PagedCache(model), ids, scored)
    return _read(model, DynamicCache(config=model.config), ids, scored)


def _read(model: PreTrainedModel, cache: Any, ids: torch.Tensor, scored: int) -> float:
    name, loss = cache_name(type(model).forward), 0.0
    num_tokens = ids.shape[1]
    for first in range(0, num_tokens - 1, CHUNK):
        chunk = ids[:, first : min(first + CHUNK, num_tokens - 1)]  # the last one predicts nothing
        truth = ids[0, first + 1 : first + 1 + chunk.shape[1]]
        kept = max(1, min(chunk.shape[1], first + chunk.shape[1] - (num_tokens - 1 - scored)))
        logits = model(chunk, logits_to_keep=kept, **{name: cache}).logits[0].float()
        if first + chunk.shape[1] > num_tokens - 1 - scored:
            loss += torch.nn.functional.cross_entropy(logits, truth[-kept:], reduction="sum").item()
    return math.exp(loss / scored)


def main() -> None:
    """Measure what isn't in the file; print each perplexity, and how far it is from inside."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=CONTENDERS, help="one contender")
    parser.add_argument("--dtype", default="float32", help="of the model")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the rows are kept")
    arguments = parser.parse_args()
    path = smollm2_checkpoint()
    model = load_model(path, dtype=getattr(torch, arguments.dtype), device="cpu")
    ids = torch.tensor([token_ids("quality", load_tokenizer(path), LONG)])
    setup = {"dtype": arguments.dtype, "scored": SCORED, "trained": TRAINED}
    data = {"setup": setup, "machine": machine(), "versions": versions(), "results": {}}
    if arguments.json.exists():
        before = json.loads(arguments.json.read_text(encoding="utf-8"))
        if before["setup"] != setup:
            raise SystemExit(f"{arguments.json} holds {before['setup']}, asked for {setup}")
        data["results"] = before["results"]
    rows = data["results"]
    wanted = [INSIDE, arguments.only] if arguments.only else list(CONTENDERS)
    for name in wanted:
        contender = CONTENDERS[name]
        if name not in rows:
            start = time.perf_counter()
            found = perplexity(model, ids[:, -contender.tokens :], SCORED, contender.setting)
            rows[name] = {
                "tokens": contender.tokens,
                "setting": contender.setting,
                "perplexity": found,
                "seconds": time.perf_counter() - start,
            }
            write_text(arguments.json, json.dumps(data, indent=1) + "\n")
        row = rows[name]
        found, inside = row["perplexity"], rows[INSIDE]["perplexity"]
        print(f"{name:34} {row['tokens']:6} tokens  {found:8.3f}  {found / inside - 1:+.1%}")


if __name__ == "__main__":
    main()
