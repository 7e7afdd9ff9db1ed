"""What else serves the same purpose: PyTorch's own attention, and transformers' own caches.

`decode_peers` are the contenders of one decode step of one layer, `stock_cache` is a cache of
transformers for a whole model. Its hqq back end needs the package hqq (extra ``bench``); without it
`have` says so by name, and whoever asks goes on without.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from transformers import Cache, DynamicCache, LlamaConfig, PretrainedConfig, QuantizedCache
from transformers.utils import is_hqq_available

SDPA = ("sdpa-bf16", "sdpa-fp32", "sdpa-bf16-gqa", "sdpa-fp32-gqa")
"""PyTorch's attention on a contiguous cache: with the query heads of a group as rows (its fastest
form on a CPU), and with ``enable_gqa``."""
CACHES = ("DynamicCache", "QuantizedCache-fp8", "QuantizedCache-hqq")
"""A cache of transformers and SDPA with ``enable_gqa``, in bf16, as the stock model calls them."""


def have(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names without those whose package is missing; say which and how to get it."""
    if is_hqq_available():
        return names
    missing = [name for name in names if name.endswith("hqq")]
    if missing:
        text = "the package hqq is not installed (pip install -c constraints.txt hqq)"
        print(f"without {', '.join(missing)}: {text}", file=sys.stderr)
    return tuple(name for name in names if name not in missing)


def stock_cache(kind: str, config: PretrainedConfig) -> Cache:
    """Return an empty cache of transformers for a model.

    Args:
        kind: one of `CACHES`. hqq is asked for 8 bits in groups of 64 channels (``axis=1``), as
            near to ours as it gets; its default is 4 bits.
        config: the model's.
    """
    if kind == "DynamicCache":
        return DynamicCache(config=config)
    if kind == "QuantizedCache-fp8":
        return QuantizedCache("fp8", config=config)
    return QuantizedCache("hqq", config=config, nbits=8, axis_key=1, axis_value=1)


def decode_peer(
    name: str, heads: tuple[int, int, int], tokens: int, device: torch.device
) -> tuple[Callable[[], torch.Tensor], int]:
    """Return a decode step of one layer and the bytes of keys and values that it attends to.

    Args:
        name: one of `SDPA` or `CACHES`.
        heads: query heads, key heads, head_dim.
        tokens: tokens in the cache, the new one included.
        device: where.
    """
    num_heads, kv_heads, dim = heads
    dtype = torch.float32 if "fp32" in name else torch.bfloat16
    q = torch.randn(1, num_heads, 1, dim, device=device, dtype=dtype)
    k, v = torch.randn(2, 1, kv_heads, tokens, dim, device=device, dtype=dtype)
    num_bytes = 2 * k.numel() * k.element_size()
    attend = F.scaled_dot_product_attention
    gqa = num_heads != kv_heads
    if name.endswith("gqa"):
        return lambda: attend(q, k, v, enable_gqa=gqa), num_bytes
    if name in SDPA:
        q = q.view(1, kv_heads, num_heads // kv_heads, dim)
        return lambda: attend(q, k, v), num_bytes

    config = LlamaConfig(
        num_hidden_layers=1,
        hidden_size=num_heads * dim,
        num_attention_heads=num_heads,
        num_key_value_heads=kv_heads,
        head_dim=dim,
    )
    layer = stock_cache(name, config).layers[0]
    layer.update(k[:, :, :-1], v[:, :, :-1])
    last = k[:, :, -1:], v[:, :, -1:]
    before = dict(vars(layer))  # every step starts from here: none writes to the tensors it finds

    def step() -> torch.Tensor:
        vars(layer).update(before)
        return attend(q, *layer.update(*last), enable_gqa=gqa)

    return step, num_bytes
