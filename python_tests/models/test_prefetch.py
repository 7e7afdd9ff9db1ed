"""Blocks that move before they are needed change no result, whenever they arrive, and if at all."""

from __future__ import annotations

import random
import shutil
import threading
import time

import pytest
import torch
from test_disk_cache import damage_bits, files_of, patched, say, with_message
from test_prefix_cache import reused
from tiny import random_ids, tiny_model

import omlx_cache
from omlx_cache.patch_state import state_of
from omlx_cache.storage.block_files import BlockFiles

CONFIGS = [
    {},
    {"max_gpu_blocks": 6, "cpu_offload": True},
    {"cache_bits": 8, "window_size": 300},
]


def written(directory, text: torch.Tensor, **config) -> torch.Tensor:
    """Let a model read a text, and leave it on disk; return the text and what it said."""
    model = patched(directory, **config)
    found = say(model, text)
    assert omlx_cache.flush(model)
    return found


def ahead(model):
    return state_of(model).store.disk.ahead


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_on_and_off_say_the_same(tmp_path, config):
    text = written(tmp_path / "on", random_ids(1, 500), **config)
    shutil.copytree(tmp_path / "on", tmp_path / "off")
    ids = with_message(text, 1)
    on = patched(tmp_path / "on", **config)
    off = patched(tmp_path / "off", **config, prefetch=False)
    assert torch.equal(say(on, ids), say(off, ids))
    assert reused(on) == reused(off) >= 500
    found, without = omlx_cache.report(on), omlx_cache.report(off)
    assert found.blocks_from_disk == without.blocks_from_disk > 0
    assert without.blocks_read_ahead == 0 == without.read_ahead_seconds


def test_what_is_read_before_the_call_is_there_when_it_comes(tmp_path):
    text = written(tmp_path, random_ids(1, 500))
    model = patched(tmp_path)
    omlx_cache.prefetch(model, text).join()
    ahead(model).wait()
    assert torch.equal(say(model, with_message(text, 1)), say(tiny_model(), with_message(text, 1)))
    report = omlx_cache.report(model)
    assert report.blocks_read_ahead == report.blocks_from_disk > 7
    assert report.read_ahead_seconds > 0
    omlx_cache.prefetch(model, text).join()  # all of it is in memory now
    ahead(model).wait()
    assert not ahead(model)._slots


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_delays_and_failures_change_nothing(tmp_path, monkeypatch, config, seed):
    texts = [written(tmp_path, random_ids(1, 400, seed=i), **config) for i in range(3)]
    unharmed = omlx_cache.patch(
        tiny_model(),
        **{**state_of(patched(tmp_path, **config)).config.model_dump(), "disk_cache": False},
    )
    expected = [say(unharmed, with_message(text, 1)) for text in texts]
    chance, get, main = random.Random(seed), BlockFiles.get, threading.get_ident()

    def slow_or_failing(self, key):
        time.sleep(chance.random() / 200)
        if threading.get_ident() != main and chance.random() < 0.3:
            raise OSError("now and then")
        return get(self, key)

    monkeypatch.setattr(BlockFiles, "get", slow_or_failing)
    model = patched(tmp_path, **config)
    for text, answer in zip(texts, expected, strict=True):
        if chance.random() < 0.5:
            omlx_cache.prefetch(model, text)
            time.sleep(chance.random() / 50)
        assert torch.equal(say(model, with_message(text, 1)), answer)
        assert reused(model) >= 400


def test_a_block_that_gets_colder_meanwhile_is_read_as_it_is(tmp_path):
    """Another process replaces the files after they were read ahead."""
    text = written(tmp_path, random_ids(1, 300), cache_bits=8, recent_tokens=200)
    model = patched(tmp_path, cache_bits=8, recent_tokens=200)
    omlx_cache.prefetch(model, text).join()
    ahead(model).wait()
    other = patched(tmp_path, cache_bits=8, recent_tokens=200)
    longer = say(other, torch.cat([text, random_ids(1, 200, seed=3)], 1))
    assert omlx_cache.flush(other)
    again = patched(tmp_path, cache_bits=8, recent_tokens=200, prefetch=False)
    assert torch.equal(say(model, longer), say(again, longer))
    assert reused(model) == reused(again) == longer.shape[1] - 1


def test_a_damaged_file_is_never_used(tmp_path):
    text = written(tmp_path, random_ids(1, 300))
    torch.manual_seed(0)
    for path in files_of(tmp_path)[:3]:
        damage_bits(path)
    model = patched(tmp_path)
    omlx_cache.prefetch(model, text).join()
    ids = with_message(text, 1)
    assert torch.equal(say(model, ids), say(tiny_model(), ids))


def test_without_a_disk_there_is_nothing_to_do(tmp_path):
    model = tiny_model()
    with pytest.raises(ValueError, match="must be patched"):
        omlx_cache.prefetch(model, random_ids(1, 9))
    omlx_cache.patch(model)
    assert omlx_cache.prefetch(model, random_ids(1, 9)) is None
    assert omlx_cache.prefetch(patched(tmp_path, prefetch=False), random_ids(1, 9)) is None
    with pytest.raises(ValueError, match=r"ids must be \[rows, columns\]"):
        omlx_cache.prefetch(model, random_ids(1, 9), torch.ones(1, 8))


def test_it_does_not_wait_for_a_step_that_runs(tmp_path):
    text = written(tmp_path, random_ids(1, 300))
    model = patched(tmp_path)
    say(model, random_ids(1, 20, seed=5), 1)
    lock = state_of(model).store.lock
    with lock:
        start = time.perf_counter()
        thread = omlx_cache.prefetch(model, text)
        assert time.perf_counter() - start < 5
        assert thread.is_alive()
    thread.join(60)
    ahead(model).wait()
    say(model, text, 1)
    assert omlx_cache.report(model).blocks_read_ahead > 0
