"""With ``prefix_cache`` a call begins with what earlier calls have left, and says the same."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from test_images import build
from tiny import WINDOWED, greedy, left_padded, random_ids, tiny_model
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

import omlx_cache
from omlx_cache.compat import cache_name
from omlx_cache.patch_state import state_of

SMALL = {"block_size": 64, "prefill_chunk": 64, "recent_tokens": 0, "prefix_cache": True}
EXACT = SMALL | {"cache_bits": 16, "window_size": None}


def inputs_of(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def counted(model) -> list[int]:
    """Return a list to which each forward pass adds the columns that it computes."""
    found: list[int] = []
    model.get_input_embeddings().register_forward_hook(
        lambda module, args, out: found.append(args[0].shape[1])
    )
    return found


def prompt_columns(counts: list[int], new_tokens: int) -> int:
    """Return the columns of a call's prompt, and empty the list."""
    columns = sum(counts) - (new_tokens - 1)  # the last token generated isn't computed
    counts.clear()
    return columns


def hold_chat(model, turns: int, message: int = 30, answer: int = 10, **kwargs) -> torch.Tensor:
    """Hold a chat of random messages; return all of its ids."""
    ids = torch.empty((1, 0), dtype=torch.long)
    for turn in range(turns):
        ids = torch.cat([ids, random_ids(1, message, seed=turn)], 1)
        ids = torch.cat([ids, greedy(model, inputs_of(ids), answer, **kwargs)], 1)
    return ids


def reused(model) -> int:
    return omlx_cache.report(model).reused_tokens


@pytest.mark.parametrize("family", ["llama", "qwen3", *WINDOWED])
def test_a_chat_in_16_bits_is_that_of_the_stock_model(family):
    model = tiny_model(family)
    expected = hold_chat(model, 6)
    omlx_cache.patch(model, **EXACT)
    assert torch.equal(hold_chat(model, 6), expected)
    assert reused(model) == 5 * 40 - 1


@pytest.mark.parametrize("config", [{}, {"cache_bits": 4}, {"window_size": 100}], ids=str)
def test_reuse_says_what_an_uninterrupted_chat_says(config):
    expected, model = tiny_model(), tiny_model()
    omlx_cache.patch(expected, **SMALL | config | {"prefix_cache": False})
    cache = omlx_cache.PagedCache(expected)
    text = hold_chat(expected, 8, **{cache_name(type(expected).forward): cache})
    omlx_cache.patch(model, **SMALL | config)
    assert torch.equal(hold_chat(model, 8), text)
    assert reused(model) == 7 * 40 - 1


def test_turn_20_computes_as_many_columns_as_turn_2():
    model = omlx_cache.patch(tiny_model(), **SMALL)
    counts, per_turn = counted(model), []
    ids = torch.empty((1, 0), dtype=torch.long)
    for turn in range(20):
        ids = torch.cat([ids, random_ids(1, 30, seed=turn)], 1)
        ids = torch.cat([ids, greedy(model, inputs_of(ids), 10)], 1)
        per_turn.append(prompt_columns(counts, 10))
    assert per_turn == [30] + [31] * 19  # the message, and the last token of the answer before


@pytest.mark.parametrize("at", [0, 3, 70, 133, 250])
def test_an_edit_in_the_middle_reuses_what_precedes(at):
    model, stock = omlx_cache.patch(tiny_model(), **EXACT), tiny_model()
    ids = random_ids(1, 300)
    greedy(model, inputs_of(ids), 5)
    edited = ids.clone()
    edited[0, at] = 3 if ids[0, at] != 3 else 4
    counts = counted(model)
    assert torch.equal(greedy(model, inputs_of(edited), 5), greedy(stock, inputs_of(edited), 5))
    assert prompt_columns(counts, 5) == 300 - (at if at > 4 else 0)  # sinks are reused whole
    # What the edit left untouched is still there for the first text.
    assert torch.equal(greedy(model, inputs_of(ids), 5), greedy(stock, inputs_of(ids), 5))
    assert prompt_columns(counts, 5) == 1


def test_a_quantized_block_is_reused_whole_or_not_at_all():
    model = omlx_cache.patch(tiny_model(), **SMALL)
    ids = random_ids(1, 300)
    greedy(model, inputs_of(ids), 5)
    ids[0, 4 + 64 + 10] += 1
    greedy(model, inputs_of(ids), 5)
    assert reused(model) == 4 + 64


def test_rows_of_which_different_parts_are_known():
    model, stock = omlx_cache.patch(tiny_model(), **EXACT), tiny_model()
    ids = random_ids(3, 200)
    greedy(model, inputs_of(ids[:1, :150]), 5)
    greedy(model, inputs_of(ids[1:2, 50:120]), 5)
    batch = left_padded(ids, [200, 150, 180])
    assert torch.equal(greedy(model, batch, 8), greedy(stock, batch, 8))
    # Known of all rows: at most the padding. Row 2 is new.
    batch = left_padded(ids, [200, 150, 180])
    assert torch.equal(greedy(model, batch, 8), greedy(stock, batch, 8))
    assert reused(model) == 200 + 150 + 180 - 3


@pytest.mark.parametrize("mode", [{"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}])
def test_beams_begin_with_what_is_known(mode):
    model, stock = omlx_cache.patch(tiny_model(), **EXACT), tiny_model()
    ids = random_ids(2, 150)
    greedy(model, inputs_of(ids), 5)
    expected = stock.generate(**inputs_of(ids), max_new_tokens=12, do_sample=False, **mode)
    found = model.generate(**inputs_of(ids), max_new_tokens=12, do_sample=False, **mode)
    assert torch.equal(found, expected)
    assert reused(model) >= 2 * 149


def test_several_samples_of_a_known_prompt():
    model, stock = omlx_cache.patch(tiny_model(), **EXACT), tiny_model()
    ids = random_ids(1, 150)
    greedy(model, inputs_of(ids), 5)
    texts = []
    for each in (stock, model):
        torch.manual_seed(7)
        mode = {"do_sample": True, "num_return_sequences": 4, "max_new_tokens": 12}
        texts.append(each.generate(**inputs_of(ids), **mode))
    assert torch.equal(*texts)
    assert reused(model) == 149


def test_embeddings_are_neither_kept_nor_reused():
    model, stock = omlx_cache.patch(tiny_model(), **EXACT), tiny_model()
    ids = random_ids(1, 150)
    embeds = model.get_input_embeddings()(random_ids(1, 150, seed=1)).detach()
    for _ in range(2):
        found = model.generate(inputs_embeds=embeds, max_new_tokens=5, do_sample=False)
        assert reused(model) == 0
    assert torch.equal(
        found, stock.generate(inputs_embeds=embeds, max_new_tokens=5, do_sample=False)
    )
    assert not list(state_of(model).store.tree)
    # Ids beside embeddings: the ids aren't what was read.
    greedy(model, inputs_of(ids), 5)
    with_both = {"input_ids": ids, "inputs_embeds": embeds, "max_new_tokens": 5}
    found = model.generate(**with_both, do_sample=False)
    assert torch.equal(found, stock.generate(**with_both, do_sample=False))
    assert reused(model) == 0


def test_models_that_read_images_are_refused():
    model = build(Qwen2VLForConditionalGeneration, Qwen2VLConfig)
    with pytest.raises(NotImplementedError, match="images or sound"):
        omlx_cache.patch(model, prefix_cache=True)


def test_other_positions_are_not_reused():
    model, stock = omlx_cache.patch(tiny_model(), **EXACT), tiny_model()
    ids = random_ids(1, 150)
    greedy(model, inputs_of(ids), 5)
    positions = torch.arange(150)[None] * 2
    kwargs = inputs_of(ids) | {"position_ids": positions}
    assert torch.equal(greedy(model, kwargs, 1), greedy(stock, kwargs, 1))
    assert reused(model) == 0


def test_changed_weights_begin_anew():
    model = omlx_cache.patch(tiny_model(), **EXACT)
    ids = random_ids(1, 150)
    greedy(model, inputs_of(ids), 5)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(-1)
    text = greedy(model, inputs_of(ids), 5)
    assert reused(model) == 0
    omlx_cache.unpatch(model)
    assert torch.equal(text, greedy(model, inputs_of(ids), 5))


def test_weights_that_are_packed_when_they_run_first_are_the_same():
    model = omlx_cache.patch(tiny_model(), **EXACT)
    linear = model.get_decoder().layers[0].mlp.up_proj

    def pack(module, args) -> None:  # as the kernels of GPTQ do
        if not hasattr(module, "is_packed"):
            module.weight = torch.nn.Parameter(module.weight.detach().clone())
            module.is_packed = True

    linear.register_forward_pre_hook(pack)
    ids = random_ids(1, 200)
    greedy(model, inputs_of(ids), 4)
    greedy(model, inputs_of(ids), 4)
    assert reused(model) >= 192


def test_the_bound_holds_and_the_least_recently_used_leave():
    model = omlx_cache.patch(tiny_model(), **EXACT | {"prefix_cache_blocks": 6})
    texts = [random_ids(1, 190, seed=i) for i in range(3)]  # three blocks each

    def columns_reused(i: int) -> int:
        greedy(model, inputs_of(texts[i]), 2)
        assert all(len(arena.kept_blocks) <= 6 for arena in state_of(model).store.arenas)
        return reused(model)

    assert [columns_reused(i) for i in (0, 1, 0)] == [0, 0, 189]
    assert [columns_reused(i) for i in (2, 0)] == [0, 189]
    assert columns_reused(1) == 0


def test_kept_blocks_make_room_for_a_step():
    model = omlx_cache.patch(tiny_model(), **EXACT | {"max_gpu_blocks": 5})
    stock = tiny_model()
    for seed in range(4):
        ids = random_ids(1, 290, seed=seed)  # five blocks
        assert torch.equal(greedy(model, inputs_of(ids), 5), greedy(stock, inputs_of(ids), 5))
    store = state_of(model).store
    assert all(arena.blocks.num_used <= 5 for arena in store.arenas)


def test_a_row_that_ends_early_frees_its_blocks():
    model, stock = tiny_model(), tiny_model()
    ids = random_ids(2, 150)
    first = greedy(stock, inputs_of(ids), 6)
    end = int(first[0, 2])
    if end in first[1]:
        pytest.fail("the second row must not end")
    for each in (model, stock):
        each.generation_config.eos_token_id = end
    omlx_cache.patch(model, **EXACT | {"prefix_cache": False})
    held = []
    kinds = {"max_new_tokens": 6, "do_sample": False}

    def look(input_ids, scores, **kwargs):
        cache = state_of(model).last_cache()
        held.append([len(row.blocks) for row in cache.groups[0].rows])
        return torch.zeros(len(input_ids), dtype=torch.bool)

    found = model.generate(**inputs_of(ids), stopping_criteria=[look], **kinds)
    assert torch.equal(found, stock.generate(**inputs_of(ids), **kinds))
    assert held[0] == [3, 3]
    assert held[-1] == [0, 3]


def test_the_report_of_an_answer_that_ended_tells_what_it_held():
    model = tiny_model()
    ids = random_ids(1, 150)
    model.generation_config.eos_token_id = int(greedy(model, inputs_of(ids), 3)[0, -1])
    omlx_cache.patch(model, **EXACT | {"prefix_cache": False})
    out = model.generate(**inputs_of(ids), max_new_tokens=9, do_sample=False)
    assert omlx_cache.report(model).seen_tokens == out.shape[1] - 1 <= 152


def test_nothing_is_left_when_caches_and_texts_are_gone():
    model = omlx_cache.patch(tiny_model(), **SMALL)
    hold_chat(model, 4)
    cache = omlx_cache.PagedCache(model)
    greedy(model, inputs_of(random_ids(1, 100)), 3, **{cache_name(type(model).forward): cache})
    copied = copy.deepcopy(cache)
    del cache
    store = state_of(model).store
    used = [arena.blocks.num_used for arena in store.arenas]
    del copied
    assert [arena.blocks.num_used for arena in store.arenas] < used
    omlx_cache.unpatch(model)
    assert [arena.blocks.num_used for arena in store.arenas] == [0]
    assert [arena.pages.num_used for arena in store.arenas] == [0]


def test_a_saved_cache_loads_beside_others(tmp_path):
    model = omlx_cache.patch(tiny_model(), **SMALL)
    name = cache_name(type(model).forward)
    cache, ids = omlx_cache.PagedCache(model), random_ids(1, 200)
    ids = torch.cat([ids, greedy(model, inputs_of(ids), 5, **{name: cache}), ids[:, :30]], 1)
    cache.save(tmp_path / "chat")
    kept = hold_chat(model, 3)
    loaded = omlx_cache.PagedCache.load(tmp_path / "chat", model)
    again = greedy(model, inputs_of(ids), 5, **{name: loaded})
    assert torch.equal(greedy(model, inputs_of(ids), 5, **{name: cache}), again)
    assert torch.equal(hold_chat(model, 3), kept)


def test_threads_take_turns():
    model, stock = omlx_cache.patch(tiny_model(), **EXACT), tiny_model()
    system = random_ids(1, 100)
    prompts = [torch.cat([system, random_ids(1, 60, seed=i)], 1) for i in range(1, 5)]
    expected = [greedy(stock, inputs_of(ids), 6) for ids in prompts]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda ids: greedy(model, inputs_of(ids), 6), prompts))
    assert all(map(torch.equal, found, expected))


def test_ids_of_32_bits_are_the_same_text():
    model, stock = omlx_cache.patch(tiny_model(), **EXACT), tiny_model()
    ids = random_ids(1, 150)
    greedy(model, inputs_of(ids), 5)
    short = ids.int()
    assert torch.equal(greedy(model, inputs_of(short), 5), greedy(stock, inputs_of(ids), 5).int())
    assert reused(model) == 149


def test_a_prompt_in_chunks_of_the_caller_is_read_whole():
    model, stock = omlx_cache.patch(tiny_model(), **EXACT), tiny_model()
    ids = random_ids(1, 150)
    for _ in range(2):
        found = greedy(model, inputs_of(ids), 5, prefill_chunk_size=40)
        assert torch.equal(found, greedy(stock, inputs_of(ids), 5))
        assert reused(model) == 0
    assert torch.equal(greedy(model, inputs_of(ids), 5), found)
