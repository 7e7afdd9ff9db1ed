"""`PagedCache.observe`: the masses it tells are those of the stock model's attention weights."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny import random_ids, tiny_model

import omlx_cache
from omlx_cache.compat import cache_name
from omlx_cache.observer import SINKS, blocks_of_splits

LENGTH, BLOCK = 300, 64


def run(model, ids: torch.Tensor, observer, *, decode: int, **config):
    """Read ids, the last ``decode`` of them one by one; return the cache and the last logits."""
    with torch.no_grad(), omlx_cache.patched(model, block_size=BLOCK, **config):
        cache = omlx_cache.PagedCache(model)
        kwargs = {cache_name(type(model).forward): cache}
        cache.observe(observer)
        model(ids[:, :-decode], **kwargs)
        for i in range(ids.shape[1] - decode, ids.shape[1]):
            logits = model(ids[:, i : i + 1], **kwargs).logits
    return cache, logits


class Notes:
    """Keep the last step of each layer, by block."""

    def __init__(self) -> None:
        self.layers: dict[int, dict[int, torch.Tensor]] = {}
        self.calls = 0

    def __call__(self, layer, meta, mass) -> None:
        self.calls += 1
        rows, starts = blocks_of_splits(meta)
        self.layers[layer] = dict(zip(starts, mass[rows], strict=True))


@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_masses_are_those_of_eager_attention(family):
    model, ids, notes = tiny_model(family), random_ids(1, LENGTH), Notes()
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions
    run(model, ids, notes, decode=3, cache_bits=16)
    assert sorted(notes.layers) == list(range(len(weights)))
    for layer, by_block in notes.layers.items():
        newest = weights[layer][0, :, -1]
        seen = set()
        for start, mass in by_block.items():
            tokens = slice(0, 4) if start == SINKS else slice(start, start + BLOCK)
            torch.testing.assert_close(mass, newest[:, tokens].sum(-1), rtol=1e-4, atol=1e-6)
            seen |= set(range(LENGTH)[tokens])
        unlisted = sorted(set(range(LENGTH)) - seen)
        assert not newest[:, unlisted].any(), "a block with attention was not told"


def test_each_layer_of_each_step_is_told_and_no_more():
    model, notes = tiny_model(), Notes()
    cache, _ = run(model, random_ids(1, 100), notes, decode=5, prefill_chunk=50)
    layers = model.config.num_hidden_layers
    assert notes.calls == (2 + 5) * layers  # 95 tokens are two chunks
    cache.observe(None)
    with torch.no_grad(), omlx_cache.patched(model, block_size=BLOCK):
        model(random_ids(1, 1), **{cache_name(type(model).forward): cache})
    assert notes.calls == 7 * layers


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_watching_changes_no_answer(bits):
    model, ids = tiny_model(), random_ids(1, LENGTH)
    _, want = run(model, ids, None, decode=4, cache_bits=bits)
    _, got = run(model, ids, Notes(), decode=4, cache_bits=bits)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_rows_of_a_batch_are_told_apart():
    model, ids = tiny_model(), random_ids(2, 200)
    told = []

    def observer(layer, meta, mass):
        if layer == 0:
            told.append([(mass[rows], starts) for rows, starts in map_rows(meta)])

    def map_rows(meta):
        return [blocks_of_splits(meta, row) for row in range(2)]

    run(model, ids, observer, decode=1, cache_bits=16)
    for row in range(2):
        alone = Notes()
        run(model, ids[row : row + 1], alone, decode=1, cache_bits=16)
        mass, starts = told[-1][row]
        want = torch.stack([alone.layers[0][start] for start in starts])
        torch.testing.assert_close(mass, want, rtol=1e-4, atol=1e-6)


def test_a_copied_cache_is_watched_by_nobody_else():
    model, notes = tiny_model(), Notes()
    cache, _ = run(model, random_ids(1, 100), notes, decode=1)
    assert copy.deepcopy(cache).groups[0].observer is not notes
    assert cache.groups[0].observer is notes
