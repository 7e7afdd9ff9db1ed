"""Who is compared: what transformers has, what others built for it, llama.cpp, and this project.

A contender opens a *reader* (a model with everything that belongs to its kind of cache), a reader
starts *sessions* (an empty cache each), and a session is fed token ids. Nothing else differs
between them, so that every measure (`peers_measures`) is the same few lines for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import peers_llama
import peers_others
import torch
from peers_transformers import StockReader, open_paged, open_stock
from transformers import DynamicCache, QuantizedCache

STOCK = "transformers, DynamicCache"
LLAMA = "llama.cpp, f16"


class Session(Protocol):
    """A cache that is being filled."""

    def feed(self, ids: Sequence[int], kept: int) -> torch.Tensor:
        """Read ids; return float32 logits [kept, vocabulary] after the last ``kept`` of them."""

    def num_bytes(self) -> int:
        """Return the bytes of all tensors that the cache holds now."""


class Reader(Protocol):
    """A loaded model with one kind of cache."""

    def start(self, max_tokens: int) -> Session:
        """Return a session with an empty cache that will be fed at most ``max_tokens`` ids."""


@dataclass(frozen=True)
class Source:
    """Where the one model comes from, in the two formats.

    Attributes:
        checkpoint: a Hugging Face directory or hub id.
        gguf: llama.cpp's file; None where there is none.
    """

    checkpoint: str
    gguf: Path | None


@dataclass(frozen=True)
class Contender:
    """One row of the result.

    Attributes:
        name: of the row.
        setting: what identifies it, as plain data.
        open: (source, torch dtype) -> `Reader`.
        needs: distributions that it can't do without, beside this project's own.
        base: the contender with an unquantized cache that its logits are compared with.
    """

    name: str
    setting: dict
    open: Callable[[Source, torch.dtype], Reader]
    needs: tuple[str, ...] = ()
    base: str = STOCK


def _integers(backend: str, bits: int, axis: int) -> Callable:
    return partial(_quantized, backend, nbits=bits, axis_key=axis, axis_value=axis, q_group_size=64)


def _quantized(backend: str, config, **options) -> QuantizedCache:
    return QuantizedCache(backend, config=config, **options)


def _transformers() -> list[Contender]:
    """What transformers 5.24 itself has.

    The groups of hqq run along axis 1 and those of quanto along axis 0, as its documentation says.
    """
    caches = {
        STOCK: ({"cache": "DynamicCache"}, lambda config: DynamicCache(config=config), ()),
        "transformers, OffloadedCache": (
            {"cache": "DynamicCache", "offloading": True},
            lambda config: DynamicCache(config=config, offloading=True),
            (),
        ),
        "transformers, QuantizedCache fp8": (
            {"cache": "QuantizedCache", "backend": "fp8"},
            partial(_quantized, "fp8"),
            (),
        ),
    }
    for backend, bits, axis, needs in (
        ("hqq", 8, 1, "hqq"),
        ("hqq", 4, 1, "hqq"),
        ("quanto", 4, 0, "optimum-quanto"),
    ):
        setting = {"cache": "QuantizedCache", "backend": backend, "bits": bits, "axis": axis}
        caches[f"transformers, QuantizedCache {backend} {bits} bits"] = (
            setting,
            _integers(backend, bits, axis),
            (needs,),
        )
    return [
        Contender(name, setting, partial(open_stock, make), needs)
        for name, (setting, make, needs) in caches.items()
    ]


def _others() -> list[Contender]:
    """What others built for transformers' models."""
    return [
        Contender(
            "kvpress, SnapKV, half of the tokens",
            {"press": "SnapKVPress", "compression_ratio": 0.5},
            peers_others.open_kvpress,
            ("kvpress",),
        ),
        Contender(
            "fused-turboquant, 4 bits",
            {"bits": 4},
            peers_others.open_fused_turboquant,
            ("fused-turboquant",),
        ),
        Contender(
            "turboquant-kv, 4 bits",
            {"bits": 4},
            peers_others.open_turboquant_kv,
            ("turboquant-kv",),
        ),
    ]


def _llama_cpp() -> list[Contender]:
    return [
        Contender(
            f"llama.cpp, {kind}",
            {"type_k": kind, "type_v": kind, "flash_attn": True},
            partial(peers_llama.open_llama, kind),
            ("llama-cpp-python",),
            LLAMA,
        )
        for kind in ("f16", "q8_0", "q4_0")
    ]


def _ours() -> list[Contender]:
    settings = {
        "8 bits (default)": {},
        "K 8, V 4 bits": {"cache_bits": {"k": 8, "v": 4}},
        "4 bits": {"cache_bits": 4},
        "8 bits, window 1024": {"window_size": 1024},
    }
    return [
        Contender(f"omlx_cache, {name}", setting, partial(open_paged, setting))
        for name, setting in settings.items()
    ]


def contenders() -> list[Contender]:
    """Return all of them, in the order of the table."""
    return [*_transformers(), *_others(), *_llama_cpp(), *_ours()]


def by_name(name: str) -> Contender:
    """Return the contender of a name that `contenders` has."""
    return next(c for c in contenders() if c.name == name)


__all__ = ["LLAMA", "STOCK", "Contender", "Reader", "Session", "Source", "StockReader"]
