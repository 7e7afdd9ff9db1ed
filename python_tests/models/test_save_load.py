"""A saved cache: loaded, it goes on as if it had never been away; what doesn't fit is refused."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path

import pytest
import torch
from tiny import greedy, left_padded, random_ids, tiny_model

import omlx_cache
from omlx_cache.compat import cache_name
from omlx_cache.storage.fingerprint import (
    block_fingerprint,
    model_fingerprint,
    tokenizer_fingerprint,
)
from omlx_cache.storage.saved_cache import SavedCache
from omlx_cache.storage.sealed import SealedWriter
from omlx_kernels.layout import BLOCK_TIERS, Tier

SMALL = {"block_size": 64, "prefill_chunk": 64, "recent_tokens": 0}
TIERS = {"tiers": {"k8v8": 64, "k8v4": 64, "k4v4": None}}


def step(model, cache, ids, **kwargs):
    """Run ids through the model on a cache; return the logits."""
    with torch.no_grad():
        return model(ids, **{cache_name(type(model).forward): cache}, **kwargs).logits


def filled(model, length=300, batch=1, **kwargs) -> omlx_cache.PagedCache:
    """Return a cache that has seen random ids."""
    cache = omlx_cache.PagedCache(model)
    step(model, cache, random_ids(batch, length), **kwargs)
    return cache


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


def test_a_cache_continues_under_another_precision_of_later_blocks(tmp_path):
    model = omlx_cache.patch(tiny_model(), **SMALL)
    filled(model).save(tmp_path / "chat")
    omlx_cache.patch(model, **{**SMALL, "cache_bits": 16})
    loaded = omlx_cache.PagedCache.load(tmp_path / "chat", model)
    step(model, loaded, random_ids(1, 100))
    assert {b.tier for b in loaded.groups[0].rows[0].blocks} == {Tier.K8V8, Tier.HOT}


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


def test_fingerprints_see_what_matters_and_nothing_else():
    model = omlx_cache.patch(tiny_model("qwen2"), **SMALL)
    decoder = model.get_decoder()
    before = model_fingerprint(decoder)
    filled(model)
    model.config.use_cache = False
    assert model_fingerprint(decoder) == before
    assert model_fingerprint(tiny_model("qwen2").get_decoder()) == before  # not patched
    cache = omlx_cache.PagedCache(model)
    blocks = block_fingerprint(cache, decoder)
    assert block_fingerprint(omlx_cache.PagedCache(model), decoder) == blocks
    omlx_cache.patch(model, **{**SMALL, "recent_tokens": 64})
    assert block_fingerprint(omlx_cache.PagedCache(model), decoder) != blocks
    for name, weight in decoder.named_parameters():
        kept = weight.data.clone()
        weight.data *= 1.01
        changed = model_fingerprint(decoder)
        assert changed["weights"] != before["weights"], name
        weight.data = kept
    assert model_fingerprint(decoder) == before
    with pytest.raises(NotImplementedError, match="all offloaded"):
        model_fingerprint(decoder.to("meta"))


def test_a_quantized_layer_is_known_in_any_order_of_its_weights():
    """GPTQ kernels pack codes and scales in an order of their own, some when they first run."""
    decoder = tiny_model(num_hidden_layers=1).get_decoder()
    packed = torch.nn.Module()
    packed.register_buffer("qweight", torch.arange(64, dtype=torch.int32).view(8, 8))
    packed.register_buffer("scales", torch.rand(4, 8).half())
    decoder.layers[0].mlp.up_proj = packed
    before = model_fingerprint(decoder)
    packed.qweight = packed.qweight.view(torch.uint8).t()
    packed.scales = packed.scales.bfloat16()[:, torch.randperm(8)]
    assert model_fingerprint(decoder) == before
    packed.scales *= 1.01
    assert model_fingerprint(decoder)["weights"] != before["weights"]


def test_an_adapter_counts_while_it_is_active():
    decoder = tiny_model(num_hidden_layers=1).get_decoder()
    layer = decoder.layers[0].mlp.up_proj
    plain = model_fingerprint(decoder)
    layer.active_adapters, layer.scaling, layer.disable_adapters = ["one"], {"one": 0.5}, False
    one = model_fingerprint(decoder)
    layer.scaling = {"one": 0.25}
    weaker = model_fingerprint(decoder)
    layer.disable_adapters = True
    assert len({f["adapters"] for f in (plain, one, weaker)}) == 3
    assert model_fingerprint(decoder) == plain


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
