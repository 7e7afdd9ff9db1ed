"""What each setting costs in quality and saves in bytes, on the real model.

SmolLM2-135M in float32 reads technical text teacher-forced; the second half of the positions is
compared with the stock model on the same text. Bytes are those of the same cache in a 16-bit model,
every scale, table slot and free byte counted, against a contiguous 16-bit cache of as many tokens.

    python bench/quality.py --tokens 8192 --json bench/results/quality.json
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch

import omlx_cache
from omlx_cache.tools.divergence import compare, teacher_forced
from omlx_cache.tools.loading import load_model, load_tokenizer
from omlx_cache.tools.smollm2 import smollm2_checkpoint
from omlx_cache.tools.texts import token_ids
from omlx_kernels.layout import Tier

SETTINGS = {
    "16 bits": {"cache_bits": 16},
    "8 bits (default)": {},
    "K 8, V 4 bits": {"cache_bits": {"k": 8, "v": 4}},
    "6200 tokens K 8, V 4; then 4 bits": {"tiers": {"k8v4": 6200, "k4v4": None}},
    "1024 tokens K 8, V 4; then 4 bits": {"tiers": {"k8v4": 1024, "k4v4": None}},
    "4 bits": {"cache_bits": 4},
    "8 bits, window 1024": {"window_size": 1024},
    "8 bits, window 1024, no sinks": {"window_size": 1024, "sink_tokens": 0},
}


def bytes_at_16_bits(cache: omlx_cache.PagedCache) -> int:
    """Return what the cache's blocks take in a 16-bit model: hot ones half of float32."""
    halved = {"sink", "hot"}
    sizes = cache.report().bytes_by_tier
    assert set(sizes) == {tier.name.lower() for tier in Tier}
    return sum(size // 2 if name in halved else size for name, size in sizes.items())


def main() -> None:
    """Print one line a setting: saved bytes, KLD, top-1, perplexity."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--only", nargs="*", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--json", type=Path, help="write the numbers here")
    args = parser.parse_args()
    path = smollm2_checkpoint()
    model = load_model(path, dtype=torch.float32)
    ids = torch.tensor([token_ids("quality", load_tokenizer(path), args.tokens)])
    reference = teacher_forced(model, ids, args.tokens // 2)
    per_token = model.config.num_hidden_layers * model.config.num_key_value_heads
    full = args.tokens * per_token * model.config.head_dim * 2 * 2
    rows = {}
    for name in args.only:
        with omlx_cache.patched(model, **SETTINGS[name]):
            cache = omlx_cache.PagedCache(model)
            candidate = teacher_forced(model, ids, args.tokens // 2, cache=cache)
        row = asdict(compare(reference, candidate, ids))
        row["saved"] = 1 - bytes_at_16_bits(cache) / full
        rows[name] = row
        print(
            f"{name:36s} saved {row['saved']:6.1%}  KLD {row['kld']:.6f}  top-1 {row['top1']:.2%}"
            f"  perplexity {row['perplexity_ratio']:+.3%}",
            flush=True,
        )
    if args.json:
        versions = {"torch": torch.__version__, "tokens": args.tokens}
        args.json.write_text(json.dumps({"versions": versions, "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
