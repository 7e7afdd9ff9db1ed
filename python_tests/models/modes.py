"""Every way of generating text that the tests try on every family, each with the logits it saw.

A mode runs a model and returns a `Outcome`: whole sequences, and the raw logits from which each of
their new tokens was chosen. That is enough to check it under any setting, for the same sequences
can be put through a model at once, without beams, drafts or crops.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from custom_loops import contrastive_search, diverse_beams, rewinding
from outcome import (
    NEW,
    PROMPT,
    Outcome,
    batch,
    generate,
    greedy_single,
    new_cache,
    single,
    with_cache,
    with_options,
)
from through_text import streamed, through_pipeline
from tiny import VOCABULARY, left_padded, random_ids, tiny_model
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

import omlx_cache
from omlx_cache.compat import CACHE_NAMES
from omlx_cache.patch_state import find_state


@dataclass(frozen=True)
class Mode:
    """A way of generating text.

    Attributes:
        run: from a model to an `Outcome`.
        stock: what the stock model runs instead, for text that must be equal.
        has_stock_text: whether the stock model can say the same; not with a patched draft, sampled.
        dtype: of the model; where it isn't float32, texts may part and only logits are compared.
    """

    run: Callable[[PreTrainedModel], Outcome]
    stock: Callable[[PreTrainedModel], Outcome] | None = None
    has_stock_text: bool = True
    dtype: torch.dtype = torch.float32


def draft_of(model: PreTrainedModel, family: str) -> PreTrainedModel:
    """Return a patched draft model that often, but not always, agrees with ``model``."""
    draft = tiny_model(family)
    generator = torch.Generator().manual_seed(1)
    for parameter in draft.parameters():
        parameter.data += torch.randn(parameter.shape, generator=generator) * 0.02
    return omlx_cache.patch(draft, find_state(model).config)


def draft_model(model: PreTrainedModel) -> Outcome:
    return generate(model, single(), assistant_model=draft_of(model, model.family))


def sampled_draft(model: PreTrainedModel) -> Outcome:
    draft = draft_of(model, model.family)
    return generate(model, single(), assistant_model=draft, do_sample=True, top_k=20)


class RowsStop(StoppingCriteria):
    """End row 0 after three tokens, and the others never."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs) -> torch.Tensor:
        done = torch.zeros(len(input_ids), dtype=torch.bool)
        done[0] = input_ids.shape[1] >= PROMPT + 3
        return done


def a_row_ends_early(model: PreTrainedModel) -> Outcome:
    stop = {"stopping_criteria": StoppingCriteriaList([RowsStop()])}
    outcome = generate(model, batch(), **stop, eos_token_id=2)  # without one nothing is padded
    assert (outcome.sequences[0, PROMPT + 3 :] == 0).all()
    assert (outcome.sequences[1, PROMPT + 3 :] != 0).any()
    return outcome


def embeddings(model: PreTrainedModel) -> Outcome:
    """Give embeddings in place of the prompt's ids."""
    given, embed = batch(), model.get_input_embeddings()
    embeds = {"inputs_embeds": embed(given["input_ids"]).detach()}
    mask = {"attention_mask": given["attention_mask"]}
    outcome = generate(model, embeds | mask, prompt=0)
    ids = torch.cat([given["input_ids"], outcome.sequences], 1)
    full = torch.cat([given["attention_mask"], torch.ones_like(outcome.sequences)], 1)
    return Outcome(ids, outcome.logits, full)


def cache_of_the_caller(model: PreTrainedModel) -> Outcome:
    cache = new_cache(model)
    outcome = generate(model, batch(), **with_cache(model, cache))
    assert cache.get_seq_length() == PROMPT + NEW - 1
    return outcome


def continued(model: PreTrainedModel) -> Outcome:
    """Go on from the cache that the first half returned."""
    first = model.generate(
        **batch(),
        max_new_tokens=2,
        min_new_tokens=2,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
    )
    cache = next(getattr(first, name) for name in CACHE_NAMES if getattr(first, name, None))
    mask = torch.nn.functional.pad(batch()["attention_mask"], (0, 2), value=1)
    inputs = {"input_ids": first.sequences, "attention_mask": mask}
    rest = {"max_new_tokens": NEW - 2, "min_new_tokens": NEW - 2}
    return generate(model, inputs, PROMPT + 2, **rest, **with_cache(model, cache))


def copied_prefix(model: PreTrainedModel) -> Outcome:
    """Prefill a system prompt once, and give each request a copy of its cache."""
    inputs, cache = single(), new_cache(model)
    with torch.no_grad():
        model(input_ids=inputs["input_ids"][:, :100], **with_cache(model, cache))
    outcomes = [
        generate(model, inputs, **with_cache(model, copy.deepcopy(cache))) for _ in range(2)
    ]
    assert torch.equal(outcomes[0].sequences, outcomes[1].sequences)
    assert cache.get_seq_length() == 100
    return outcomes[1]


def compiled(model: PreTrainedModel) -> Outcome:
    """Decode with a compiled forward, token by token."""
    torch._dynamo.reset()
    inputs, cache = batch(), new_cache(model)
    step = torch.compile(model.forward, backend="eager")
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    logits = []
    with torch.no_grad():
        run, part = model, ids
        for _ in range(NEW):
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -part.shape[1] :]
            output = run(
                input_ids=part,
                attention_mask=mask,
                position_ids=positions,
                **with_cache(model, cache),
            )
            logits.append(output.logits[:, -1])
            part, run = logits[-1].argmax(-1)[:, None], step
            ids, mask = torch.cat([ids, part], 1), torch.cat([mask, mask.new_ones(2, 1)], 1)
    torch._dynamo.reset()
    return Outcome(ids, torch.stack(logits, 1), mask)


def a_row_alone(model: PreTrainedModel) -> Outcome:
    """Eight prompts at once say what each says alone."""
    inputs = left_padded(random_ids(8, PROMPT), [150, 1, 75, 149, 64, 20, 128, 100])
    together = generate(model, inputs)
    for row in (1, 2):
        start = int((inputs["attention_mask"][row] == 0).sum())
        alone = {name: x[row : row + 1, start:] for name, x in inputs.items()}
        outcome = generate(model, alone, PROMPT - start)
        assert torch.equal(outcome.sequences[0], together.sequences[row, start:])
    return together


def a_row_of_padding(model: PreTrainedModel) -> Outcome:
    """A row without a token disturbs nobody; what it says itself means nothing."""
    inputs = batch()
    inputs["attention_mask"][1] = 0
    outcome = generate(model, inputs)
    assert outcome.logits.isfinite().all()
    return Outcome(outcome.sequences[:1], outcome.logits[:1], outcome.mask[:1])


def scores_and_states(model: PreTrainedModel) -> Outcome:
    """Ask for everything that can be returned; hidden states must be those of the logits."""
    inputs = batch()
    output = model.generate(
        **inputs,
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=False,
        pad_token_id=0,
        repetition_penalty=1.2,
        return_dict_in_generate=True,
        output_logits=True,
        output_scores=True,
        output_hidden_states=True,
    )
    assert [s.shape for s in output.scores] == [s.shape for s in output.logits]
    states = torch.stack([step[-1][:, -1] for step in output.hidden_states], 1)
    layers = model.config.get_text_config().num_hidden_layers
    assert {len(step) for step in output.hidden_states} == {layers + 1}
    assert [step[0].shape[1] for step in output.hidden_states] == [PROMPT] + [1] * (NEW - 1)
    logits = torch.stack(output.logits, 1)
    cap = getattr(model.config, "final_logit_softcapping", None)
    own = model.get_output_embeddings()(states)
    own = own if cap is None else cap * torch.tanh(own / cap)
    torch.testing.assert_close(own, logits, rtol=1e-4, atol=1e-4)
    full = torch.cat([inputs["attention_mask"], torch.ones(2, NEW, dtype=torch.long)], 1)
    return Outcome(output.sequences, logits, full)


def allowed_tokens(batch_id: int, ids: torch.Tensor) -> list[int]:
    """Allow even ids after odd ones, and odd ids after even ones."""
    return list(range(3 + int(ids[-1]) % 2, VOCABULARY, 2))


MODES: dict[str, Mode] = {
    "greedy": Mode(with_options()),
    "sampling": Mode(with_options(do_sample=True, top_k=20)),
    "`num_return_sequences=3`": Mode(with_options(do_sample=True, num_return_sequences=3)),
    "penalties": Mode(with_options(repetition_penalty=1.3, no_repeat_ngram_size=3)),
    "guidance (`guidance_scale`)": Mode(with_options(single, guidance_scale=1.5)),
    "beams": Mode(with_options(num_beams=3, num_return_sequences=2)),
    "beams, sampled": Mode(with_options(num_beams=3, do_sample=True, top_k=20)),
    "beams, constrained (`prefix_allowed_tokens_fn`)": Mode(
        with_options(num_beams=3, prefix_allowed_tokens_fn=allowed_tokens)
    ),
    "diverse beams (`custom_generate`)": Mode(with_options(custom_generate=diverse_beams)),
    "contrastive search (`custom_generate`)": Mode(
        with_options(custom_generate=contrastive_search)
    ),
    "rewinding by hand (`custom_generate`)": Mode(
        with_options(single, custom_generate=rewinding), greedy_single
    ),
    "prompt look-up": Mode(
        with_options(single, prompt_lookup_num_tokens=4, max_matching_ngram_size=1), greedy_single
    ),
    "draft model": Mode(draft_model, greedy_single),
    "draft model, sampled": Mode(sampled_draft, has_stock_text=False),
    "own first layers as draft (`assistant_early_exit`)": Mode(
        with_options(single, assistant_early_exit=1), greedy_single
    ),
    "`prefill_chunk_size`": Mode(with_options(prefill_chunk_size=32)),
    "streaming (`TextIteratorStreamer`)": Mode(streamed),
    "a row ends early (`StoppingCriteria`)": Mode(a_row_ends_early),
    '`pipeline("text-generation")`': Mode(through_pipeline),
    "`inputs_embeds`": Mode(embeddings),
    "cache of the caller": Mode(cache_of_the_caller),
    "continued from the returned cache": Mode(continued),
    "copied prefix (`copy.deepcopy`)": Mode(copied_prefix),
    "`use_cache=False`": Mode(with_options(use_cache=False)),
    "scores and hidden states": Mode(scores_and_states),
    "compiled forward": Mode(compiled, with_options()),
    "batch of 8 = each row alone": Mode(a_row_alone),
    "a row of padding only": Mode(a_row_of_padding),
    "bfloat16": Mode(with_options(), dtype=torch.bfloat16),
    "float16": Mode(with_options(), dtype=torch.float16),
}
"""Title, as the documentation shows it: the mode."""
