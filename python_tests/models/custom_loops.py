"""Decoding loops that are not transformers' own: they drive the cache by hand.

Each is a ``custom_generate`` callable: ``model.generate(..., custom_generate=loop)`` prepares the
inputs and the cache, and calls it. transformers has moved such loops (contrastive search, diverse
beams) out of its own code, and they call `Cache` methods that nothing else calls.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from omlx_cache.compat import CACHE_NAMES, cache_name


class Loop:
    """A model, its cache, and the mask of what they have seen.

    Args:
        model: the model.
        input_ids: [rows, columns] prompt.
        kwargs: what ``generate`` has prepared: the cache, and the mask unless it hides nothing.
    """

    def __init__(self, model: PreTrainedModel, input_ids: torch.Tensor, kwargs: dict) -> None:
        self.model = model
        self.cache = next(kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None)
        mask = kwargs.get("attention_mask")
        self.mask = torch.ones_like(input_ids) if mask is None else mask

    def step(self, ids: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Feed ``ids`` [rows, n] as columns up to ``columns``; return logits and hidden states."""
        missing = columns - self.mask.shape[1]
        self.mask = torch.cat([self.mask, self.mask.new_ones(self.mask.shape[0], missing)], 1)
        positions = (self.mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        output = self.model(
            input_ids=ids,
            attention_mask=self.mask,
            position_ids=positions,
            output_hidden_states=True,
            **{cache_name(type(self.model).forward): self.cache},
        )
        return output.logits, output.hidden_states[-1]

    def repeat(self, times: int) -> None:
        """Repeat each row of the cache."""
        self.cache.batch_repeat_interleave(times)
        self.mask = self.mask.repeat_interleave(times, 0)

    def select(self, rows: torch.Tensor) -> None:
        """Keep the given rows of the cache."""
        self.cache.batch_select_indices(rows)
        self.mask = self.mask[rows]


def contrastive_search(model, input_ids, generation_config, **kwargs) -> dict:
    """Choose, of the likeliest tokens, one whose hidden state repeats the least."""
    loop, top_k, alpha = Loop(model, input_ids, kwargs), 4, 0.6
    rows, prompt = input_ids.shape
    logits, context = loop.step(input_ids, prompt)
    chosen = []
    for length in range(prompt + 1, generation_config.max_length + 1):
        chosen.append(logits[:, -1])
        probability, candidate = logits[:, -1].softmax(-1).topk(top_k)
        loop.repeat(top_k)
        logits, hidden = loop.step(candidate.view(-1, 1), length)
        seen = torch.nn.functional.normalize(context.repeat_interleave(top_k, 0), dim=-1)
        likeness = seen @ torch.nn.functional.normalize(hidden, dim=-1).mT
        likeness = likeness.masked_fill(loop.mask[:, :-1, None] == 0, -1).amax((1, 2))
        score = (1 - alpha) * probability - alpha * likeness.view(rows, top_k)
        best = score.argmax(-1)
        kept = best + torch.arange(rows) * top_k
        loop.select(kept)
        logits = logits[kept]
        context = torch.cat([context, hidden[kept]], 1)
        input_ids = torch.cat([input_ids, candidate.gather(1, best[:, None])], 1)
    return {"sequences": input_ids, "logits": chosen}


def diverse_beams(model, input_ids, generation_config, **kwargs) -> dict:
    """Search with two groups of two beams; a group pays for the tokens of the one before it."""
    groups, beams, penalty = 2, 2, 5.0
    loop, (rows, prompt) = Loop(model, input_ids, kwargs), input_ids.shape
    logits, _ = loop.step(input_ids, prompt)
    width = groups * beams
    loop.repeat(width)
    logits, ids = (x.repeat_interleave(width, 0) for x in (logits[:, -1:], input_ids))
    total = torch.zeros(rows, groups, beams)
    total[..., 1:] = -1e9  # the beams of a group start out alike
    past = ids.new_zeros((rows * width, 0)).float()[..., None].expand(-1, -1, logits.shape[-1])
    for length in range(prompt + 1, generation_config.max_length + 1):
        past = torch.cat([past, logits[:, -1:]], 1)
        scores = logits[:, -1].log_softmax(-1).view(rows, groups, beams, -1)
        taken = torch.zeros(rows, scores.shape[-1])
        parents, tokens = [], []
        for group in range(groups):
            total_g = total[:, group, :, None] + scores[:, group]
            best = (total_g - penalty * taken[:, None]).flatten(1).topk(beams).indices
            total[:, group] = total_g.flatten(1).gather(1, best)
            tokens.append(best % scores.shape[-1])
            parents.append(best // scores.shape[-1] + group * beams)
            taken.scatter_add_(1, tokens[-1], torch.ones_like(tokens[-1], dtype=taken.dtype))
        rows_of = torch.cat(parents, 1) + torch.arange(rows)[:, None] * width
        order = rows_of.flatten()
        ids = torch.cat([ids[order], torch.cat(tokens, 1).view(-1, 1)], 1)
        past = past[order]
        loop.cache.reorder_cache(order)
        if length < generation_config.max_length:
            logits, _ = loop.step(ids[:, -1:], length)
    return {"sequences": ids, "logits": list(past.unbind(1))}


def rewinding(model, input_ids, generation_config, **kwargs) -> dict:
    """Decode greedily, but write three tokens ahead and take them back before each one."""
    loop = Loop(model, input_ids, kwargs)
    loop.cache.activate_past_recording()
    logits, _ = loop.step(input_ids, input_ids.shape[1])
    chosen = []
    while input_ids.shape[1] < generation_config.max_length:
        columns = input_ids.shape[1]
        chosen.append(logits[:, -1])
        loop.step(input_ids[:, :3], columns + 3)
        loop.cache.crop(-3)
        loop.mask = loop.mask[:, :columns]
        input_ids = torch.cat([input_ids, logits[:, -1].argmax(-1)[:, None]], 1)
        logits, _ = loop.step(input_ids[:, -1:], columns + 1)
    return {"sequences": input_ids, "logits": chosen}
