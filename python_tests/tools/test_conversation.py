"""A chat's ids only grow, and read like the chat template's own rendering."""

import pytest
from tiny_chat import tiny_tokenizer

from omlx_cache.conversation import Conversation
from omlx_cache.tools.conversation import long_messages


def encode(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("ended", [True, False], ids=["ended by itself", "cut off"])
def test_a_chat_reads_like_its_template(ended: bool):
    tokenizer = tiny_tokenizer()
    end = tokenizer.eos_token_id
    chat = Conversation(tokenizer, {end})
    chat.ask("What is a class?")
    chat.answer(encode(tokenizer, "A type.") + [end] * ended)
    ids = chat.ask("And an object?")
    messages = [
        {"role": "user", "content": "What is a class?"},
        {"role": "assistant", "content": "A type."},
        {"role": "user", "content": "And an object?"},
    ]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(ids) == rendered


def test_ids_only_grow():
    tokenizer = tiny_tokenizer()
    chat = Conversation(tokenizer, {tokenizer.eos_token_id})
    before = chat.ask("one")
    for answer in ([7, 8, 9], [], [tokenizer.eos_token_id]):
        chat.answer(answer)
        after = chat.ask("more")
        kept = [token for token in answer if token != tokenizer.eos_token_id]
        assert after[: len(before) + len(kept)] == before + kept
        assert len(after) > len(before) + len(kept)
        before = after


def test_without_a_template_the_chat_is_plain_text():
    tokenizer = tiny_tokenizer(chat_template=None)
    chat = Conversation(tokenizer)
    assert not chat.has_template
    chat.ask("Hello")
    chat.answer(encode(tokenizer, " Hi"))
    ids = chat.ask("Bye")
    assert tokenizer.decode(ids) == "User: Hello\nAssistant: Hi\nUser: Bye\nAssistant:"


def test_a_message_can_not_be_asked_before_the_last_is_answered():
    chat = Conversation(tiny_tokenizer())
    chat.ask("one")
    with pytest.raises(ValueError, match="has no answer yet"):
        chat.ask("two")


def test_a_template_that_drops_answers_is_refused():
    chat = Conversation(tiny_tokenizer("{{ messages[-1]['content'] }}"))
    chat.ask("one")
    chat.answer([7])
    with pytest.raises(ValueError, match="does not render the assistant's messages"):
        chat.ask("two")


def test_long_messages_differ_and_ask_something():
    messages = long_messages(tiny_tokenizer(), 6, 100)
    assert len(set(messages)) == 6
    assert all(len(message) > 100 for message in messages)
    assert all("sentence" in message.splitlines()[-1] for message in messages)
