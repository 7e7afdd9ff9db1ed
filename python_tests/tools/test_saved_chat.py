"""`ChatSession.save` and `load`: what comes back, what is computed again, and what is refused."""

from __future__ import annotations

import copy
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from tiny_chat import TEMPLATE, save_tiny_chat_model, tiny_tokenizer

import omlx_cache
from omlx_cache.patch_state import state_of
from omlx_cache.tools.loading import load_model, load_tokenizer

CONFIG = {"block_size": 64, "prefix_cache": True}
SYSTEM = "You answer in one short sentence, and you never say more than you were asked for. " * 3
SAY = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(directory):
    return load_tokenizer(directory)


def fresh_model(directory: Path, **config):
    """Return a model as a new process would have it: its store is empty."""
    return omlx_cache.patch(copy.deepcopy(stock_model(directory)), **(CONFIG | config))


@cache
def stock_model(directory: Path):
    return load_model(directory, device="cpu")


def a_chat(model, tokenizer, turns: int = 4) -> omlx_cache.ChatSession:
    chat = omlx_cache.ChatSession(model, tokenizer, system=SYSTEM)
    for i in range(turns):
        chat.send(f"Tell me about number {i}.", **SAY)
    return chat


def say(chat, model, message: str) -> tuple[str, int]:
    """Return the answer, and how many tokens the model computed for it."""
    computed = 0

    def count(module, args) -> None:
        nonlocal computed
        computed += args[0].shape[1]

    hook = model.get_input_embeddings().register_forward_pre_hook(count)
    try:
        return chat.send(message, **SAY), computed
    finally:
        hook.remove()


def blocks_in_use(model) -> int:
    return sum(arena.blocks.num_used for arena in state_of(model).prefix_store().arenas)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"cache_bits": 16},
        {"tiers": {"k8v4": 64, "k4v4": None}},
        {"target_saving": 0.5, "keep_layers": [0]},
        {"window_size": 100},
        {"sink_tokens": 0},
    ],
    ids=lambda config: ",".join(config) or "defaults",
)
def test_a_loaded_chat_goes_on_as_the_saved_one(directory, tokenizer, tmp_path, config):
    model, other = (fresh_model(directory, **config) for _ in range(2))
    chat = a_chat(model, tokenizer)
    chat.save(tmp_path / "chat")
    loaded = omlx_cache.ChatSession.load(tmp_path / "chat", other, tokenizer)
    assert (loaded.messages, loaded.num_tokens) == (chat.messages, chat.num_tokens)
    before = chat.num_tokens
    for message in ("Go on.", "And then?"):
        assert say(loaded, other, message) == say(chat, model, message)
        assert loaded.reused_tokens == chat.reused_tokens >= before - 1  # the answer's last token
        before = chat.num_tokens
    assert loaded.messages == chat.messages


def test_a_chat_is_loaded_beside_others_and_edited(directory, tokenizer, tmp_path):
    model = fresh_model(directory)
    chat = a_chat(model, tokenizer)
    chat.save(tmp_path / "chat")
    used = blocks_in_use(model)
    loaded = omlx_cache.ChatSession.load(tmp_path / "chat", model, tokenizer)
    assert blocks_in_use(model) == used, "the same text twice takes no more blocks"
    assert loaded.edit(2, "Else.", **SAY) == chat.edit(2, "Else.", **SAY)
    assert len(loaded.messages) == 7


def test_what_has_left_the_store_is_computed_again(directory, tokenizer, tmp_path):
    model = fresh_model(directory, prefix_cache_blocks=3)
    chat = a_chat(model, tokenizer)
    assert chat.num_tokens > 4 + 4 * 64
    chat.save(tmp_path / "chat")
    other = fresh_model(directory)
    loaded = omlx_cache.ChatSession.load(tmp_path / "chat", other, tokenizer)
    assert loaded.messages == chat.messages
    answer, computed = say(loaded, other, "Go on.")
    assert loaded.reused_tokens == 4 + 3 * 64  # the sinks, and the first blocks
    assert computed == loaded.prompt_tokens - loaded.reused_tokens + SAY["max_new_tokens"] - 1
    assert answer == chat.send("Go on.", **SAY)


def test_a_chat_whose_blocks_are_all_gone_is_saved(directory, tokenizer, tmp_path):
    model = fresh_model(directory, cache_bits=16)
    chat = a_chat(model, tokenizer)
    state_of(model).close_store()
    chat.save(tmp_path / "chat")
    other = fresh_model(directory, cache_bits=16)
    loaded = omlx_cache.ChatSession.load(tmp_path / "chat", other, tokenizer)
    assert loaded.send("Go on.", **SAY) == chat.send("Go on.", **SAY)
    assert loaded.reused_tokens == 0


def test_a_chat_before_its_first_turn(directory, tokenizer, tmp_path):
    model = fresh_model(directory)
    omlx_cache.ChatSession(model, tokenizer, system=SYSTEM).save(tmp_path / "chat")
    loaded = omlx_cache.ChatSession.load(tmp_path / "chat", model, tokenizer)
    assert loaded.messages == [{"role": "system", "content": SYSTEM}]
    expected = omlx_cache.ChatSession(model, tokenizer, system=SYSTEM).send("Hello.", **SAY)
    assert loaded.send("Hello.", **SAY) == expected


def test_a_chat_is_not_saved_in_the_middle_of_a_turn(directory, tokenizer, tmp_path):
    chat = a_chat(fresh_model(directory), tokenizer, turns=1)

    class Saver:
        def put(self, ids) -> None:
            chat.save(tmp_path / "chat")

        def end(self) -> None: ...

    with pytest.raises(RuntimeError, match="the turn that is running"):
        chat.send("Two.", streamer=Saver(), **SAY)
    assert not (tmp_path / "chat").exists()


@pytest.fixture(scope="module")
def saved(directory, tokenizer, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "chat"
    a_chat(fresh_model(directory), tokenizer).save(path)
    return path


def refused(path, model, tokenizer, match: str) -> None:
    used = blocks_in_use(model)
    with pytest.raises(ValueError, match=match) as error:
        omlx_cache.ChatSession.load(path, model, tokenizer)
    assert str(path) in str(error.value)
    assert blocks_in_use(model) == used == 0, "a refused chat leaves nothing in the store"


def test_another_models_chat_is_refused(directory, tokenizer, saved, tmp_path):
    other = copy.deepcopy(stock_model(directory))
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight.mul_(1.001)
    other = omlx_cache.patch(other, **CONFIG)
    refused(saved, other, tokenizer, "cache of this model, got one whose weights differs")


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"cache_bits": 16}, "another precision; .* cache_bits=8"),
        ({"recent_tokens": 64}, "another precision; .* recent_tokens=128"),
        ({"block_size": 128}, "other block_size: 64 and 128; .* block_size=64"),
        ({"sink_tokens": 8}, "other sink_tokens: 4 and 8"),
    ],
)
def test_another_format_is_refused(directory, tokenizer, saved, config, match):
    refused(saved, fresh_model(directory, **config), tokenizer, match)


def test_another_tokenizer_is_refused(directory, saved):
    model = fresh_model(directory)
    other = tiny_tokenizer()
    other.add_tokens(["<new>"])
    refused(saved, model, other, "whose tokenizer differs")
    other_template = tiny_tokenizer(TEMPLATE.replace("assistant", "model"))
    refused(saved, model, other_template, "whose chat template differs")


@pytest.mark.parametrize("where", [3, 40, 0.3, 0.6, 0.999])
def test_a_changed_bit_is_found(directory, tokenizer, saved, tmp_path, where):
    data = bytearray(saved.read_bytes())
    data[where if isinstance(where, int) else int(where * len(data))] ^= 4
    path = tmp_path / "chat"
    path.write_bytes(data)
    refused(path, fresh_model(directory), tokenizer, "ChatSession.load: .* can't be used: ")


@pytest.mark.parametrize("content", [b"", b"no chat at all", None])
def test_other_files_are_refused(directory, tokenizer, saved, tmp_path, content):
    path = tmp_path / "chat"
    path.write_bytes(saved.read_bytes()[:-100] if content is None else content)
    refused(path, fresh_model(directory), tokenizer, "can't be used: ")


def test_a_cache_without_a_chat_is_refused(directory, tokenizer, tmp_path):
    model = fresh_model(directory)
    omlx_cache.PagedCache(model).save(tmp_path / "cache")
    refused(tmp_path / "cache", model, tokenizer, "must hold a chat, got a cache without one")


def test_files_that_can_not_be_read_or_written(directory, tokenizer, saved, tmp_path):
    model = fresh_model(directory)
    with pytest.raises(FileNotFoundError):
        omlx_cache.ChatSession.load(tmp_path / "none", model, tokenizer)
    chat = omlx_cache.ChatSession(model, tokenizer)
    with pytest.raises(FileNotFoundError):
        chat.save(tmp_path / "no" / "chat")
    shutil.copy(saved, tmp_path / "old")
    with pytest.raises(IsADirectoryError):
        chat.save(tmp_path)
    assert (tmp_path / "old").read_bytes() == saved.read_bytes()


def test_a_pool_that_is_too_small_says_so(directory, tokenizer, saved):
    model = fresh_model(directory, max_gpu_blocks=2)
    with pytest.raises(omlx_cache.OutOfBlocksError):
        omlx_cache.ChatSession.load(saved, model, tokenizer)
    assert blocks_in_use(model) == 0


def test_without_the_store_a_chat_is_not_loaded(directory, tokenizer, saved):
    model = omlx_cache.patch(copy.deepcopy(stock_model(directory)))
    with pytest.raises(ValueError, match="prefix_cache=True, got False"):
        omlx_cache.ChatSession.load(saved, model, tokenizer)
