"""A saved cache that doesn't fit, or is damaged, is refused; a save that fails changes nothing."""

from __future__ import annotations

import errno
import os

import pytest
from caches import SMALL, filled
from tiny import tiny_model

import omlx_cache
from omlx_cache.storage.saved_cache import SavedCache
from omlx_cache.storage.sealed import SealedWriter

REFUSED_MODELS = {
    "weights": lambda: tiny_model(seed=1),
    "shape": lambda: tiny_model(num_hidden_layers=2),
    "rotary embedding": lambda: tiny_model(rope_parameters={"rope_theta": 5e5}),
    "dtype float32 and bfloat16": lambda: tiny_model().bfloat16(),
}


@pytest.mark.parametrize("reason", REFUSED_MODELS)
def test_another_models_cache_is_refused(reason, tmp_path):
    filled(omlx_cache.patch(tiny_model(), **SMALL), 70).save(tmp_path / "chat")
    other = omlx_cache.patch(REFUSED_MODELS[reason](), **SMALL)
    with pytest.raises(ValueError, match="must be a cache of this model") as raised:
        omlx_cache.PagedCache.load(tmp_path / "chat", other)
    assert reason in str(raised.value)
    assert "load the model that it was saved with" in str(raised.value)


@pytest.mark.parametrize(
    ("config", "reason", "remedy"),
    [
        ({"block_size": 128}, "block_size: 64 and 128", "block_size=64"),
        ({"sink_tokens": 8}, "sink_tokens: 4 and 8", "sink_tokens=4"),
        ({"window_size": 100}, "window_size", "window_size='auto'"),
        ({"cache_bits": 4}, "not rotated and rotated", "cache_bits=8"),
    ],
)
def test_another_format_is_refused(config, reason, remedy, tmp_path):
    model = omlx_cache.patch(tiny_model(), **SMALL)
    filled(model, 70).save(tmp_path / "chat")
    omlx_cache.patch(model, **{**SMALL, **config})
    with pytest.raises(ValueError, match="must be stored as the model is patched") as raised:
        omlx_cache.PagedCache.load(tmp_path / "chat", model)
    assert reason in str(raised.value)
    assert remedy in str(raised.value).rpartition("saved with")[2]


def test_a_damaged_file_is_refused(tmp_path):
    model = omlx_cache.patch(tiny_model(num_hidden_layers=1), **SMALL)
    filled(model, 70).save(tmp_path / "chat")
    path = tmp_path / "chat"
    whole = path.read_bytes()
    for i in range(0, len(whole), len(whole) // 150):
        damaged = bytearray(whole)
        damaged[i] ^= 1 << i % 8
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="can't be used"):
            omlx_cache.PagedCache.load(path, model)
    for wrong in (whole[:-1], whole[: len(whole) // 2], b"", whole + b"\0", os.urandom(5000)):
        path.write_bytes(wrong)
        with pytest.raises(ValueError, match="can't be used"):
            omlx_cache.PagedCache.load(path, model)
    with open(path, "wb") as file:
        SealedWriter(file, "omlx_cache cache 3", {}, []).finish()
    with pytest.raises(ValueError, match="'omlx_cache cache 3'"):
        omlx_cache.PagedCache.load(path, model)
    with pytest.raises(FileNotFoundError):
        omlx_cache.PagedCache.load(tmp_path / "nowhere", model)


def test_a_cache_that_does_not_fit_is_refused(tmp_path):
    model = omlx_cache.patch(tiny_model(), **SMALL)
    filled(model).save(tmp_path / "chat")
    omlx_cache.patch(model, **SMALL, max_gpu_blocks=3)
    with pytest.raises(omlx_cache.OutOfBlocksError, match="5"):
        omlx_cache.PagedCache.load(tmp_path / "chat", model)


def test_a_save_that_fails_leaves_the_file_before_it(tmp_path, monkeypatch):
    model = omlx_cache.patch(tiny_model(), **SMALL)
    cache = filled(model, 70)
    cache.save(tmp_path / "chat", extra={"turn": 1})
    (tmp_path / ".chat.1.0.tmp").write_bytes(b"what a killed process left")

    def no_space(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(SealedWriter, "finish", no_space)
        with pytest.raises(OSError, match="No space left"):
            cache.save(tmp_path / "chat", extra={"turn": 2})
    assert SavedCache(tmp_path / "chat").extra == {"turn": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["chat"]


def test_only_a_cache_at_rest_is_saved_and_only_with_its_model(tmp_path):
    model = omlx_cache.patch(tiny_model(), **SMALL)
    cache = filled(model, 70)
    with (
        pytest.raises(RuntimeError, match="while a step is running"),
        cache.step(cache.steps.valid_columns(None, 1, 1)),
    ):
        cache.save(tmp_path / "chat")
    omlx_cache.unpatch(model)
    with pytest.raises(RuntimeError, match="must still be patched"):
        cache.save(tmp_path / "chat")
    assert not list(tmp_path.iterdir())
