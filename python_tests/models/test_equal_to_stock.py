"""A patched model without quantization is the stock model, token by token."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny import FAMILIES, greedy, left_padded, random_ids, tiny_model

import omlx_cache
from omlx_cache.compat import cache_name

EXACT = {"cache_bits": 16, "block_size": 64, "prefill_chunk": 48}


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_and_logits(family):
    model = tiny_model(family)
    inputs = {"input_ids": random_ids(1, 230)}
    text = greedy(model, inputs, 40)
    with torch.no_grad():
        logits = model(**inputs).logits
        double = copy.deepcopy(model).double()
        double.config._experts_implementation = "eager"  # torch's grouped matmul has no float64
        exact = double(**inputs).logits
    omlx_cache.patch(model, **EXACT)
    assert torch.equal(greedy(model, inputs, 40), text)
    with torch.no_grad():
        error = (model(**inputs).logits - exact).abs().max()
    # Keys with a large bias cost the stock model digits too.
    allowed = 2 * (logits - exact).abs().max() + torch.finfo(torch.float32).eps * exact.abs().max()
    assert error <= allowed


@pytest.mark.parametrize("family", FAMILIES)
def test_batch_with_unequal_left_padding(family):
    model = tiny_model(family)
    inputs = left_padded(random_ids(3, 200), [200, 73, 1])
    text = greedy(model, inputs, 30)
    omlx_cache.patch(model, **EXACT)
    assert torch.equal(greedy(model, inputs, 30), text)


@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen2-mixed-window"])
def test_every_residue_of_the_prompt_length(family):
    model = tiny_model(family)
    lengths = [1, 63, 64, 65, 67, 68, 69, 127, 128, 129, *range(130, 194)]
    prompts = [{"input_ids": random_ids(1, n, seed=n)} for n in lengths]
    texts = [greedy(model, prompt, 6) for prompt in prompts]
    omlx_cache.patch(model, **EXACT)
    for prompt, text in zip(prompts, texts, strict=True):
        length = prompt["input_ids"].shape[1]
        assert torch.equal(greedy(model, prompt, 6), text), f"prompt of {length} tokens"


def turns_of(model, cache, batch: torch.Tensor, turns: int = 4) -> list[torch.Tensor]:
    """Chat on one cache: each turn adds 50 prompt tokens to everything said before."""
    history, said = batch[:, :0], []
    name = cache_name(type(model).forward)
    for turn in range(turns):
        history = torch.cat([history, batch[:, turn * 50 : (turn + 1) * 50]], 1)
        inputs = {"input_ids": history, "attention_mask": torch.ones_like(history)}
        answer = greedy(model, inputs, 10, **{name: cache})
        history = torch.cat([history, answer], 1)
        said.append(answer)
    return said


@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_chat_turns_on_one_cache(family):
    from transformers import DynamicCache

    model = tiny_model(family)
    batch = random_ids(2, 200)
    want = turns_of(model, DynamicCache(config=model.config), batch)
    omlx_cache.patch(model, **EXACT)
    got = turns_of(model, omlx_cache.PagedCache(model), batch)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_new_ids_alone_with_the_full_mask():
    model = tiny_model()
    ids = random_ids(1, 120)
    want = greedy(model, {"input_ids": ids}, 8)
    omlx_cache.patch(model, **EXACT)
    cache = omlx_cache.PagedCache(model)
    name = cache_name(type(model).forward)
    with torch.no_grad():
        model(input_ids=ids[:, :80], **{name: cache})
    inputs = {"input_ids": ids[:, 80:], "attention_mask": torch.ones_like(ids)}
    assert torch.equal(greedy(model, inputs, 8, **{name: cache}), want)


def test_new_ids_alone_without_the_mask_are_refused():
    model = omlx_cache.patch(tiny_model(), **EXACT)
    cache = omlx_cache.PagedCache(model)
    name = cache_name(type(model).forward)
    greedy(model, {"input_ids": random_ids(1, 80)}, 4, **{name: cache})
    with pytest.raises(ValueError, match=r"whole chat so far \(83 cached tokens"):
        greedy(model, {"input_ids": random_ids(1, 20)}, 4, **{name: cache})


def test_sampling_draws_the_same_tokens():
    model = tiny_model()
    inputs = {"input_ids": random_ids(2, 90)}
    texts = []
    for _ in range(2):
        torch.manual_seed(7)
        texts.append(model.generate(**inputs, max_new_tokens=20, do_sample=True, top_k=20))
        omlx_cache.patch(model, **EXACT)
    assert torch.equal(*texts)


def test_streaming_delivers_the_same_tokens():
    from transformers.generation import BaseStreamer

    class Recorder(BaseStreamer):
        def __init__(self):
            self.tokens = []

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            self.tokens.append(None)

    model = tiny_model()
    inputs = {"input_ids": random_ids(1, 70)}
    want = greedy(model, inputs, 10)
    omlx_cache.patch(model, **EXACT)
    recorder = Recorder()
    greedy(model, inputs, 10, streamer=recorder)
    assert recorder.tokens == [*inputs["input_ids"][0].tolist(), *want[0].tolist(), None]


MODES = {
    "beams": {"num_beams": 3},
    "beams, sampled": {"num_beams": 3, "do_sample": True},
    "several answers": {"num_return_sequences": 3, "do_sample": True},
    "prefill in chunks": {"prefill_chunk_size": 32},
    "rows end at different times": {"eos_token_id": [5, 7, 9, 11, 13, 50, 60, 70, 80, 90]},
    "without a cache": {"use_cache": False},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_generation_modes_choose_the_same_text(family, mode):
    model = tiny_model(family)
    options = {"do_sample": False, "max_new_tokens": 25, "pad_token_id": 0} | MODES[mode]
    inputs = left_padded(random_ids(2, 120), [120, 50])
    texts = []
    for _ in range(2):
        torch.manual_seed(3)
        texts.append(model.generate(**inputs, **options))
        omlx_cache.patch(model, **EXACT)
    assert torch.equal(*texts)


@pytest.mark.parametrize(
    ("family", "patched_draft"), [("llama", False), ("llama", True), ("mistral-window", True)]
)
def test_assisted_decoding(family, patched_draft):
    """Drafted tokens are taken back, also past the window; the text is the one without a draft.

    A stock draft with a window can't take tokens back before transformers 5.24.
    """
    model, draft = tiny_model(family), tiny_model(family, seed=1, num_hidden_layers=1)
    inputs = {"input_ids": random_ids(1, 150)}
    want = greedy(model, inputs, 25)
    omlx_cache.patch(model, **EXACT)
    if patched_draft:
        omlx_cache.patch(draft, **EXACT)
    for mode in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": draft}):
        assert torch.equal(greedy(model, inputs, 25, **mode), want)


def test_hidden_states_are_joined_over_the_chunks():
    model = tiny_model()
    ids = random_ids(1, 130)
    with torch.no_grad():
        want = model(ids, output_hidden_states=True).hidden_states
        omlx_cache.patch(model, **EXACT)
        got = model(ids, output_hidden_states=True).hidden_states
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_without_a_cache_nothing_is_kept_or_rounded():
    model = tiny_model()
    ids = random_ids(1, 300)
    with torch.no_grad():
        want = model(ids, use_cache=False)
        omlx_cache.patch(model, cache_bits=8, block_size=64, prefill_chunk=64, recent_tokens=0)
        got = model(ids, use_cache=False)
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-4)
    assert getattr(got, cache_name(type(model).forward)) is None


def test_embeddings_instead_of_ids():
    model = tiny_model()
    embeds = model.get_input_embeddings()(random_ids(1, 100)).detach()
    want = model.generate(inputs_embeds=embeds, max_new_tokens=10, do_sample=False)
    omlx_cache.patch(model, **EXACT)
    assert torch.equal(
        model.generate(inputs_embeds=embeds, max_new_tokens=10, do_sample=False), want
    )


def test_right_padding_and_holes_are_not_stored():
    model = omlx_cache.patch(tiny_model(), **EXACT)
    ids = random_ids(1, 60)
    mask = torch.ones_like(ids)
    mask[:, 20:50] = 0
    kept = mask[0].bool()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        got = model(ids, attention_mask=mask, position_ids=positions).logits[:, kept]
        want = model(ids[:, kept]).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert omlx_cache.report(model).cached_tokens == 30
