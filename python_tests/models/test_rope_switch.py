"""Phi-3 with longrope past the length at which its rotary frequencies change over."""

from __future__ import annotations

import functools
import inspect

import pytest
import torch
from tiny import _LONGROPE, greedy, left_padded, random_ids, tiny_model

import omlx_cache
from omlx_cache.compat import CACHE_NAMES
from omlx_cache.rope_switch import PREPARE

SWITCH = 48
NEW = 24
MODES = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "returned": {"num_beams": 2, "num_return_sequences": 2},
    "guidance": {"guidance_scale": 1.5},
    "chunks": {"prefill_chunk_size": 16},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "early-exit": {"assistant_early_exit": 1},
}


def longrope_model():
    return tiny_model(
        "phi3-longrope",
        rope_parameters=_LONGROPE | {"original_max_position_embeddings": SWITCH},
        original_max_position_embeddings=SWITCH,
        max_position_embeddings=512,
    )


def stock_model():
    """Return the stock model; before 5.24 it read nothing but the newest token at the switch."""
    model = longrope_model()
    original = getattr(model, PREPARE)

    @functools.wraps(original)
    def prepare(*args, **kwargs):
        inputs = original(*args, **kwargs)
        if any(inputs.get(name) is not None for name in CACHE_NAMES):
            return inputs
        return original(*args, **{**kwargs, "next_sequence_length": None})

    setattr(model, PREPARE, prepare)
    return model


def inputs_of(length: int, rows: int) -> dict[str, torch.Tensor]:
    ids = random_ids(rows, length)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [SWITCH - 8, SWITCH, SWITCH + 1])
def test_equal_to_stock_across_the_switch(mode, length):
    inputs = inputs_of(length, 1 if mode in ("lookup", "early-exit") else 2)
    expected = greedy(stock_model(), inputs, NEW, **MODES[mode])
    patched = omlx_cache.patch(longrope_model(), cache_bits=16)
    assert torch.equal(greedy(patched, inputs, NEW, **MODES[mode]), expected)


def test_padded_rows_are_equal_to_stock():
    inputs = left_padded(random_ids(3, SWITCH - 4), [SWITCH - 4, 9, 30])
    expected = greedy(stock_model(), inputs, 2 * NEW)
    patched = omlx_cache.patch(longrope_model(), cache_bits=16)
    assert torch.equal(greedy(patched, inputs, 2 * NEW), expected)


@pytest.mark.parametrize("bits", [16, 8])
def test_the_text_is_read_again_with_the_long_factors(bits):
    """The logits behind the switch are those of one stock pass over the whole text."""
    model = longrope_model()
    ids = random_ids(1, SWITCH - 3)
    patched = omlx_cache.patch(longrope_model(), cache_bits=bits)
    out = patched.generate(
        ids, max_new_tokens=NEW, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    with torch.no_grad():
        whole = model(out.sequences).logits
    got = torch.stack(out.logits, 1)[:, 4:]
    expected = whole[:, ids.shape[1] + 3 : -1]
    bound = {16: 1e-4, 8: 0.05}[bits] * expected.abs().max()
    assert (got - expected).abs().max() <= bound


def test_a_cache_of_the_caller_stays_current():
    patched = omlx_cache.patch(longrope_model(), cache_bits=16)
    cache, inputs = omlx_cache.PagedCache(patched), inputs_of(SWITCH - 8, 2)
    out = patched.generate(
        **inputs, cache=cache, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True
    )
    assert next(v for k, v in out.items() if k in ("cache", "past_key_values")) is cache
    columns = SWITCH - 8 + NEW - 1
    assert cache.get_seq_length() == columns
    assert omlx_cache.report(patched).seen_tokens == cache.report().seen_tokens == 2 * columns

    chat = torch.cat([out.sequences, random_ids(2, 5, seed=1)], 1)
    turn = {"input_ids": chat, "attention_mask": torch.ones_like(chat)}
    expected = greedy(stock_model(), turn, NEW)
    assert torch.equal(greedy(patched, turn, NEW, cache=cache), expected)


def test_a_row_that_has_ended_disturbs_no_other():
    inputs = inputs_of(SWITCH - 8, 2)
    stock = stock_model()
    plain = greedy(stock, inputs, NEW)
    # Row 0 ends before the switch, row 1 never.
    end = next(int(t) for t in plain[0, :6] if t not in plain[1])
    arguments = {**inputs, "max_new_tokens": NEW, "do_sample": False, "eos_token_id": end}
    expected = stock.generate(**arguments, pad_token_id=0)
    patched = omlx_cache.patch(longrope_model(), cache_bits=16)
    assert torch.equal(patched.generate(**arguments, pad_token_id=0), expected)


def test_unpatch_restores_and_the_signature_stays():
    model = longrope_model()
    stock = list(inspect.signature(model.prepare_inputs_for_generation).parameters)
    omlx_cache.patch(model)
    assert PREPARE in vars(model)
    assert list(inspect.signature(model.prepare_inputs_for_generation).parameters) == stock
    omlx_cache.unpatch(model)
    assert PREPARE not in vars(model)


def test_models_of_one_frequency_are_left_alone():
    assert PREPARE not in vars(omlx_cache.patch(tiny_model("phi3")))
    assert PREPARE not in vars(omlx_cache.patch(tiny_model("llama")))
