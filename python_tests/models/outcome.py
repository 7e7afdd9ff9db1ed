"""What a way of generating text produced, and the prompts and caches that the ways begin with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from tiny import left_padded, random_ids
from transformers import DynamicCache, PreTrainedModel

import omlx_cache
from omlx_cache.compat import cache_name
from omlx_cache.patch_state import find_state

PROMPT, NEW = 150, 5
LENGTHS = [150, 75]


@dataclass
class Outcome:
    """What a mode produced.

    Attributes:
        sequences: [rows, PROMPT + new] ids.
        logits: [rows, new, vocabulary].
        mask: [rows, PROMPT + new], 0 where a prompt was padded.
    """

    sequences: torch.Tensor
    logits: torch.Tensor
    mask: torch.Tensor


def batch() -> dict[str, torch.Tensor]:
    """Two prompts of unequal lengths, padded on the left."""
    return left_padded(random_ids(2, PROMPT), LENGTHS)


def single() -> dict[str, torch.Tensor]:
    """One prompt, which repeats itself so that a look-up finds something."""
    ids = random_ids(1, PROMPT)
    ids[:, PROMPT // 2 :] = ids[:, : PROMPT // 2]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def generate(model: PreTrainedModel, inputs: dict, prompt: int = PROMPT, **options) -> Outcome:
    """Call ``generate``, and find the logits of each sequence's tokens, also those of beams."""
    common = {"do_sample": False, "pad_token_id": 0, "min_new_tokens": NEW}
    output = model.generate(
        **{"max_new_tokens": NEW} | common | inputs | options,
        return_dict_in_generate=True,
        output_logits=True,
    )
    sequences = output["sequences"]
    new = sequences.shape[1] - prompt
    logits = torch.stack([step.float() for step in output["logits"]], 1)  # [rows or beams, new, _]
    beams = getattr(output, "beam_indices", None)
    if beams is not None:
        logits = logits[beams[:, :new], torch.arange(new)]
    mask = inputs["attention_mask"]
    mask = mask.repeat_interleave(sequences.shape[0] // mask.shape[0], 0)
    mask = torch.cat([mask[:, :prompt], mask.new_ones(len(mask), new)], 1)
    return Outcome(sequences, logits, mask)


def with_options(prompts: Callable[[], dict] = batch, **options) -> Callable:
    """Return a mode that is ``generate`` with options."""
    return lambda model: generate(model, prompts(), **options)


def greedy_single(model: PreTrainedModel) -> Outcome:
    """Greedy text of one prompt: what decoding with a draft must give, too."""
    return generate(model, single())


def new_cache(model: PreTrainedModel):
    """Return an empty cache of the kind that the model takes."""
    if find_state(model) is None:
        return DynamicCache(config=model.config)
    return omlx_cache.PagedCache(model)


def with_cache(model: PreTrainedModel, cache) -> dict:
    """Return the argument that hands ``cache`` to the model."""
    return {cache_name(type(model).forward): cache}
