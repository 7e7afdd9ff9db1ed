"""`ChatSession`: what a chat says, what it computes again, and what it refuses."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tiny_chat import save_tiny_chat_model

import omlx_cache
from omlx_cache.conversation import Conversation
from omlx_cache.patch_state import state_of
from omlx_cache.tools.loading import load_model, load_tokenizer

CONFIG = {"block_size": 64, "cache_bits": 16, "prefix_cache": True}
SYSTEM = "You answer in one short sentence, and you never say more than you were asked for. " * 3
SAY = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def model(directory):
    return omlx_cache.patch(load_model(directory, device="cpu"), **CONFIG)


@pytest.fixture
def tokenizer(directory):
    return load_tokenizer(directory)


class Broken:
    """A streamer whose reader goes away after the prompt and a token."""

    def __init__(self) -> None:
        self.calls = 0

    def put(self, ids) -> None:
        self.calls += 1
        if self.calls > 2:
            raise BrokenPipeError

    def end(self) -> None: ...


def said_by_stock(directory, tokenizer, messages: list[str], system=None) -> list[str]:
    """Return the answers of an unpatched model that reads the whole chat each time."""
    model = load_model(directory, device="cpu")
    chat, found = Conversation(tokenizer, {tokenizer.eos_token_id}, system=system), []
    for message in messages:
        ids = torch.tensor([chat.ask(message)])
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **SAY)
        answer = out[0, ids.shape[1] :].tolist()
        chat.answer(answer)
        found.append(tokenizer.decode(answer, skip_special_tokens=True))
    return found


def test_a_chat_says_what_the_stock_model_says(directory, model, tokenizer):
    messages = [f"Tell me about number {i}." for i in range(5)]
    chat = omlx_cache.ChatSession(model, tokenizer, system=SYSTEM)
    answers = [chat.send(message, **SAY) for message in messages]
    assert answers == said_by_stock(directory, tokenizer, messages, SYSTEM)
    assert chat.reused_tokens > 150
    roles = [entry["role"] for entry in chat.messages]
    assert roles == ["system"] + ["user", "assistant"] * 5
    assert [entry["content"] for entry in chat.messages[2::2]] == answers


def test_an_edit_forgets_what_followed_and_reuses_what_precedes(directory, model, tokenizer):
    messages = ["One.", "Two.", "Three."]
    chat = omlx_cache.ChatSession(model, tokenizer, system=SYSTEM)
    for message in messages:
        chat.send(message, **SAY)
    answer = chat.edit(1, "Something else.", **SAY)
    assert [answer] == said_by_stock(directory, tokenizer, ["One.", "Something else."], SYSTEM)[1:]
    assert len(chat.messages) == 5
    assert chat.reused_tokens > len(tokenizer(SYSTEM)["input_ids"])


@pytest.mark.parametrize("turn", [-1, 1])
def test_an_edit_of_no_turn_is_refused(model, tokenizer, turn):
    chat = omlx_cache.ChatSession(model, tokenizer)
    chat.send("One.", **SAY)
    with pytest.raises(ValueError, match=f"turn must be from 0 to 0, got {turn}"):
        chat.edit(turn, "Two.")
    assert len(chat.messages) == 2


def test_a_second_session_begins_with_the_system_prompt_of_the_first(directory, model, tokenizer):
    first, second = (omlx_cache.ChatSession(model, tokenizer, system=SYSTEM) for _ in range(2))
    first.send("Hello.", **SAY)
    assert first.reused_tokens == 0
    answer = second.send("Good bye.", **SAY)
    assert second.reused_tokens > len(tokenizer(SYSTEM)["input_ids"])
    assert [answer] == said_by_stock(directory, tokenizer, ["Good bye."], SYSTEM)


def test_sessions_in_threads_say_what_they_say_alone(directory, model, tokenizer):
    chats = [omlx_cache.ChatSession(model, tokenizer, system=SYSTEM) for _ in range(3)]
    messages = [[f"Chat {i}, turn {j}." for j in range(3)] for i in range(3)]
    with ThreadPoolExecutor(3) as pool:
        found = list(
            pool.map(lambda i: [chats[i].send(text, **SAY) for text in messages[i]], range(3))
        )
    assert found == [said_by_stock(directory, tokenizer, own, SYSTEM) for own in messages]


def test_a_turn_that_fails_leaves_the_chat_as_it_was(directory, model, tokenizer):
    chat = omlx_cache.ChatSession(model, tokenizer)
    chat.send("One.", **SAY)
    before = chat.messages
    with pytest.raises(BrokenPipeError):
        chat.send("Two.", streamer=Broken(), **SAY)
    assert chat.messages == before
    assert [chat.send("Two.", **SAY)] == said_by_stock(directory, tokenizer, ["One.", "Two."])[1:]


def test_an_edit_that_fails_leaves_the_chat_as_it_was(directory, model, tokenizer):
    chat, messages = omlx_cache.ChatSession(model, tokenizer), ["One.", "Two."]
    for message in messages:
        chat.send(message, **SAY)
    before = chat.messages
    with pytest.raises(BrokenPipeError):
        chat.edit(0, "Else.", streamer=Broken(), **SAY)
    assert chat.messages == before
    said = said_by_stock(directory, tokenizer, [*messages, "Three."])
    assert chat.send("Three.", **SAY) == said[2]


def test_without_the_store_it_is_refused(directory, tokenizer):
    model = omlx_cache.patch(load_model(directory, device="cpu"))
    with pytest.raises(ValueError, match="prefix_cache=True, got False"):
        omlx_cache.ChatSession(model, tokenizer)


def test_a_session_begins_to_read_before_its_turns(directory, tokenizer, tmp_path):
    def opened():
        config = CONFIG | {"disk_cache": tmp_path / "blocks"}
        return omlx_cache.patch(load_model(directory, device="cpu"), **config)

    def staged(model) -> int:
        store = state_of(model).prefix_store()
        for _ in range(200):  # until its thread has begun, and then until it has ended
            if store.disk is not None and store.disk.ahead._slots:
                break
            time.sleep(0.01)
        store.disk.ahead.wait()
        return len(store.disk.ahead._slots)

    model = opened()
    chat = omlx_cache.ChatSession(model, tokenizer, system=SYSTEM)
    chat.send("Hello?", **SAY)
    chat.save(tmp_path / "chat")
    assert omlx_cache.flush(model)
    model = opened()
    chat = omlx_cache.ChatSession(model, tokenizer, system=SYSTEM)
    assert staged(model) >= 3  # of the system prompt: the sinks, and whole blocks
    expected = said_by_stock(directory, tokenizer, ["Hello?", "And you?"], SYSTEM)
    assert [chat.send(each, **SAY) for each in ("Hello?", "And you?")] == expected
    assert omlx_cache.report(model).blocks_from_disk == 0  # it was in memory by then
    assert omlx_cache.flush(model)
    model = opened()
    again = omlx_cache.ChatSession(model, tokenizer)
    again._chat.restore(chat._chat.to_data())
    again.prefetch()
    assert staged(model) >= 3
    again.send("Well?", **SAY)
    report = omlx_cache.report(model)
    assert report.blocks_read_ahead == report.blocks_from_disk >= 3
