"""Prompts that are padded on the right: a mistake, but one that transformers answers sensibly.

``generate`` takes the first token of a row from its last column (or the one before drafted tokens),
which then holds padding and sees the tokens before it.
"""

from __future__ import annotations

import pytest
import torch
from tiny import greedy, random_ids, tiny_model

import omlx_cache
from omlx_cache.compat import cache_name

LENGTHS = [200, 130, 1]
SMALL = {"block_size": 64, "prefill_chunk": 64}
EXACT = SMALL | {"cache_bits": 16}
ROUNDED = SMALL | {"cache_bits": 8, "recent_tokens": 0}


def right_padded():
    """Return a batch whose rows end in padding, but for the first one."""
    ids = random_ids(len(LENGTHS), LENGTHS[0])
    mask = (torch.arange(LENGTHS[0]) < torch.tensor(LENGTHS)[:, None]).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return {"input_ids": ids * mask, "attention_mask": mask, "position_ids": positions}


def last_logits(model, inputs, **kwargs):
    with torch.no_grad():
        return model(**inputs, **kwargs).logits[:, -1]


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt-oss", "gemma2"])
def test_the_last_column_sees_what_it_sees_in_transformers(family):
    # With windows longer than the text: transformers counts columns of padding in them, too.
    longer = {"sliding_window": 300} if family in ("gpt-oss", "gemma2") else {}
    stock, inputs = tiny_model(family, **longer), right_padded()
    want = last_logits(stock, inputs)
    model = omlx_cache.patch(tiny_model(family, **longer), **EXACT)
    torch.testing.assert_close(last_logits(model, inputs), want, rtol=1e-3, atol=1e-4)
    assert omlx_cache.report(model).cached_tokens == sum(LENGTHS)


def test_generated_text_is_that_of_the_stock_model():
    stock, inputs = tiny_model(), right_padded()
    del inputs["position_ids"]
    want = greedy(stock, inputs, 10)
    model = omlx_cache.patch(tiny_model(), **EXACT)
    assert torch.equal(greedy(model, inputs, 10), want)
    beams = {"num_beams": 3, "early_stopping": False}
    assert torch.equal(greedy(model, inputs, 5, **beams), greedy(stock, inputs, 5, **beams))


@pytest.mark.parametrize(
    "config",
    [
        ROUNDED,
        ROUNDED | {"cache_bits": {"k": 8, "v": 4}},
        EXACT | {"window_size": 70, "sink_tokens": 0},
        EXACT | {"cpu_offload": True, "max_gpu_blocks": 4, "recent_tokens": 0},
    ],
)
def test_it_sees_what_a_token_in_its_place_would_see(config):
    """Asked again with the last token of its text, a row gives its answer to that token."""
    model = omlx_cache.patch(tiny_model(num_hidden_layers=1), **config)
    inputs = right_padded()
    last = inputs["input_ids"].gather(1, torch.tensor(LENGTHS)[:, None] - 1)
    inputs["input_ids"][:, -1:] = last
    got = last_logits(model, inputs)
    for row, length in enumerate(LENGTHS):
        alone = {"input_ids": inputs["input_ids"][row : row + 1, :length]}
        want = last_logits(model, alone)[0]
        torch.testing.assert_close(got[row], want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("mode", [{"prompt_lookup_num_tokens": 3}, {"assistant_model": None}])
def test_drafted_tokens_behind_the_padding(mode):
    """Then the column of padding that is asked is not the last one."""
    stock, model = tiny_model(), omlx_cache.patch(tiny_model(), **EXACT)
    ids = random_ids(1, 150)
    ids[:, 100:] = 0
    inputs = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    if "assistant_model" in mode:
        mode = {"assistant_model": model}
    want = greedy(stock, inputs, 10)
    assert torch.equal(greedy(model, inputs, 10, **mode), want)


def test_decoding_behind_it_goes_on_from_the_tokens():
    stock, inputs = tiny_model(), right_padded()
    model, new = omlx_cache.patch(tiny_model(), **EXACT), random_ids(3, 1, seed=1)
    cache = {cache_name(type(model).forward): omlx_cache.PagedCache(model)}
    last_logits(model, inputs, **cache)
    mask = torch.cat([inputs["attention_mask"], torch.ones(3, 1, dtype=torch.long)], 1)
    places = torch.tensor(LENGTHS)[:, None]
    got = last_logits(
        model, {"input_ids": new, "attention_mask": mask, "position_ids": places}, **cache
    )
    for row, length in enumerate(LENGTHS):
        alone = torch.cat([inputs["input_ids"][row, :length], new[row]])[None]
        want = last_logits(stock, {"input_ids": alone})[0]
        torch.testing.assert_close(got[row], want, rtol=1e-3, atol=1e-4)
