"""How small do blocks at rest get, and what does it cost? Variants of the codec on a real cache.

SmolLM2-135M reads 4096 tokens of technical text and more; its full blocks are taken as they lie in
the cache, 256 tokens of all layers at once, tier by tier, and each part (keys, values, scales) is
stored and read back in several ways:

    zstd          the bytes as they are, zstandard level 1
    zstd 3        the same, level 3
    planes        byte i of every element together (floats only), each plane by itself
    delta         each token minus the one before it, channel by channel, on the codes (nibbles for
                  4 bits) or on the bit patterns of floats; then planes
    by channel    a channel's tokens next to each other; then planes
    codec         `omlx_cache.storage.codec`: planes, each compressed only where that pays

Every variant is decoded and compared before it gets a number. Ratios (bytes before / after) are
exact. Speeds are bytes before over the *CPU time* of one thread, so that other work on the machine
counts little; best of the rounds. What is stored as it is, is decoded without a copy.

    python bench/bench_codec.py --json bench/results/codec.json     # the table
    pytest bench/bench_codec.py                                     # pytest-benchmark, wall clock
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard

import omlx_cache
from omlx_cache.compat import cache_name
from omlx_cache.storage import codec
from omlx_cache.storage.codec import ITEM_SIZE, RawTensor
from omlx_cache.storage.tensors import to_raw
from omlx_cache.tools.loading import load_model, load_tokenizer
from omlx_cache.tools.smollm2 import smollm2_checkpoint
from omlx_cache.tools.texts import token_ids
from omlx_kernels.layout import Tier

BLOCKS = 16
TIERS = {
    Tier.K8V8: (torch.float32, {"cache_bits": 8}),
    Tier.K8V4: (torch.float32, {"cache_bits": {"k": 8, "v": 4}}),
    Tier.K4V4: (torch.float32, {"cache_bits": 4}),
    Tier.HOT: (torch.bfloat16, {"cache_bits": 16}),
}
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


@dataclass(frozen=True)
class Part:
    """One part of one block: its tensor, and whether its bytes hold two codes each."""

    tensor: RawTensor
    is_nibbles: bool

    @property
    def words(self) -> np.ndarray:
        """[rows, tokens, channels] unsigned integers."""
        shape = self.tensor.shape
        channels = shape[3] if len(shape) == 4 else 1
        words = np.frombuffer(self.tensor.data, WORDS[ITEM_SIZE[self.tensor.dtype]])
        return words.reshape(-1, shape[2], channels)


@cache
def parts_of(tier: Tier) -> dict[str, list[Part]]:
    """Return the parts of `BLOCKS` blocks of a tier, each over all layers."""
    dtype, config = TIERS[tier]
    path = smollm2_checkpoint()
    model = load_model(path, dtype=dtype)
    ids = torch.tensor([token_ids("quality", load_tokenizer(path), (BLOCKS + 1) * 256 + 4)])
    with omlx_cache.patched(model, **config), torch.no_grad():
        stored = omlx_cache.PagedCache(model)
        model(ids, logits_to_keep=1, **{cache_name(type(model).forward): stored})
    group = stored.groups[0]
    indices = [b.index for b in group.rows[0].blocks if b.tier is tier][:BLOCKS]
    found: dict[str, list[Part]] = {}
    for index in indices:
        for name in group.pools[0].blocks.tier(tier).tensors():
            layers = [pool.blocks.tier(tier).tensors()[name][index] for pool in group.pools]
            bits = dict(zip("kv", tier.bits or (16, 16), strict=True)).get(name)
            found.setdefault(name, []).append(Part(to_raw(torch.stack(layers)), bits == 4))
    return found


def planes(words: np.ndarray) -> list[np.ndarray]:
    """Split words into their bytes."""
    octets = np.ascontiguousarray(words).view(np.uint8).reshape(-1, words.itemsize)
    return [np.ascontiguousarray(octets[:, i]) for i in range(words.itemsize)]


def from_planes(split: list[np.ndarray], like: np.ndarray, shape=None) -> np.ndarray:
    """Undo `planes`."""
    return np.stack(split, 1).reshape(-1).view(like.dtype).reshape(shape or like.shape)


def delta(part: Part) -> np.ndarray:
    """Subtract from each token the one before it."""
    words = part.words
    if part.is_nibbles:
        low, high = words & 15, words >> 4
        return (_minus_previous(low) & 15) | (_minus_previous(high) & 15) << 4
    return _minus_previous(words)


def _minus_previous(words: np.ndarray) -> np.ndarray:
    out = words.copy()
    out[:, 1:] -= words[:, :-1]
    return out


def sums(words: np.ndarray, is_nibbles: bool) -> np.ndarray:
    """Undo `delta`."""
    if is_nibbles:
        low = np.cumsum(words & 15, 1, dtype=np.uint8) & 15
        return low | (np.cumsum(words >> 4, 1, dtype=np.uint8) & 15) << 4
    return np.cumsum(words, 1, dtype=words.dtype)


def channels_first(words: np.ndarray) -> np.ndarray:
    """Put a channel's tokens next to each other."""
    return np.ascontiguousarray(words.swapaxes(1, 2))


Chunks = list[bytes]


def squeeze(arrays: list[np.ndarray], level: int = codec.LEVEL) -> Chunks:
    """Compress each array."""
    compressor = zstandard.ZstdCompressor(level=level)
    return [compressor.compress(array.data.cast("B")) for array in arrays]


def expand(chunks: Chunks) -> list[np.ndarray]:
    """Undo `squeeze`."""
    decompressor = zstandard.ZstdDecompressor()
    return [np.frombuffer(decompressor.decompress(chunk), np.uint8) for chunk in chunks]


def plain(part: Part) -> np.ndarray:
    """Return the bytes as they are."""
    return np.frombuffer(part.tensor.data, np.uint8)


def codec_encode(part: Part) -> Chunks:
    """Encode with the codec itself; what describes the planes is not counted here."""
    return [codec.encode(part.tensor)]


def codec_decode(part: Part, chunks: Chunks) -> np.ndarray:
    """Undo `codec_encode`."""
    (e,) = chunks
    data = e.chunks[0] if len(e.chunks) == 1 else b"".join(map(bytes, e.chunks))
    return np.frombuffer(codec.decode(e.dtype, e.shape, e.planes, data).data, np.uint8)


def _decode_channels(part: Part, chunks: Chunks) -> np.ndarray:
    words = part.words
    rows, tokens, channels = words.shape
    return from_planes(expand(chunks), words, (rows, channels, tokens)).swapaxes(1, 2)


Variant = tuple[Callable[[Part], Chunks], Callable[[Part, Chunks], np.ndarray]]
VARIANTS: dict[str, Variant] = {
    "zstd": (lambda p: squeeze([plain(p)]), lambda p, c: expand(c)[0]),
    "zstd 3": (lambda p: squeeze([plain(p)], 3), lambda p, c: expand(c)[0]),
    "planes": (lambda p: squeeze(planes(p.words)), lambda p, c: from_planes(expand(c), p.words)),
    "delta": (
        lambda p: squeeze(planes(delta(p))),
        lambda p, c: sums(from_planes(expand(c), p.words), p.is_nibbles),
    ),
    "by channel": (lambda p: squeeze(planes(channels_first(p.words))), _decode_channels),
    "codec": (codec_encode, codec_decode),
}


def stored_bytes(chunks: Chunks) -> int:
    """Return what a variant stores."""
    return sum(c.num_bytes if isinstance(c, codec.EncodedTensor) else len(c) for c in chunks)


def check(variant: str, parts: list[Part]) -> None:
    """Raise unless every part comes back bit for bit."""
    encode, decode = VARIANTS[variant]
    for part in parts:
        back = np.ascontiguousarray(decode(part, encode(part))).view(np.uint8).ravel()
        if not np.array_equal(back, plain(part)):
            raise AssertionError(f"{variant} does not give back what it was given")


def measure(variant: str, parts: list[Part], rounds: int) -> dict[str, float]:
    """Return bytes before and after, and the best CPU seconds to encode and decode all parts."""
    encode, decode = VARIANTS[variant]
    check(variant, parts)
    encoded = [encode(part) for part in parts]
    times = {"encode_s": [], "decode_s": []}
    for _ in range(rounds):
        began = time.thread_time()
        for part in parts:
            encode(part)
        middle = time.thread_time()
        for part, chunks in zip(parts, encoded, strict=True):
            np.ascontiguousarray(decode(part, chunks))
        times["encode_s"].append(middle - began)
        times["decode_s"].append(time.thread_time() - middle)
    return {
        "raw_bytes": sum(part.tensor.num_bytes for part in parts),
        "stored_bytes": sum(map(stored_bytes, encoded)),
        **{name: min(values) for name, values in times.items()},
    }


def speeds(rows: list[dict[str, float]]) -> dict[str, float]:
    """Add up the parts of a block, or take one: ratio and MB/s."""
    total = {name: sum(row[name] for row in rows) for name in rows[0]}
    return {
        "ratio": total["raw_bytes"] / total["stored_bytes"],
        "encode_mb_per_cpu_s": total["raw_bytes"] / total["encode_s"] / 1e6,
        "decode_mb_per_cpu_s": total["raw_bytes"] / total["decode_s"] / 1e6,
    }


@pytest.mark.real_model
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("tier", TIERS, ids=lambda tier: tier.name)
def test_store_and_read_back(benchmark, tier, part, variant):
    """Time a round trip of one part of one block."""
    parts = parts_of(tier)[part][:1]
    check(variant, parts)
    encode, decode = VARIANTS[variant]
    benchmark.group = f"{tier.name} {part}"
    row = measure(variant, parts, 1)
    benchmark.extra_info["ratio"] = row["raw_bytes"] / row["stored_bytes"]
    benchmark.pedantic(lambda: decode(parts[0], encode(parts[0])), rounds=5, warmup_rounds=1)


def main() -> None:
    """Print one line a part and variant, and one for whole blocks."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the numbers here")
    args = parser.parse_args()
    results: dict[str, dict] = {}
    for tier in TIERS:
        rows = {
            name: {variant: measure(variant, parts, args.rounds) for variant in VARIANTS}
            for name, parts in parts_of(tier).items()
        }
        named = {name: {v: speeds([row]) for v, row in own.items()} for name, own in rows.items()}
        named["block"] = {v: speeds([own[v] for own in rows.values()]) for v in VARIANTS}
        results[tier.name] = named
        for name, own in named.items():
            for variant, row in own.items():
                print(
                    f"{tier.name:5s}{name:8s} {variant:11s} ratio {row['ratio']:.3f}  "
                    f"encode {row['encode_mb_per_cpu_s']:6.0f} MB/s  "
                    f"decode {row['decode_mb_per_cpu_s']:6.0f} MB/s",
                    flush=True,
                )
    if args.json:
        versions = {
            "torch": torch.__version__,
            "zstandard": zstandard.__version__,
            "zstd": ".".join(map(str, zstandard.ZSTD_VERSION)),
            "level": codec.LEVEL,
            "tokens": BLOCKS * 256,
            "model": "SmolLM2-135M-Instruct",
            "note": "MB of raw bytes per second of one thread's CPU time, on a shared machine",
        }
        text = json.dumps({"versions": versions, "results": results}, indent=1)
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
