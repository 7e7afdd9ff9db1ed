"""With ``disk_cache`` a text is found after a restart, and nothing wrong is ever attended to.

A restart is a new model with the same weights: a store of its own, and nothing but the directory.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from test_prefix_cache import counted, inputs_of, prompt_columns, reused
from tiny import greedy, random_ids, tiny_model

import omlx_cache
from omlx_cache import prefix_disk, prefix_writing
from omlx_cache.patch_state import state_of
from omlx_cache.storage.block_files import BlockFiles

SMALL = {"block_size": 64, "prefill_chunk": 64, "recent_tokens": 0}
EXACT = SMALL | {"cache_bits": 16, "window_size": None}
HELPER = Path(__file__).with_name("killed_chats.py")
ROOT = Path(__file__).parents[2]


def patched(directory: Path, family: str = "llama", **config):
    return omlx_cache.patch(tiny_model(family), **{**EXACT, **config}, disk_cache=directory)


def with_message(text: torch.Tensor, turn: int) -> torch.Tensor:
    return torch.cat([text, random_ids(1, 30, seed=turn)], 1)


def say(model, ids: torch.Tensor, new_tokens: int = 10) -> torch.Tensor:
    return torch.cat([ids, greedy(model, inputs_of(ids), new_tokens)], 1)


def files_of(directory: Path) -> list[Path]:
    return sorted(directory.glob("block-*.safetensors"))


def warnings(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", {}),
        ("gemma3", {}),
        ("mistral-window", {}),
        ("llama", {"sink_tokens": 0}),
        ("llama", {"cache_bits": 8}),
        ("llama", {"cache_bits": 4, "window_size": 100, "keep_layers": [0]}),
        ("llama", {"cache_bits": 8, "target_saving": 0.5}),
    ],
    ids=str,
)
def test_a_chat_that_is_restarted_each_turn_goes_on_as_if_it_were_not(tmp_path, family, config):
    config = EXACT | config
    if "target_saving" in config:
        del config["cache_bits"]
    one = omlx_cache.patch(tiny_model(family), **config, prefix_cache=True)
    expected = text = torch.empty((1, 0), dtype=torch.long)
    for turn in range(6):
        model = omlx_cache.patch(tiny_model(family), **config, disk_cache=tmp_path)
        counts, ids = counted(model), with_message(text, turn)
        text, expected = say(model, ids), say(one, with_message(expected, turn))
        assert torch.equal(text, expected), turn
        # The message, and the last token of the answer before.
        assert prompt_columns(counts, 10) == (31 if turn else 30)
        assert (omlx_cache.report(model).blocks_from_disk > 0) == (turn > 0)
        assert omlx_cache.flush(model)


def test_files_are_what_memory_keeps_and_no_warmer(tmp_path):
    model = patched(tmp_path, cache_bits=8)
    text = torch.empty((1, 0), dtype=torch.long)
    for turn in range(8):
        text = say(model, with_message(text, turn))
    assert omlx_cache.flush(model)
    (arena,) = state_of(model).store.arenas
    kept = sorted([kept.block.tier.name for kept in arena.kept_blocks] + ["SINK"])
    stored = []
    for path in files_of(tmp_path):
        with safe_open(path, "pt") as file:
            stored.append(file.metadata()["user.tier"])
    assert kept == ["HOT"] + ["K8V8"] * 4 + ["SINK"]
    assert sorted(stored) == ["HOT", *kept]  # of the partial blocks, those of the last two turns


def test_what_memory_has_no_room_for_is_found_on_disk(tmp_path):
    stock = tiny_model()
    for config in ({"prefix_cache_blocks": 3}, {"max_gpu_blocks": 6}):
        model = patched(tmp_path / str(config), **config)
        texts = [random_ids(1, 190, seed=i) for i in range(4)]  # three blocks each
        for again in range(2):
            for ids in texts:
                assert torch.equal(say(model, ids, 2), say(stock, ids, 2))
                assert reused(model) >= (4 + 2 * 64 if again else 0)
                assert (omlx_cache.report(model).blocks_from_disk > 0) == again
                (arena,) = state_of(model).store.arenas
                assert len(arena.kept_blocks) <= 6 // (1 + ("prefix_cache_blocks" in config))


def test_rows_of_a_batch_and_beams(tmp_path):
    ids, stock = random_ids(2, 200), tiny_model()
    model = patched(tmp_path)
    say(model, ids, 3)
    say(model, ids[:, :150], 3)
    omlx_cache.unpatch(model)  # writes what is left
    kinds = {"max_new_tokens": 6, "do_sample": False, "num_beams": 2}
    for one in (ids, ids[:1, :190]):
        model = patched(tmp_path, max_gpu_blocks=24)
        expected = stock.generate(**inputs_of(one), **kinds)
        assert torch.equal(model.generate(**inputs_of(one), **kinds), expected)
        assert reused(model) >= len(one) * (4 + 2 * 64)


@pytest.mark.parametrize("other", ["weights", "bits", "rope", "autocast"])
def test_other_models_and_formats_find_nothing(tmp_path, other):
    ids = random_ids(1, 150)
    first = patched(tmp_path)
    say(first, ids)
    assert omlx_cache.flush(first)
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    model = tiny_model(seed=int(other == "weights"), **(rope if other == "rope" else {}))
    config = EXACT | {"cache_bits": 8 if other == "bits" else 16}
    with torch.autocast("cpu", torch.bfloat16, enabled=other == "autocast"):
        omlx_cache.patch(model, **config)
        expected = say(model, ids)
        omlx_cache.patch(model, **config, disk_cache=tmp_path)
        assert torch.equal(say(model, ids), expected)
        assert omlx_cache.report(model).blocks_from_disk == reused(model) == 0


def damage_bits(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    place = int(torch.randint(len(whole), ()))
    whole[place] ^= 1 << int(torch.randint(8, ()))
    path.write_bytes(whole)


def truncate(path: Path) -> None:
    with open(path, "r+b") as file:
        file.truncate(int(torch.randint(path.stat().st_size, ())))


def replace_by_another(path: Path) -> None:
    others = [other for other in files_of(path.parent) if other != path]
    shutil.copy(others[0], path)


@pytest.mark.parametrize("damage", [damage_bits, truncate, replace_by_another])
def test_a_file_that_is_damaged_is_reported_and_computed_again(tmp_path, damage, caplog):
    torch.manual_seed(0)
    model = patched(tmp_path / "whole")
    text = say(model, random_ids(1, 300))
    assert omlx_cache.flush(model)
    ids = with_message(text, 1)
    expected = say(tiny_model(), ids, 4)
    names = [path.name for path in files_of(tmp_path / "whole")]
    assert len(names) == 6
    for name in names:
        shutil.copytree(tmp_path / "whole", tmp_path / name)
        damage(tmp_path / name / name)
        caplog.clear()
        model = patched(tmp_path / name)
        assert torch.equal(say(model, ids, 4), expected)
        assert reused(model) < 309
        assert ["is set aside and not used" in m for m in warnings(caplog)] == [True]
        assert omlx_cache.flush(model)
        model = patched(tmp_path / name)
        assert torch.equal(say(model, ids, 4), expected)
        assert reused(model) >= 309


def fails(code: int):
    def call(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    return call


@pytest.mark.parametrize(
    ("name", "code"), [("posix_fallocate", errno.ENOSPC), ("open", errno.EACCES)]
)
def test_a_disk_that_cannot_be_written_to_is_one_warning(tmp_path, monkeypatch, caplog, name, code):
    model, stock = patched(tmp_path), tiny_model()
    text = torch.empty((1, 0), dtype=torch.long)
    with monkeypatch.context() as patch:
        patch.setattr(os, name, fails(code), raising=False)
        for turn in range(4):
            ids = with_message(text, turn)
            text = say(model, ids)
            assert torch.equal(text, say(stock, ids))
            assert reused(model) == max(0, 40 * turn - 1)  # in memory it goes on
        assert not omlx_cache.flush(model)
        assert len(warnings(caplog)) == 1
        assert not files_of(tmp_path)
    assert omlx_cache.flush(model)  # there is room again
    model = patched(tmp_path)
    say(model, with_message(text, 9))
    assert reused(model) == 159


def test_a_directory_that_cannot_be_made(tmp_path, caplog):
    (tmp_path / "file").touch()
    model = patched(tmp_path / "file" / "below")
    ids = random_ids(1, 150)
    assert torch.equal(say(model, ids), say(tiny_model(), ids))
    assert not omlx_cache.flush(model)
    assert "can't write" in warnings(caplog)[0]


def test_a_slow_disk_slows_no_call_and_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(prefix_writing, "BACKLOG_BYTES", 1)  # one block at a time
    may_write, put = threading.Event(), BlockFiles.put
    monkeypatch.setattr(BlockFiles, "put", lambda *args: may_write.wait(60) and put(*args))
    model = patched(tmp_path)
    ids = random_ids(1, 300)
    text = say(model, ids)  # would wait for a minute
    assert torch.equal(text, say(tiny_model(), ids))
    assert not files_of(tmp_path)
    may_write.set()
    assert omlx_cache.flush(model)
    model = patched(tmp_path)
    say(model, with_message(text, 1))
    assert reused(model) == 309


def test_clocks_decide_nothing(tmp_path):
    model = patched(tmp_path)
    text = say(model, random_ids(1, 300))
    assert omlx_cache.flush(model)
    for i, path in enumerate(files_of(tmp_path)):
        os.utime(path, ns=((0, 2**61)[i % 2],) * 2)
    model = patched(tmp_path)
    say(model, with_message(text, 1))
    assert reused(model) == 309


def test_two_models_write_to_one_small_directory(tmp_path):
    texts, stock = [random_ids(1, 200, seed=i) for i in range(4)], tiny_model()
    expected = [say(stock, ids, 4) for ids in texts]
    bound = 8 * 45_000
    models = [[patched(tmp_path, max_disk_bytes=bound) for _ in range(6)] for _ in range(2)]

    def use(number: int) -> None:
        for again, model in enumerate(models[number]):
            i = (number + again) % 4
            assert torch.equal(say(model, texts[i], 4), expected[i])
            assert omlx_cache.flush(model)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(use, range(2)))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= bound
    assert not list(tmp_path.glob("*.damaged"))


def test_the_chat_that_was_used_last_stays_from_its_beginning(tmp_path):
    """Under the bound the blocks of the older text leave, the last ones first."""
    old, new = random_ids(1, 330), random_ids(1, 330, seed=1)
    sizes = patched(tmp_path / "sizes")
    say(sizes, old, 2)
    assert omlx_cache.flush(sizes)
    one = sum(path.stat().st_size for path in files_of(tmp_path / "sizes"))
    model = patched(tmp_path / "bounded", max_disk_bytes=int(1.5 * one))
    say(model, old, 2)
    say(model, new, 2)
    assert omlx_cache.flush(model)
    model = patched(tmp_path / "bounded", max_disk_bytes=int(1.5 * one))
    say(model, new, 2)
    assert reused(model) == 4 + 5 * 64
    say(model, old, 2)
    assert 0 < reused(model) < 4 + 5 * 64


def test_chats_survive_kill_9():
    """At random moments of a chat; OMLX_KILLS sets how many (200 takes minutes)."""
    kills = os.environ.get("OMLX_KILLS", "12")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(HELPER), kills], env=environment, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    totals = json.loads(done.stdout)
    assert totals["killed"] >= int(kills)
    assert totals["continued"] >= 1


def test_flush_needs_a_disk():
    model = tiny_model()
    with pytest.raises(ValueError, match="must be patched"):
        omlx_cache.flush(model)
    omlx_cache.patch(model)
    with pytest.raises(ValueError, match="with disk_cache, got False"):
        omlx_cache.flush(model)


def test_a_model_on_several_processes_is_refused(tmp_path):
    model = tiny_model()
    model._tp_size = 2
    with pytest.raises(NotImplementedError, match=r"disk_cache .* 2 processes"):
        omlx_cache.patch(model, disk_cache=tmp_path)


def test_true_is_the_users_cache_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    directory = prefix_disk.directory_of(True)
    model = omlx_cache.patch(tiny_model(), **EXACT, disk_cache=True)
    say(model, random_ids(1, 100))
    assert omlx_cache.flush(model)
    assert files_of(directory)
    assert directory.stat().st_mode & 0o077 == 0
    assert prefix_disk.directory_of("~/somewhere") == Path.home() / "somewhere"
