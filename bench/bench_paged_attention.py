"""Decode attention: how much faster than PyTorch's own, and how close to reading the bytes once?

One group per shape and length holds the contenders: torch's SDPA in bf16 and fp32 on a contiguous
cache (queries of a group as rows, its fastest form on a CPU, and with ``enable_gqa``), DynamicCache
and QuantizedCache of transformers (fp8, and hqq where it is installed) with SDPA behind them, a
bare read of as many bytes as the 8-bit blocks have, and `ops.paged_attention` on hot blocks, on
8-bit blocks (the newest one hot), on 8-bit blocks with a window of 1024, and on mixed tiers: of the
old blocks, the older quarter K4V4 and the others K8V4, values rotated. What is timed is first
compared with plain torch.

    pytest bench/bench_paged_attention.py                     # 1024 and 8192 tokens
    pytest bench/bench_paged_attention.py --long              # everything, some minutes
    pytest bench/bench_paged_attention.py -k "8192 and 9/3"   # one group
    python bench/bench_paged_attention.py --tokens 8192       # ratios, contenders taking turns

On a shared machine believe only the ratios of the last form, and only their repetition.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import pytest
import torch
from decode_peers import CACHES, SDPA, decode_peer, have

from omlx_kernels import ops, vectorized
from omlx_kernels.layout import BLOCK_TIERS, BlockFormat, LayerBlocks, Tier
from omlx_kernels.metadata import AttentionMetadata

SHAPES = {"9/3/64": (9, 3, 64), "32/8/128": (32, 8, 128), "32/32/128": (32, 32, 128)}
LENGTHS = (1024, 4096, 8192, 32768)
LONG = (4096, 32768)
OURS = ("hot", "8-bit", "window", "mixed")
CONTENDERS = have((*SDPA, *CACHES, "read", *OURS))
WINDOW, SINK_TOKENS, BLOCK_SIZE = 1024, 4, 256
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Decode:
    """One decode step of one sequence whose keys and values are random."""

    def __init__(self, shape: str, tokens: int, kind: str) -> None:
        num_heads, kv_heads, dim = SHAPES[shape]
        self.format = BlockFormat(BLOCK_SIZE, SINK_TOKENS, kv_heads, dim, torch.bfloat16)
        self.window = WINDOW if kind == "window" else None
        self.scale = dim**-0.5
        starts = list(range(SINK_TOKENS, tokens, BLOCK_SIZE))
        if self.window:
            starts = [s for s in starts if s + BLOCK_SIZE > tokens - self.window]
        self.rotated_v = kind == "mixed"
        num_hot = len(starts) if kind == "hot" else 1
        old = len(starts) - num_hot
        counts = dict.fromkeys(Tier, 0) | {Tier.SINK: 1, Tier.HOT: num_hot}
        if kind == "mixed":
            counts[Tier.K4V4] = old // 4
            counts[Tier.K8V4] = old - old // 4
        else:
            counts[Tier.K8V8] = old
        self.blocks = LayerBlocks(
            *(self.format.allocate(tier, counts[tier], DEVICE) for tier in Tier)
        )
        self.num_bytes = sum(n * self.format.bytes_per_block(tier) for tier, n in counts.items())
        self._fill()
        self.q = torch.randn(1, num_heads, dim, device=DEVICE, dtype=torch.bfloat16)
        table, ordered, bounds, newest = [], [], [0], len(starts)
        for tier in BLOCK_TIERS:  # from the newest blocks to the oldest
            table += torch.randperm(counts[tier]).tolist()
            ordered += starts[newest - counts[tier] : newest]
            newest -= counts[tier]
            bounds.append(len(table))
        self.meta = self._tables(table, ordered, bounds, tokens)

    def _fill(self) -> None:
        for tier in (self.blocks.sink, self.blocks.hot):
            tier.k.normal_()
            tier.v.normal_()
        for tier in (Tier.K8V8, Tier.K8V4, Tier.K4V4):
            blocks, (k_bits, v_bits) = self.blocks.tier(tier), tier.bits
            blocks.k.random_(0, 256)
            blocks.k_scale.fill_(5.0 / (2**k_bits - 1))
            blocks.k_zero.fill_(-2.5)
            if v_bits == 8:
                blocks.v.random_(-127, 128)
                blocks.v_scale.uniform_(0.01, 0.03)
            else:
                blocks.v.random_(0, 256)
                blocks.v_scale.uniform_(0.2, 0.6)
                blocks.v_zero.fill_(-3.0)

    @staticmethod
    def _tables(
        table: list[int], starts: list[int], bounds: list[int], tokens: int
    ) -> AttentionMetadata:
        splits = [(0, int(Tier.SINK), 0, 1)]
        for i, tier in enumerate(BLOCK_TIERS):
            for first in range(bounds[i], bounds[i + 1], 4):
                splits.append((0, int(tier), first, min(first + 4, bounds[i + 1])))

        def int32(x: list) -> torch.Tensor:
            return torch.tensor(x, dtype=torch.int32, device=DEVICE)

        return AttentionMetadata(
            block_table=int32([table]),
            block_starts=int32([starts]),
            tier_starts=int32([bounds]),
            sink_pages=int32([0]),
            seq_lens=int32([tokens]),
            query_start_loc=int32([0, 1]),
            splits=int32(splits),
            split_starts=int32([0, len(splits)]),
            max_query_len=1,
        )

    def run(self, attention: Callable = ops.paged_attention) -> torch.Tensor:
        return attention(
            self.q,
            self.blocks,
            self.meta,
            sm_scale=self.scale,
            window_size=self.window,
            rotated_v=self.rotated_v,
        )

    def check(self) -> None:
        """Compare with plain torch; a number of a wrong result is no number."""
        want = self.run(vectorized.paged_attention)
        torch.testing.assert_close(self.run(), want, rtol=2**-7, atol=1e-3)


def contender(name: str, shape: str, tokens: int) -> tuple[Callable[[], object], int]:
    """Return what to time and the bytes that it has to read."""
    if name in OURS:
        decode = Decode(shape, tokens, name)
        decode.check()
        return _synchronised(decode.run), decode.num_bytes
    if name == "read":
        num_bytes = Decode(shape, tokens, "8-bit").num_bytes
        buffer = torch.randn(num_bytes // 4, device=DEVICE)
        return _synchronised(buffer.sum), num_bytes
    run, num_bytes = decode_peer(name, SHAPES[shape], tokens, DEVICE)
    return _synchronised(run), num_bytes


def _synchronised(run: Callable[[], object]) -> Callable[[], object]:
    if DEVICE.type != "cuda":
        return run

    def timed() -> None:
        run()
        torch.cuda.synchronize()

    return timed


@pytest.mark.benchmark(max_time=0.5)
@pytest.mark.parametrize("name", CONTENDERS)
@pytest.mark.parametrize(
    "tokens", [pytest.param(n, marks=pytest.mark.long) if n in LONG else n for n in LENGTHS]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_decode(benchmark, shape, tokens, name):
    run, num_bytes = contender(name, shape, tokens)
    benchmark.group = f"decode {shape}, {tokens} tokens"
    benchmark.extra_info |= {
        "bytes": num_bytes,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "implementation": ops.implementation(DEVICE).__name__,
    }
    benchmark(run)
    benchmark.extra_info["GB/s"] = num_bytes / benchmark.stats.stats.min / 1e9


def main() -> None:
    """Print ratios: the contenders take turns, the least time of each counts."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--shape", choices=SHAPES, nargs="*", default=list(SHAPES))
    parser.add_argument("--tokens", type=int, nargs="*", default=[8192])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=5.0, help="per shape and length")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{ops.implementation(DEVICE).__name__}, {args.threads} threads; ms (x of sdpa-bf16)")
    for shape in args.shape:
        for tokens in args.tokens:
            runs = {name: contender(name, shape, tokens) for name in CONTENDERS}
            best = dict.fromkeys(CONTENDERS, float("inf"))
            until = time.perf_counter() + args.seconds
            while time.perf_counter() < until:
                for name, (run, _) in runs.items():
                    start = time.perf_counter()
                    run()
                    best[name] = min(best[name], time.perf_counter() - start)
            cells = [f"{n} {t * 1e3:.3f} ({best['sdpa-bf16'] / t:.2f}x)" for n, t in best.items()]
            rate = {n: runs[n][1] / best[n] / 1e9 for n in ("8-bit", "read")}
            share = rate["8-bit"] / rate["read"]
            print(f"{shape} {tokens}: {', '.join(cells)}; 8-bit {rate['8-bit']:.1f} GB/s,")
            print(f"    {share:.0%} of the bare read")


if __name__ == "__main__":
    main()
