"""End to end on the GPTQ SmolLM2: how fast is the next token after a long text, and the first?

The contenders are the stock model with transformers' DynamicCache and with its QuantizedCache, fp8
and, where the package hqq is installed, hqq at 8 bits (which de-quantize all of it at every step),
and the patched model with the default 8-bit cache and with a window of 1024 tokens. Each reads the
same text and then decodes the same tokens; within a length they take turns, so that a busy machine
slows all of them.

    python bench/bench_generate.py                             # a table, and --json OUT
    pytest bench/bench_generate.py                             # 512 and 4096 tokens
    pytest bench/bench_generate.py --long -k "2048"            # one group of the longer ones

Only the ratios within one run mean anything; a red check gives no number.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import pytest
import torch
from contender import Contender
from decode_peers import have, stock_cache
from transformers import PreTrainedModel

import omlx_cache
from omlx_cache.tools.loading import load_model, load_tokenizer
from omlx_cache.tools.smollm2 import smollm2_gptq_checkpoint
from omlx_cache.tools.texts import token_ids
from omlx_kernels import ops

LENGTHS = (512, 2048, 4096, 8192)
LONG = (2048, 8192)
STOCK = {
    "stock": "DynamicCache",
    "stock fp8": "QuantizedCache-fp8",
    "stock hqq": "QuantizedCache-hqq",
}
CONTENDERS = {
    **dict.fromkeys(have(tuple(STOCK))),
    "8-bit": {},
    "window 1024": {"window_size": 1024},
}
STEPS = 8  # tokens a contender decodes in one turn


def contender(name: str, model: PreTrainedModel, ids: torch.Tensor) -> Contender:
    """Let a contender read ``ids``."""
    cache = (lambda: stock_cache(STOCK[name], model.config)) if name in STOCK else None
    return Contender(model, ids, CONTENDERS[name], cache)


def prepare(device: str) -> tuple[object, torch.Tensor]:
    """Return the model and [1, 8192] ids of technical text."""
    path = smollm2_gptq_checkpoint()
    tokenizer = load_tokenizer(path)
    ids = torch.tensor([token_ids("quality", tokenizer, max(LENGTHS))], device=device)
    return load_model(path, device=device), ids


def check(model, ids: torch.Tensor) -> None:
    """Compare the patched model's choices with the stock model's on the same text."""
    with torch.no_grad():
        want = model(ids).logits.float()
        with omlx_cache.patched(model):
            got = model(ids).logits.float()
    agree = (want.argmax(-1) == got.argmax(-1)).float().mean().item()
    assert agree > 0.95, f"patched and stock agree on {agree:.1%} of the tokens only"


def measure(model, ids: torch.Tensor, seconds: float) -> dict[str, dict[str, float]]:
    """Let all contenders read ``ids``, then decode in turns for some seconds."""
    contenders = {name: contender(name, model, ids) for name in CONTENDERS}
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or not contenders["stock"].step_s:
        for each in contenders.values():
            each.decode(STEPS)
    return {
        name: {
            "tokens_per_s": 1 / statistics.median(c.step_s),
            "first_token_s": c.first_token_s,
            "cache_bytes": c.num_bytes(),
        }
        for name, c in contenders.items()
    }


@pytest.fixture(scope="module")
def prepared():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, ids = prepare(device)
    check(model, ids[:, :512])
    return model, ids


@pytest.mark.real_model
@pytest.mark.parametrize("name", CONTENDERS)
@pytest.mark.parametrize(
    "tokens", [pytest.param(n, marks=pytest.mark.long) if n in LONG else n for n in LENGTHS]
)
def test_next_token(benchmark, prepared, tokens, name):
    model, ids = prepared
    timed = contender(name, model, ids[:, :tokens])
    benchmark.group = f"next token after {tokens}"
    benchmark.extra_info |= {
        "first_token_s": timed.first_token_s,
        "cache_bytes": timed.num_bytes(),
        "threads": torch.get_num_threads(),
    }
    benchmark.pedantic(timed.decode, kwargs={"steps": 1}, rounds=24, warmup_rounds=4)


def main() -> None:
    """Print tokens/s, seconds to the first token and cache bytes by length."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tokens", type=int, nargs="*", default=list(LENGTHS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=15.0, help="of decoding, per length")
    parser.add_argument("--json", type=Path, help="write the numbers and the machine here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, ids = prepare(device)
    check(model, ids[:, :512])
    implementation = ops.implementation(torch.device(device)).__name__
    print(f"{implementation}, {args.threads} threads, {model.dtype}; x: ratio to stock")
    results = {}
    for tokens in args.tokens:
        results[tokens] = rows = measure(model, ids[:, :tokens], args.seconds)
        stock = rows["stock"]
        for name, row in rows.items():
            speed = row["tokens_per_s"] / stock["tokens_per_s"]
            first = stock["first_token_s"] / row["first_token_s"]
            print(
                f"{tokens:5d} {name:12s} {row['tokens_per_s']:6.2f} tokens/s ({speed:.2f}x)  "
                f"first token {row['first_token_s']:6.2f} s ({first:.2f}x)  "
                f"cache {row['cache_bytes'] / 2**20:6.1f} MiB"
            )
    if args.json:
        machine = {
            "processor": platform.processor() or platform.machine(),
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            "threads": args.threads,
            "torch": torch.__version__,
            "implementation": implementation,
        }
        args.json.write_text(json.dumps({"machine": machine, "results": results}, indent=1))


if __name__ == "__main__":
    main()
