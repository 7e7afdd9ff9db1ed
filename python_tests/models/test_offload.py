"""Under ``max_gpu_blocks`` a model goes on: with blocks in CPU memory, or without some of them."""

from __future__ import annotations

import random

import pytest
import torch
from tiny import left_padded, random_ids, tiny_model

import omlx_cache
from omlx_cache import host_attention
from omlx_cache.compat import cache_name
from omlx_cache.layers_ahead import LayersAhead
from omlx_kernels.errors import OutOfBlocksError

SMALL = {"block_size": 64, "prefill_chunk": 64, "recent_tokens": 64}
ROOM = {"max_gpu_blocks": 8, "cpu_offload": True}
PRECISIONS = [
    {"cache_bits": 16},
    {"cache_bits": 8},
    {"tiers": {"k8v8": 128, "k8v4": 128, "k4v4": None}},
    {"cache_bits": 8, "window_size": 300},
]


def run(config, ids, new_tokens=40, family="llama"):
    """Return the logits of a prompt, the text that follows it, and the cache."""
    model = omlx_cache.patch(tiny_model(family), **SMALL | config)
    cache, name = omlx_cache.PagedCache(model), cache_name(type(tiny_model(family)).forward)
    with torch.no_grad():
        logits = model(**ids, **{name: cache}).logits
    cache.reset()
    kinds = {"max_new_tokens": new_tokens, "do_sample": False}
    return logits, model.generate(**ids, **{name: cache}, **kinds), cache


def ragged():
    return left_padded(random_ids(2, 500), [500, 380])


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
@pytest.mark.parametrize("ranking", [None, "topk"])
def test_blocks_in_cpu_memory_are_attended_to_as_if_they_were_here(precision, ranking):
    logits, text, _ = run(precision, ragged())
    found, again, cache = run(precision | ROOM | {"pruning": ranking}, ragged())
    group = cache.groups[0]
    assert any(row.offloaded for row in group.rows)
    assert group.blocks.num_used <= 8
    error = (found - logits)[ragged()["attention_mask"].bool()].abs().max()
    assert error < 0.005 * logits.std()
    assert torch.equal(again, text)
    cache.reset()
    assert group.blocks.num_used == group.arena.host.blocks.num_used == 0


@pytest.mark.parametrize("family", ["gemma2", "gpt-oss", "qwen3"])
def test_soft_caps_learned_sinks_and_windows(family):
    logits, text, _ = run({"cache_bits": 16}, ragged(), 10, family)
    found, again, _ = run({"cache_bits": 16} | ROOM, ragged(), 10, family)
    assert (found - logits)[ragged()["attention_mask"].bool()].abs().max() < 1e-3
    assert torch.equal(again, text)


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_blocks_are_copied_to_the_device_for_the_queries_of_a_prompt(monkeypatch, precision):
    """The copies are the same whether they began before their layer ran, or not, or failed."""
    logits, text, _ = run(precision | ROOM, ragged(), 10)
    monkeypatch.setattr(host_attention, "_is_away_from", lambda device: True)
    send, chance = LayersAhead._send, random.Random(0)

    def failing(self, layer, device, *, is_ahead):
        if is_ahead and chance.random() < 0.5:
            raise torch.OutOfMemoryError
        return send(self, layer, device, is_ahead=is_ahead)

    for prefetch, way in ((True, send), (False, send), (True, failing)):
        monkeypatch.setattr(LayersAhead, "_send", way)
        found, again, cache = run(precision | ROOM | {"prefetch": prefetch}, ragged(), 10)
        real = ragged()["attention_mask"].bool()
        assert torch.equal(found[real], logits[real])
        assert torch.equal(again, text)
        rate = cache.report().copy_ahead_rate
        assert (rate == float(prefetch)) if way is send else (0 < rate < 1)
        assert all(not group.arena.host.ahead._coming for group in cache.groups)


def test_recall_of_all_there_are_is_recall_of_all():
    everything = {"recall": "topk", "recall_blocks": 99}
    _, text, _ = run({"cache_bits": 8} | ROOM, ragged())
    _, again, _ = run({"cache_bits": 8} | ROOM | everything, ragged())
    assert torch.equal(text, again)


def test_recall_of_a_few_reports_how_often_it_chose_right():
    _, _, cache = run({"cache_bits": 8} | ROOM | {"recall": "topk", "recall_blocks": 2}, ragged())
    report = cache.report()
    assert 0 < report.recall_hit_rate <= 1
    assert report.offloaded_blocks == cache.groups[0].arena.host.blocks.num_used > 0
    assert report.offloaded_bytes > 0
    assert report.cached_tokens == report.seen_tokens


def test_without_room_anywhere_it_is_refused_before_anything_changes():
    model = omlx_cache.patch(tiny_model(), **SMALL | ROOM | {"max_cpu_blocks": 1})
    cache, name = omlx_cache.PagedCache(model), cache_name(type(tiny_model()).forward)
    with pytest.raises(OutOfBlocksError, match=r"max_gpu_blocks \+ max_cpu_blocks"):
        model(**ragged(), **{name: cache})
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("ranking", ["oldest", "topk", "random"])
def test_pruning_holds_the_bound_and_gives_memory_back(ranking):
    _, _, full = run({"cache_bits": 8}, ragged())
    _, _, cache = run({"cache_bits": 8, "max_gpu_blocks": 8, "pruning": ranking}, ragged())
    assert cache.groups[0].blocks.num_used <= 8
    assert all(row.dropped for row in cache.groups[0].rows)
    assert cache.report().total_bytes < full.report().total_bytes
    starts = {start for row in cache.groups[0].rows for start in row.dropped}
    newest = max(row.length for row in cache.groups[0].rows) - SMALL["recent_tokens"]
    assert max(starts) + SMALL["block_size"] <= newest


def test_a_share_is_pruned_after_each_pass():
    _, _, cache = run({"pruning": "oldest", "prune_ratio": 0.4}, {"input_ids": random_ids(1, 500)})
    (row,) = cache.groups[0].rows
    old = (row.length - SMALL["recent_tokens"] - 4) // 64
    assert len(row.dropped) == int(0.4 * old)
    assert sorted(row.dropped) == [4 + 64 * i for i in range(len(row.dropped))]


def test_topk_knows_the_mass_of_the_blocks_that_are_left_also_when_saved(tmp_path):
    config = {"pruning": "topk", "prune_ratio": 0.4}
    _, _, cache = run(config, {"input_ids": random_ids(1, 500)})
    (row,) = cache.groups[0].rows
    assert row.dropped
    assert set(row.mass) == {block.start for block in row.blocks}
    assert min(row.mass.values()) > 0
    cache.save(tmp_path / "chat")
    model = omlx_cache.patch(tiny_model(), **SMALL | config)
    (loaded,) = omlx_cache.PagedCache.load(tmp_path / "chat", model).groups[0].rows
    assert loaded.mass == row.mass


def test_a_cut_into_what_was_dropped_is_refused():
    _, _, cache = run({"pruning": "oldest", "prune_ratio": 0.4}, {"input_ids": random_ids(1, 500)})
    before = cache.get_seq_length()
    with pytest.raises(ValueError, match="pruning has dropped"):
        cache.crop(-(before - 10))
    assert cache.get_seq_length() == before


def test_a_saved_cache_keeps_what_is_in_cpu_memory(tmp_path):
    ids = {"input_ids": random_ids(1, 500)}
    config = SMALL | {"max_gpu_blocks": 4, "cpu_offload": True}
    model = omlx_cache.patch(tiny_model(), **config)
    cache, name = omlx_cache.PagedCache(model), cache_name(type(tiny_model()).forward)
    text = model.generate(**ids, **{name: cache}, max_new_tokens=5, do_sample=False)
    cache.save(tmp_path / "chat")
    for other in (model, omlx_cache.patch(tiny_model(), **SMALL)):  # and where all of it fits
        loaded = omlx_cache.PagedCache.load(tmp_path / "chat", other)
        more = other.generate(text, **{name: loaded}, max_new_tokens=20, do_sample=False)
        expected = run({}, ids, 25)[1]
        assert torch.equal(more, expected)


def test_what_looks_at_all_keys_finds_those_in_cpu_memory_or_is_refused():
    ids = {"input_ids": random_ids(1, 500)}
    _, _, here = run({"cache_bits": 16}, ids, 2)
    _, _, cache = run({"cache_bits": 16, "max_gpu_blocks": 4, "cpu_offload": True}, ids, 2)
    for layer, other in zip(cache.layers, here.layers, strict=True):
        assert torch.allclose(layer.keys, other.keys, atol=1e-5)
        assert torch.allclose(layer.values, other.values, atol=1e-5)
    model = omlx_cache.patch(tiny_model(), **SMALL | {"max_gpu_blocks": 4, "cpu_offload": True})
    with pytest.raises(NotImplementedError, match="output_attentions can't be served with cpu_"):
        model(**ids, output_attentions=True)
