"""``prefix_cache`` under a bound: what is kept moves to CPU memory, then to disk, and back."""

from __future__ import annotations

import threading

import pytest
import torch
from test_prefix_cache import counted, hold_chat, inputs_of, prompt_columns, reused
from tiny import greedy, random_ids, tiny_model

import omlx_cache
from omlx_cache.compat import cache_name
from omlx_cache.patch_state import state_of
from omlx_cache.storage.block_files import BlockFiles

SMALL = {"block_size": 64, "prefill_chunk": 64, "recent_tokens": 0, "prefix_cache": True}
EXACT = SMALL | {"cache_bits": 16, "window_size": None}
AWAY = {"max_gpu_blocks": 5, "cpu_offload": True}


def say(model, ids: torch.Tensor, new_tokens: int = 5) -> torch.Tensor:
    return torch.cat([ids, greedy(model, inputs_of(ids), new_tokens)], 1)


def arena_of(model):
    (arena,) = state_of(model).store.arenas
    assert arena.blocks.max_blocks is None or arena.blocks.num_used <= arena.blocks.max_blocks
    return arena


@pytest.mark.parametrize("config", [{}, {"cache_bits": 8}, {"window_size": 200}], ids=str)
def test_a_chat_longer_than_the_pool_says_what_it_says_without_a_bound(config):
    unbounded = omlx_cache.patch(tiny_model(), **EXACT | config)
    expected = hold_chat(unbounded, 12, message=50)
    model = omlx_cache.patch(tiny_model(), **EXACT | config | AWAY)
    counts, ids = counted(model), torch.empty((1, 0), dtype=torch.long)
    for turn in range(12):
        ids = torch.cat([ids, random_ids(1, 50, seed=turn)], 1)
        ids = say(model, ids, 10)
        assert prompt_columns(counts, 10) == (51 if turn else 50)
    assert torch.equal(ids, expected)
    assert arena_of(model).host.blocks.num_used > 4


def test_chats_that_take_turns_come_back_from_cpu_memory():
    model, stock = omlx_cache.patch(tiny_model(), **EXACT | AWAY), tiny_model()
    texts = [random_ids(1, 200, seed=i) for i in range(5)]  # four blocks each
    for again in range(3):
        for i, ids in enumerate(texts):
            texts[i] = say(model, ids)
            assert torch.equal(texts[i], say(stock, ids))
            assert reused(model) == (ids.shape[1] - 1 if again else 0)
            arena = arena_of(model)
            path = state_of(model).store.tree.match(texts[i][0].numpy(), lambda node: False)[1:]
            assert len(path) == 4
            assert all(arena.kept_blocks.get(node) for node, _ in path)  # on the device
            assert arena.host.blocks.num_used == len(arena.kept_blocks) - arena.blocks.num_used


def test_beams_and_batches_begin_in_cpu_memory():
    config = EXACT | {"max_gpu_blocks": 14, "cpu_offload": True}
    model, stock = omlx_cache.patch(tiny_model(), **config), tiny_model()
    ids = random_ids(3, 300)
    for row in ids:
        say(model, row[None])
    for mode in ({"num_beams": 2}, {"num_return_sequences": 2, "num_beams": 2}, {}):
        kinds = {"max_new_tokens": 8, "do_sample": False, **mode}
        expected = stock.generate(**inputs_of(ids[:2]), **kinds)
        assert torch.equal(model.generate(**inputs_of(ids[:2]), **kinds), expected)
        assert reused(model) >= 2 * 299
    assert arena_of(model).host.blocks.num_used


def test_a_cache_of_the_callers_makes_room_beside_what_is_kept():
    model, stock = omlx_cache.patch(tiny_model(), **EXACT | AWAY), tiny_model()
    name = cache_name(type(model).forward)
    held, ids = omlx_cache.PagedCache(model), random_ids(1, 250)
    text = torch.cat([ids, greedy(model, inputs_of(ids), 5, **{name: held})], 1)
    assert torch.equal(text, say(stock, ids))
    for seed in range(1, 4):  # its blocks leave for those of others
        other = random_ids(1, 250, seed=seed)
        assert torch.equal(say(model, other), say(stock, other))
        assert any(row.offloaded for row in held.groups[0].rows)
    more = torch.cat([text, random_ids(1, 20, seed=9)], 1)
    found = greedy(model, inputs_of(more), 5, **{name: held})
    assert torch.equal(found, greedy(stock, inputs_of(more), 5))


def test_full_cpu_memory_drops_the_least_recently_used():
    model = omlx_cache.patch(tiny_model(), **EXACT | AWAY | {"max_cpu_blocks": 4})
    texts = [random_ids(1, 190, seed=i) for i in range(4)]  # three blocks each
    for ids in texts:
        say(model, ids, 2)
    assert arena_of(model).host.blocks.num_used <= 4
    for i, is_there in ((3, True), (2, True), (0, False)):
        say(model, texts[i], 2)
        assert (reused(model) == 189) == is_there


LOSSES = {
    "pruning": {"max_gpu_blocks": 5, "pruning": "oldest"},
    "random": {"max_gpu_blocks": 5, "pruning": "random"},
    "a share": {"pruning": "oldest", "prune_ratio": 0.5},
    "recall": AWAY | {"recall": "topk", "recall_blocks": 1},
    "both": AWAY | {"pruning": "topk", "max_cpu_blocks": 1},
}


@pytest.mark.parametrize("loss", LOSSES)
def test_what_was_read_after_a_loss_is_never_kept(loss):
    """A text that loses nothing says what stock says, whatever was read before it."""
    model, stock = omlx_cache.patch(tiny_model(), **EXACT | LOSSES[loss]), tiny_model()
    long = random_ids(1, 700)
    text = say(model, long, 20)
    store = state_of(model).store
    assert max((node.end for node in store.tree), default=0) < 700
    for length in (150, 250):
        ids = long[:, :length]
        if loss == "a share":  # it always loses something: what was kept may not change what
            fresh = omlx_cache.patch(tiny_model(), **EXACT | LOSSES[loss])
            assert torch.equal(say(fresh, ids, 1), say(model, ids, 1))
        else:
            assert torch.equal(say(model, ids), say(stock, ids))
            # What is dropped from a full pool makes room, and is nowhere any more.
            assert reused(model) >= (4 + 64 if loss == "recall" else 0)
    say(model, text, 5)
    assert reused(model) < 700


def test_a_loss_and_a_crop_before_it():
    config = EXACT | {"max_gpu_blocks": 5, "pruning": "oldest"}
    model = omlx_cache.patch(tiny_model(), **config)
    cache, name = omlx_cache.PagedCache(model), cache_name(type(model).forward)
    greedy(model, inputs_of(random_ids(1, 500)), 2, **{name: cache})
    (row,) = cache.groups[0].rows
    assert 0 < row.whole < 400
    whole = row.whole
    cache.crop(-30)
    assert row.whole == whole
    copied = cache.groups[0].rows[0].copy()
    copied.dropped = set()
    copied.forget_from(whole)
    assert copied.whole is None


def test_a_share_is_pruned_of_a_chat_and_not_of_another_that_shares_its_blocks():
    config = EXACT | {"pruning": "oldest", "prune_ratio": 0.5}
    model = omlx_cache.patch(tiny_model(), **config)
    name, ids = cache_name(type(model).forward), random_ids(1, 400)
    with torch.no_grad():
        model.generate(**inputs_of(ids), max_new_tokens=1, do_sample=False)
        others = [omlx_cache.PagedCache(model) for _ in range(2)]
        for each in others:
            each.record(ids, torch.ones_like(ids).numpy() != 0)
        model(ids[:, others[0].get_seq_length() :], **{name: others[0]})
    dropped = [each.groups[0].rows[0].dropped for each in others]
    assert len(dropped[0]) == 3
    assert not dropped[1]


def test_more_than_cpu_memory_has_room_for_is_dropped():
    config = SMALL | {"cache_bits": 8, "prefill_chunk": 256, "max_gpu_blocks": 6}
    config |= {"cpu_offload": True, "max_cpu_blocks": 2, "pruning": "oldest"}
    for prefix in (False, True):
        model = omlx_cache.patch(tiny_model(), **config | {"prefix_cache": prefix})
        cache, name = omlx_cache.PagedCache(model), cache_name(type(model).forward)
        greedy(model, inputs_of(random_ids(1, 900)), 5, **{name: cache})
        (row,) = cache.groups[0].rows
        assert len(row.offloaded) == 2
        assert len(row.dropped) == 15 - len(row.blocks) - 2


@pytest.mark.parametrize("recall", ["all", "topk"])
def test_a_saved_cache_loads_into_both_places(tmp_path, recall):
    config = EXACT | AWAY | {"recall": recall, "recall_blocks": 1}
    model = omlx_cache.patch(tiny_model(), **config)
    name = cache_name(type(model).forward)
    cache, ids = omlx_cache.PagedCache(model), random_ids(1, 500)
    text = torch.cat([ids, greedy(model, inputs_of(ids), 5, **{name: cache})], 1)
    cache.save(tmp_path / "chat")
    expected = greedy(model, inputs_of(text), 10, **{name: cache})
    del cache
    for other in (model, omlx_cache.patch(tiny_model(), **config)):
        loaded = omlx_cache.PagedCache.load(tmp_path / "chat", other)
        found = greedy(other, inputs_of(text), 10, **{name: loaded})
        assert found.shape == expected.shape
        if recall == "all":
            assert torch.equal(found, expected)
        (row,) = loaded.groups[0].rows
        assert row.offloaded
        assert (row.whole is None) == (recall == "all")


# ---------------------------------------------------------------- and from there to disk

BOUNDED = AWAY | {"max_cpu_blocks": 4}


@pytest.mark.parametrize("bits", [16, 8])
def test_what_overflows_cpu_memory_is_read_back_from_disk(tmp_path, bits):
    config = EXACT | BOUNDED | {"cache_bits": bits}
    unbounded = omlx_cache.patch(tiny_model(), **EXACT | {"cache_bits": bits})
    model = omlx_cache.patch(tiny_model(), **config, disk_cache=tmp_path)
    texts = [random_ids(1, 190, seed=i) for i in range(6)]  # three blocks each, of which 9 fit
    for again in range(3):
        for i, ids in enumerate(texts):
            texts[i] = say(model, ids, 3)
            assert torch.equal(texts[i], say(unbounded, ids, 3))
            assert reused(model) == (ids.shape[1] - 1 if again else 0)
            assert (omlx_cache.report(model).blocks_from_disk > 0) == (again > 0)
            assert arena_of(model).host.blocks.num_used <= 4


def test_a_restarted_chat_fills_both_places_from_disk(tmp_path):
    unbounded, text = omlx_cache.patch(tiny_model(), **EXACT), random_ids(1, 400)
    expected = text
    for turn in range(3):
        model = omlx_cache.patch(tiny_model(), **EXACT | AWAY, disk_cache=tmp_path)
        text = say(model, torch.cat([text, random_ids(1, 40, seed=turn)], 1))
        expected = say(unbounded, torch.cat([expected, random_ids(1, 40, seed=turn)], 1))
        assert torch.equal(text, expected)
        assert reused(model) == (text.shape[1] - 46 if turn else 0)
        assert arena_of(model).host.blocks.num_used > 0
        assert omlx_cache.flush(model)


def test_what_was_acknowledged_is_found_whatever_left_memory_since(tmp_path):
    model = omlx_cache.patch(tiny_model(), **EXACT | BOUNDED, disk_cache=tmp_path)
    first = say(model, random_ids(1, 300))
    assert omlx_cache.flush(model)
    for seed in range(1, 5):
        say(model, random_ids(1, 300, seed=seed))  # nothing of the first text stays in memory
    ids = torch.from_numpy(first[0].numpy())
    assert len(state_of(model).store.tree.match(ids.numpy(), lambda node: False)) <= 1
    for other in (model, omlx_cache.patch(tiny_model(), **EXACT | BOUNDED, disk_cache=tmp_path)):
        say(other, first, 2)
        assert reused(other) == first.shape[1] - 1


def test_blocks_leave_memory_while_they_wait_to_be_written(tmp_path, monkeypatch):
    may_write, put = threading.Event(), BlockFiles.put
    monkeypatch.setattr(BlockFiles, "put", lambda *args: may_write.wait(60) and put(*args))
    model = omlx_cache.patch(tiny_model(), **EXACT | BOUNDED, disk_cache=tmp_path)
    texts = [say(model, random_ids(1, 190, seed=i), 2) for i in range(5)]
    assert not list(tmp_path.glob("block-*"))
    may_write.set()
    assert omlx_cache.flush(model)
    for ids in texts:  # those that had left before anything was written, too
        say(model, ids, 2)
        assert reused(model) == ids.shape[1] - 1


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_is_never_written(tmp_path, loss):
    model = omlx_cache.patch(tiny_model(), **EXACT | LOSSES[loss], disk_cache=tmp_path)
    long, stock = random_ids(1, 700), tiny_model()
    say(model, long, 20)
    assert omlx_cache.flush(model)
    model = omlx_cache.patch(tiny_model(), **EXACT, disk_cache=tmp_path)
    assert torch.equal(say(model, long), say(stock, long))
    assert 64 < reused(model) < 699
