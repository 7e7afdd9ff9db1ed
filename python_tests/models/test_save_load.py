"""A saved cache: loaded, it goes on as if it had never been away."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from caches import SMALL, filled, step
from tiny import greedy, left_padded, random_ids, tiny_model

import omlx_cache
from omlx_cache.compat import cache_name
from omlx_cache.storage.fingerprint import model_fingerprint, tokenizer_fingerprint
from omlx_cache.storage.saved_cache import SavedCache
from omlx_kernels.layout import BLOCK_TIERS, Tier

TIERS = {"tiers": {"k8v8": 64, "k8v4": 64, "k4v4": None}}


def tables(cache) -> list:
    """Return what the rows of each group hold."""
    return [[(r.length, r.sink_page, r.blocks) for r in g.rows] for g in cache.groups]


def references(cache) -> list:
    """Return the holders of every block and page."""
    found = []
    for group in cache.groups:
        found += [group.blocks.refs(t, i) for t in BLOCK_TIERS for i in range(99)]
        found += [group.pages.refs(Tier.SINK, i) for i in range(99)]
    return found


CASES = {
    "8 bits": ("llama", {}),
    "all tiers": ("llama", TIERS),
    "16 bits, no sinks": ("llama", {"cache_bits": 16, "sink_tokens": 0}),
    "a window": ("llama", {"window_size": 100}),
    "two groups": ("qwen2-mixed-window", {}),
    "soft caps, head_dim 256": ("gemma2", {"cache_bits": 4}),
}


@pytest.mark.parametrize("compress", [True, False], ids=["compressed", "plain"])
@pytest.mark.parametrize("case", CASES)
def test_a_loaded_chat_goes_on_token_for_token(case, compress, tmp_path):
    family, config = CASES[case]
    first, second = random_ids(2, 290), random_ids(2, 70, seed=1)
    turn = left_padded(first, [290, 230])
    model = omlx_cache.patch(tiny_model(family), **SMALL, **config)
    cache = omlx_cache.PagedCache(model)
    name = cache_name(type(model).forward)
    answer = greedy(model, turn, 10, **{name: cache})
    cache.save(tmp_path / "chat", compress=compress)

    # Another process loads the same checkpoint: the same numbers in other memory.
    again = omlx_cache.patch(tiny_model(family), **SMALL, **config)
    loaded = omlx_cache.PagedCache.load(tmp_path / "chat", again)
    assert loaded.get_seq_length() == cache.get_seq_length()
    assert tables(loaded) == tables(cache)
    assert references(loaded) == references(cache)
    assert loaded.report().bytes_by_tier == cache.report().bytes_by_tier

    mask = turn["attention_mask"]
    mask = torch.cat([mask, torch.ones(2, 80, dtype=mask.dtype)], 1)
    ids = torch.cat([turn["input_ids"], answer, second], 1)
    expected = greedy(model, {"input_ids": ids, "attention_mask": mask}, 20, **{name: cache})
    got = greedy(again, {"input_ids": ids, "attention_mask": mask}, 20, **{name: loaded})
    assert torch.equal(got, expected)
    assert torch.equal(step(again, loaded, second[:, :70]), step(model, cache, second[:, :70])), (
        "not only the same tokens: the same numbers"
    )


def test_rows_that_share_blocks_share_them_afterwards(tmp_path):
    model = omlx_cache.patch(tiny_model(), **SMALL, **TIERS)
    cache = filled(model)
    cache.save(tmp_path / "one")
    cache.batch_repeat_interleave(4)
    step(model, cache, random_ids(4, 3, seed=1))  # their last blocks are now their own
    cache.save(tmp_path / "four")
    loaded = omlx_cache.PagedCache.load(tmp_path / "four", model)
    assert tables(loaded) == tables(cache)
    assert references(loaded) == references(cache)
    assert loaded.report().active_blocks == cache.report().active_blocks
    size = [(tmp_path / name).stat().st_size for name in ("one", "four")]
    assert size[1] < 2.5 * size[0]
    chosen = torch.tensor([2, 0])
    for one in (cache, loaded):
        one.batch_select_indices(chosen)
        one.crop(-20)
    ids = random_ids(2, 30, seed=2)
    assert torch.equal(step(model, loaded, ids), step(model, cache, ids))
    loaded.reset()
    assert not any(references(loaded))


def test_a_cache_may_be_saved_at_any_time_between_steps(tmp_path):
    model = omlx_cache.patch(tiny_model("qwen2-mixed-window"), **SMALL)
    cache = omlx_cache.PagedCache(model)
    cache.save(tmp_path / "chat")
    loaded = omlx_cache.PagedCache.load(tmp_path / "chat", model)
    for length in (2, 5, 200):  # fewer tokens than sinks, one block, several
        ids = random_ids(1, length, seed=length)
        assert torch.equal(step(model, loaded, ids), step(model, cache, ids))
        cache.save(tmp_path / "chat")
        loaded = omlx_cache.PagedCache.load(tmp_path / "chat", model)
    cache.activate_past_recording()
    cache.save(tmp_path / "chat")
    loaded = omlx_cache.PagedCache.load(tmp_path / "chat", model)
    for one in (cache, loaded):
        step(model, one, random_ids(1, 150))
        one.crop(-150)
    assert tables(loaded) == tables(cache)
    cache.reset()
    cache.save(tmp_path / "chat")
    assert omlx_cache.PagedCache.load(tmp_path / "chat", model).get_seq_length() == 0


def test_what_else_belongs_to_a_chat_is_kept_with_it(tmp_path):
    model = omlx_cache.patch(tiny_model(), **SMALL)
    extra = {"messages": [{"role": "user", "content": 'Grüße, "你好" 🙂'}], "turn": 3}
    filled(model).save(tmp_path / "chat", extra=extra)
    saved = SavedCache(tmp_path / "chat")
    assert saved.extra == extra
    assert saved.restore(model).get_seq_length() == 300
    with pytest.raises(TypeError, match="JSON"):
        filled(model).save(tmp_path / "chat", extra={"model": model})
    assert SavedCache(tmp_path / "chat").extra == extra


def test_what_was_in_unused_memory_is_not_saved(tmp_path):
    model = omlx_cache.patch(tiny_model(), **SMALL)
    cache = filled(model, 5)
    pool = cache.layers[0].pool
    for blocks in (pool.blocks.hot, pool.blocks.sink):
        for tensor in blocks.tensors().values():
            tensor[:, :, 1 if blocks is pool.blocks.hot else 4 :] = torch.nan
    cache.save(tmp_path / "chat")
    loaded = omlx_cache.PagedCache.load(tmp_path / "chat", model)
    hot = loaded.layers[0].pool.blocks.hot.k
    assert torch.equal(hot[:, :, :1], pool.blocks.hot.k[:, :, :1])
    assert (hot[:, :, 1:] == 0).all()


def test_a_cache_continues_under_another_precision_of_later_blocks(tmp_path):
    model = omlx_cache.patch(tiny_model(), **SMALL)
    filled(model).save(tmp_path / "chat")
    omlx_cache.patch(model, **{**SMALL, "cache_bits": 16})
    loaded = omlx_cache.PagedCache.load(tmp_path / "chat", model)
    step(model, loaded, random_ids(1, 100))
    assert {b.tier for b in loaded.groups[0].rows[0].blocks} == {Tier.K8V8, Tier.HOT}


@pytest.mark.real_model
def test_a_real_chat_is_saved_and_loaded(smollm2_path, smollm2_tokenizer, tmp_path):
    from omlx_cache.tools.loading import load_model
    from omlx_cache.tools.texts import token_ids

    ids = torch.tensor([token_ids("chat", smollm2_tokenizer, 400)])
    model = omlx_cache.patch(load_model(smollm2_path, dtype=torch.bfloat16), cache_bits=4)
    cache = omlx_cache.PagedCache(model)
    name = cache_name(type(model).forward)
    first = greedy(model, {"input_ids": ids}, 2, **{name: cache})
    tokenizer = tokenizer_fingerprint(smollm2_tokenizer)
    cache.save(tmp_path / "chat", extra={"tokenizer": tokenizer})
    assert json.loads(json.dumps(SavedCache(tmp_path / "chat").extra)) == {"tokenizer": tokenizer}
    assert Path(tmp_path / "chat").stat().st_size < cache.report().total_bytes
    loaded = omlx_cache.PagedCache.load(tmp_path / "chat", model)
    ids = torch.cat([ids, first, ids[:, :50]], 1)
    expected, got = (greedy(model, {"input_ids": ids}, 4, **{name: c}) for c in (cache, loaded))
    assert torch.equal(got, expected)
    began = time.thread_time()
    model_fingerprint(model.get_decoder())
    assert time.thread_time() - began < 0.25, "it must be cheap for any model"
