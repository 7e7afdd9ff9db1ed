"""What `pruning: topk` ranks by, against the attention weights of the stock model."""

from __future__ import annotations

import pytest
import torch
from tiny import left_padded, random_ids, tiny_model

import omlx_cache
from omlx_cache.block_mass import HALF_LIFE, QUERIES
from omlx_cache.compat import cache_name

BLOCK, CHUNK, DECODED = 64, 130, 3
LENGTHS = [500, 470, 12]


def expected(weights: tuple[torch.Tensor, ...], row: int, steps: list[range]) -> dict[int, float]:
    """Return start of a block -> mass, of a row without its padding.

    Args:
        weights: of each layer, [rows, heads, columns, columns].
        row: which.
        steps: the columns of each step.
    """
    padding = LENGTHS[0] - LENGTHS[row]
    of_row = torch.stack(weights)[:, row, :, padding:, padding:]  # [layers, heads, q, keys]
    mass: dict[int, float] = {}
    for step in steps:
        queries = [column - padding for column in step if column >= padding]
        fading = 0.5 ** (len(queries) / HALF_LIFE)
        mass = {start: value * fading for start, value in mass.items()}
        for start in range(4, max(queries, default=-1) + 1, BLOCK):
            shares = of_row[:, :, queries[-QUERIES:], start : start + BLOCK].sum(-1)
            mass[start] = mass.get(start, 0.0) + shares.max().item()
    return mass


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-oss"])
@pytest.mark.parametrize("room", [{}, {"max_gpu_blocks": 14, "cpu_offload": True}])
def test_masses_are_those_of_eager_attention(family, room):
    model, inputs = tiny_model(family), left_padded(random_ids(3, LENGTHS[0]), LENGTHS)
    with torch.no_grad():
        weights = model(**inputs, output_attentions=True).attentions
    first = LENGTHS[0] - DECODED
    steps = [range(i, min(i + CHUNK, first)) for i in range(0, first, CHUNK)]
    steps += [range(i, i + 1) for i in range(first, LENGTHS[0])]
    config = {"block_size": BLOCK, "prefill_chunk": CHUNK, "cache_bits": 16, "recent_tokens": 64}
    config |= {"window_size": None}
    with torch.no_grad(), omlx_cache.patched(model, pruning="topk", **config, **room):
        cache, name = omlx_cache.PagedCache(model), cache_name(type(model).forward)
        for columns in (slice(first), *(slice(i, i + 1) for i in range(first, LENGTHS[0]))):
            ids, mask = inputs["input_ids"][:, columns], inputs["attention_mask"]
            model(ids, attention_mask=mask[:, : columns.stop], **{name: cache})
    group = next(group for group in cache.groups if group.geometry.window_size is None)
    layers = [i for i, layer in enumerate(cache.layers) if layer.group is group]
    assert not room or any(row.offloaded for row in group.rows)
    for i, row in enumerate(group.rows):
        want = expected(tuple(weights[layer] for layer in layers), i, steps)
        assert row.mass == pytest.approx(want, rel=1e-3, abs=1e-5)
