"""At 8 bits a patched model is the stock model with rounded keys and values: no more, no less.

The stock model gets a cache in which exactly the tokens that the paged cache has quantized are
replaced by what the paged cache stores, each within half a step of its scale. From there on both
must say the same: that is the bound, and softcaps, sinks, windows and head sizes are part of it.
"""

from __future__ import annotations

import pytest
import torch
from tiny import FAMILIES, WINDOWED, random_ids, tiny_model
from transformers import DynamicCache

import omlx_cache
from omlx_cache.compat import cache_name
from omlx_kernels import ops
from omlx_kernels.layout import Tier
from omlx_kernels.quantization import read_blocks

PROMPT, NEW = 230, 6
EIGHT_BITS = {"cache_bits": 8, "block_size": 64, "recent_tokens": 0, "prefill_chunk": PROMPT}


def round_as_stored(stock: DynamicCache, paged: omlx_cache.PagedCache) -> list[int]:
    """Put the quantized tokens of ``paged`` into ``stock``; return how many each layer has."""
    counts = []
    for layer, full in zip(paged.layers, stock.layers, strict=True):
        (row,) = layer.group.rows
        quantized = [block for block in row.blocks if block.tier is Tier.K8V8]
        tier = layer.pool.blocks.k8v8
        for block in quantized:
            k, v = read_blocks(tier, Tier.K8V8, [block.index], torch.float32)
            span = slice(block.start, block.start + 64)
            for stored, exact, step in (
                (k, full.keys[:, :, span], tier.k_scale[block.index].float()),
                (v, full.values[:, :, span], tier.v_scale[block.index, ..., None].float()),
            ):
                assert ((stored - exact).abs() <= 0.501 * step).all()
            full.keys[:, :, span], full.values[:, :, span] = k, v
        counts.append(64 * len(quantized))
    return counts


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_stock_with_rounded_history(family):
    model, ids = tiny_model(family), random_ids(1, PROMPT + NEW)
    stock, name = DynamicCache(), cache_name(type(model).forward)
    model(ids[:, :PROMPT], **{name: stock})
    omlx_cache.patch(model, **EIGHT_BITS)
    paged = omlx_cache.PagedCache(model)
    with ops.use_implementation("vectorized"):
        model(ids[:, :PROMPT], **{name: paged})
        counts = round_as_stored(stock, paged)
        got = model(ids[:, PROMPT:], **{name: paged}).logits
    omlx_cache.unpatch(model)
    want = model(ids[:, PROMPT:], **{name: stock}).logits
    assert all(counts)
    assert (len(set(counts)) == 2) == (family in set(WINDOWED) - {"mistral-window"})
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4 * want.abs().max())
