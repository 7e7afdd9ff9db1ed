"""Extend: a prefill chunk of 512 queries on 7,680 tokens of history, against torch's SDPA in bf16.

One group per shape holds torch's SDPA in bf16 on an unquantized contiguous cache (mask given; with
the query heads of a group as extra rows, and with ``enable_gqa``: the faster of the two is the
peer), and `ops.paged_attention` on 8-bit and on mixed history with the chunk itself hot. What is
timed is first compared with the torch implementation of the op.

    pytest bench/bench_extend.py                # everything
    python bench/bench_extend.py --json OUT     # ratios, contenders taking turns
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from omlx_kernels import ops, vectorized
from omlx_kernels.layout import BLOCK_TIERS, BlockFormat, LayerBlocks, Tier
from omlx_kernels.metadata import AttentionMetadata

SHAPES = {"9/3/64": (9, 3, 64), "32/8/128": (32, 8, 128), "32/32/128": (32, 32, 128)}
QUERIES, HISTORY, BLOCK_SIZE = 512, 7680, 256
KINDS = {"8-bit": {Tier.K8V8: 1.0}, "mixed": {Tier.K8V4: 0.75, Tier.K4V4: 0.25}}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_paged(shape: str, kind: str) -> Callable[[], torch.Tensor]:
    """Return a call of `ops.paged_attention`; its result has been compared with torch's."""
    num_heads, kv_heads, dim = SHAPES[shape]
    fmt = BlockFormat(BLOCK_SIZE, 0, kv_heads, dim, torch.bfloat16)
    old = HISTORY // BLOCK_SIZE
    counts = dict.fromkeys(Tier, 0) | {Tier.HOT: QUERIES // BLOCK_SIZE}
    counts |= {tier: round(share * old) for tier, share in KINDS[kind].items()}
    counts[Tier.K8V4] += (old - sum(counts[t] for t in BLOCK_TIERS[1:])) * (kind == "mixed")
    blocks = LayerBlocks(*(fmt.allocate(tier, counts[tier], DEVICE) for tier in Tier))
    staged = fmt.allocate(Tier.HOT, 1, DEVICE)
    zero = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    for tier in BLOCK_TIERS[1:]:
        for i in range(counts[tier]):
            staged.k.normal_()
            staged.v.normal_()
            ops.convert_blocks(staged, blocks.tier(tier), Tier.HOT, tier, zero, zero + i)
    blocks.hot.k.normal_()
    blocks.hot.v.normal_()
    ids, starts, bounds = [], [], [0]
    first = {Tier.HOT: HISTORY, Tier.K4V4: 0}  # the colder, the older
    first[Tier.K8V4] = counts[Tier.K4V4] * BLOCK_SIZE
    first[Tier.K8V8] = 0
    for tier in BLOCK_TIERS:
        ids += range(counts[tier])
        starts += [first[tier] + i * BLOCK_SIZE for i in range(counts[tier])]
        bounds.append(len(ids))

    def table(*rows: object) -> torch.Tensor:
        return torch.tensor(rows, dtype=torch.int32, device=DEVICE)

    meta = AttentionMetadata(
        table(ids),
        table(starts),
        table(bounds),
        table(0),
        table(HISTORY + QUERIES),
        table(0, QUERIES),
        torch.zeros(0, 4, dtype=torch.int32, device=DEVICE),
        table(0, 0),
        max_query_len=QUERIES,
    )
    q = torch.randn(QUERIES, num_heads, dim, device=DEVICE, dtype=torch.bfloat16)
    kwargs = {"sm_scale": dim**-0.5, "rotated_v": kind == "mixed"}

    def call() -> torch.Tensor:
        return ops.paged_attention(q, blocks, meta, **kwargs)

    want = vectorized.paged_attention(q, blocks, meta, **kwargs)
    torch.testing.assert_close(call().float(), want.float(), rtol=0.05, atol=0.02)
    return call


def make_sdpa(shape: str, kind: str) -> Callable[[], torch.Tensor]:
    """Return a call of torch's own attention on a contiguous cache."""
    num_heads, kv_heads, dim = SHAPES[shape]
    tokens = HISTORY + QUERIES
    q = torch.randn(1, num_heads, QUERIES, dim, device=DEVICE, dtype=torch.bfloat16)
    k, v = (torch.randn(1, kv_heads, tokens, dim, device=DEVICE).to(q) for _ in "kv")
    positions = torch.arange(tokens, device=DEVICE)
    mask = positions <= torch.arange(HISTORY, tokens, device=DEVICE)[:, None]
    if kind == "sdpa gqa":
        return lambda: F.scaled_dot_product_attention(
            q, k, v, mask, enable_gqa=num_heads != kv_heads
        )
    rows, mask = q.view(1, kv_heads, -1, dim), mask.repeat(num_heads // kv_heads, 1)
    return lambda: F.scaled_dot_product_attention(rows, k, v, mask)


MAKERS = {
    "sdpa grouped": make_sdpa,
    "sdpa gqa": make_sdpa,
    "8-bit": make_paged,
    "mixed": make_paged,
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_extend(benchmark, shape, kind):
    benchmark.group = f"extend {shape}: {QUERIES} queries on {HISTORY} tokens"
    benchmark(MAKERS[kind](shape, kind))


def seconds(call: Callable[[], torch.Tensor]) -> float:
    """Time one call."""
    start = time.perf_counter()
    call()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    """Print the ratios to the faster form of SDPA; write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = {}
    for shape in SHAPES:
        calls = {kind: make(shape, kind) for kind, make in MAKERS.items()}
        times = {kind: [] for kind in calls}
        for _ in range(args.rounds):
            for kind, call in calls.items():
                times[kind].append(seconds(call))
        ms = {kind: statistics.median(t) * 1e3 for kind, t in times.items()}
        peer = min(ms["sdpa grouped"], ms["sdpa gqa"])
        results[shape] = {kind: {"ms": t, "ratio": peer / t} for kind, t in ms.items()}
        line = ", ".join(f"{kind} {t:.1f} ms ({peer / t:.2f}x)" for kind, t in ms.items())
        print(f"{shape}: {line}", flush=True)
    if args.json:
        machine = {
            "processor": platform.processor() or platform.machine(),
            "device": str(DEVICE),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }
        text = json.dumps({"machine": machine, "extend": results}, indent=1)
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
