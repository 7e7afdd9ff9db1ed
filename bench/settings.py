"""What a setting takes in bytes (exactly, on any machine) and in time (on a quiet one).

    python bench/settings.py --json bench/results/settings_bytes.json
    python bench/settings.py --timed --json out.json    # tokens/s, first token: the real model

Bytes: a cache for the heads and layers of LLaMA-2-7B in 16 bits goes through the steps of a prompt
and of some tokens more. Its tensors are on the ``meta`` device and its kernels do nothing, so every
block is taken, converted and released as for a real text, and nothing is computed.

Time: settings take turns in one process, as in ``bench_generate.py``, whose model and text they
read. Only the ratios within one run mean anything.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
import typer
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

import omlx_cache
from omlx_kernels import ops

LAYERS, KV_HEADS, HEAD_DIM = 32, 32, 128
DECODED = 8
TOKENS = (2048, 8192, 32768)
SETTINGS = (
    "cache_bits=8",
    "cache_bits={k: 8, v: 4}",
    "cache_bits=4",
    "cache_bits=4 keep_layers=[0, -1]",
    "target_saving=0.6",
    "window_size=2048",
    "window_size=2048 cache_bits=4",
    *(f"block_size={size}" for size in (64, 128, 256, 512, 1024)),
    *(f"prefill_chunk={chunk}" for chunk in ("128", "512", "2048", "null")),
    *(f"recent_tokens={tokens}" for tokens in (0, 128, 512)),
)
"""What is counted, or with --timed timed, where nothing else is asked for."""


def parse(setting: str) -> dict:
    """Return the keys of a setting: ``block_size=64 cache_bits=4``."""
    pairs = re.findall(r"(\w+)=(\{.*?\}|\[.*?\]|\S+)", setting)
    return {key: yaml.safe_load(value) for key, value in pairs}


def llama() -> LlamaForCausalLM:
    """Return a model with the heads and layers of LLaMA-2-7B, and hardly any weights."""
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=KV_HEADS,
        intermediate_size=8,
        num_hidden_layers=LAYERS,
        num_attention_heads=KV_HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=1 << 20,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def bytes_of(model: LlamaForCausalLM, tokens: int, **setting) -> omlx_cache.CacheReport:
    """Return the report of a cache that has read ``tokens`` and decoded a few.

    Args:
        model: of `llama`.
        tokens: length of the prompt.
        setting: keys of the configuration.
    """
    nothing = mock.patch.multiple(
        ops, append_kv=mock.DEFAULT, convert_blocks=mock.DEFAULT, paged_attention=mock.DEFAULT
    )
    with omlx_cache.patched(model, **setting), nothing as fakes:
        fakes["paged_attention"].side_effect = lambda q, *args, **kwargs: q
        cache = omlx_cache.PagedCache(model)
        chunk = cache.config.prefill_chunk or tokens
        steps = [min(chunk, tokens - first) for first in range(0, tokens, chunk)]
        for columns in [*steps, *[1] * DECODED]:
            with cache.step(np.ones((1, columns), bool)):
                for layer in cache.layers:
                    shape = (1, KV_HEADS, columns, HEAD_DIM)
                    x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
                    layer.update(x, x)
                    layer.attend(x, x, x, sm_scale=1.0)
        return cache.report()


def times_of(settings: list[str], tokens: list[int], seconds: float) -> dict:
    """Return tokens/s, seconds to the first token and bytes by length and setting."""
    import bench_generate

    bench_generate.CONTENDERS = {"stock": None, **{name: parse(name) for name in settings}}
    model, ids = bench_generate.prepare("cuda" if torch.cuda.is_available() else "cpu")
    bench_generate.check(model, ids[:, :512])
    return {n: bench_generate.measure(model, ids[:, :n], seconds) for n in tokens}


def count(settings: list[str], tokens: list[int]) -> dict:
    """Return the bytes, their peak, and those of an unpaged 16-bit cache, by setting and length."""
    model, found = llama(), {}
    for name in settings:
        reports = {n: bytes_of(model, n, **parse(name)) for n in tokens}
        found[name] = {
            n: {
                "bytes": report.total_bytes,
                "peak": report.peak_bytes,
                "unquantized": report.unquantized_bytes,
            }
            for n, report in reports.items()
        }
        cells = (f"{n}: {1 - r.total_bytes / r.unquantized_bytes:.1%}" for n, r in reports.items())
        print(f"{name:34s} saved at {', '.join(cells)}")
    return found


def main(
    settings: list[str] = typer.Argument(None, help="such as 'block_size=64 cache_bits=4'"),
    timed: bool = typer.Option(False, "--timed", help="time the settings on the real model"),
    tokens: list[int] = typer.Option(None, help="lengths"),
    seconds: float = typer.Option(15.0, help="of decoding, per length"),
    out: Path = typer.Option(None, "--json", help="write the numbers here"),
) -> None:
    """Print what settings take."""
    settings = settings or list(SETTINGS)
    if timed:
        found = times_of(settings, tokens or [2048, 8192], seconds)
        for length, rows in found.items():
            for name, row in rows.items():
                ratio = row["tokens_per_s"] / rows["stock"]["tokens_per_s"]
                print(
                    f"{length:6d} {name:34s} {row['tokens_per_s']:6.2f} tokens/s ({ratio:.2f}x)"
                    f"  first token {row['first_token_s']:6.2f} s"
                )
    else:
        found = count(settings, tokens or list(TOKENS))
    if out:
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
