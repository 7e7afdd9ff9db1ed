"""Caches that the tests fill themselves, step by step."""

from __future__ import annotations

import torch
from tiny import random_ids
from transformers import PreTrainedModel

import omlx_cache
from omlx_cache.compat import cache_name

SMALL = {"block_size": 64, "prefill_chunk": 64, "recent_tokens": 0}
"""A configuration with which a short text has many blocks."""


def step(
    model: PreTrainedModel, cache: omlx_cache.PagedCache, ids: torch.Tensor, **kwargs
) -> torch.Tensor:
    """Run ids through the model on a cache; return the logits."""
    with torch.no_grad():
        return model(ids, **{cache_name(type(model).forward): cache}, **kwargs).logits


def filled(
    model: PreTrainedModel, length: int = 300, batch: int = 1, **kwargs
) -> omlx_cache.PagedCache:
    """Return a cache that has seen random ids."""
    cache = omlx_cache.PagedCache(model)
    step(model, cache, random_ids(batch, length), **kwargs)
    return cache
