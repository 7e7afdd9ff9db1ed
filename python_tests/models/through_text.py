"""Ways of generating that give out text instead of ids: a streamer, and a pipeline."""

from __future__ import annotations

from threading import Thread

from outcome import NEW, PROMPT, Outcome, batch, generate, single
from tiny import VOCABULARY
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    TextIteratorStreamer,
    pipeline,
)


def words() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one word for each id."""
    tokenizer = Tokenizer(WordLevel({word(i): i for i in range(VOCABULARY)}, unk_token=word(1)))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=word(0), padding_side="left"
    )


def word(token: int) -> str:
    return f"w{token}" if token else "<pad>"


def text_of(ids: list[int]) -> str:
    """Return the words of ids, without padding."""
    return " ".join(word(i) for i in ids if i)


def streamed(model: PreTrainedModel) -> Outcome:
    """Read the text in another thread than the one that writes it."""
    streamer = TextIteratorStreamer(words(), skip_prompt=True, timeout=60)
    outcomes = []
    writer = Thread(
        target=lambda: outcomes.append(generate(model, single(), streamer=streamer)), daemon=True
    )
    writer.start()
    text = "".join(streamer)
    writer.join()
    (outcome,) = outcomes
    said = outcome.sequences[0, PROMPT:].tolist()
    assert text.split() == [word(i) for i in said]
    return outcome


def through_pipeline(model: PreTrainedModel) -> Outcome:
    outcome, tokenizer = generate(model, batch()), words()
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    answers = generator(
        [text_of(row) for row in batch()["input_ids"].tolist()],
        batch_size=2,
        return_full_text=False,
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=False,
    )
    for (answer,), row in zip(answers, outcome.sequences[:, PROMPT:].tolist(), strict=True):
        assert answer["generated_text"] == text_of(row)
    return outcome
