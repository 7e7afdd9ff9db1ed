"""Answers are compared with the same text before them, and the cache ends with the reference."""

import pytest
import torch
from tiny_chat import save_tiny_chat_model
from transformers import DynamicCache

import omlx_cache
from omlx_cache.compat import cache_name
from omlx_cache.tools.agreement import Agreement, check_own_answer, follow_reference
from omlx_cache.tools.loading import load_model

NEW = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    return load_model(save_tiny_chat_model(tmp_path_factory.mktemp("tiny"), eos_token_id=None))


def generate(model, ids: list[int], cache) -> list[int]:
    inputs = torch.tensor([ids])
    out = model.generate(
        input_ids=inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=NEW,
        do_sample=False,
        **{cache_name(type(model).forward): cache},
    )
    return out[0, len(ids) :].tolist()


def choices_by_hand(model, prompt: list[int], answer: list[int]) -> list[int]:
    """Compute, without a cache, what the model chooses at each position of an answer."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *answer[:-1]]])).logits[0]
    return logits[len(prompt) - 1 :].argmax(-1).tolist()


@pytest.fixture(params=["stock", "patched"])
def make_cache(request: pytest.FixtureRequest, model):
    """Give a maker of caches, for the stock model and for the patched one."""
    if request.param == "stock":
        yield lambda: DynamicCache(config=model.config)
    else:
        with omlx_cache.patched(model, cache_bits=16):
            yield lambda: omlx_cache.PagedCache(model)


PROMPT = list(range(10, 50))


def test_the_same_answer_agrees_everywhere(model, make_cache):
    cache = make_cache()
    own = generate(model, PROMPT, cache)
    length = cache.get_seq_length()
    assert follow_reference(model, cache, PROMPT, own, own) == Agreement(NEW, NEW, NEW)
    assert cache.get_seq_length() == length


@pytest.mark.parametrize("differs_at", [0, 1, 4, NEW - 1])
def test_choices_after_a_difference_are_compared_in_the_references_text(
    model, make_cache, differs_at: int
):
    cache = make_cache()
    own = generate(model, PROMPT, cache)
    reference = list(own)
    reference[differs_at] = (own[differs_at] + 1) % 300 + 3
    expected = choices_by_hand(model, PROMPT, reference)
    same = sum(a == b for a, b in zip(expected, reference, strict=True))

    found = follow_reference(model, cache, PROMPT, own, reference)

    assert found == Agreement(same, differs_at, NEW)
    assert cache.get_seq_length() == len(PROMPT) + NEW - 1
    continued = generate(model, [*PROMPT, *reference, 5, 6], cache)
    assert continued == generate(model, [*PROMPT, *reference, 5, 6], make_cache())


@pytest.mark.parametrize("length", [1, 3])
def test_a_reference_may_be_shorter(model, make_cache, length: int):
    cache = make_cache()
    own = generate(model, PROMPT, cache)
    reference = [*own[: length - 1], 2]
    assert follow_reference(model, cache, PROMPT, own, reference) == Agreement(
        length - 1, length - 1, length
    )
    assert cache.get_seq_length() == len(PROMPT) + length - 1


def test_a_model_agrees_with_itself_and_its_cache_is_untouched(model, make_cache):
    cache = make_cache()
    own = generate(model, PROMPT, cache)
    length = cache.get_seq_length()
    assert check_own_answer(model, cache, PROMPT, own) == Agreement(NEW, NEW, NEW)
    assert cache.get_seq_length() == length


def test_a_cache_that_can_not_be_rewound_gives_no_agreement(model):
    class Fixed(DynamicCache):
        def crop(self, count: int) -> None:
            raise ValueError("no way back")

    cache = Fixed(config=model.config)
    own = generate(model, PROMPT, cache)
    length = cache.get_seq_length()
    assert follow_reference(model, cache, PROMPT, own, [own[0], *own[:-1], 4]) is None
    assert check_own_answer(model, cache, PROMPT, own) is None
    assert cache.get_seq_length() == length
