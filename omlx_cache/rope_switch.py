"""Keep a model's cache where its rotary embedding changes over to the factors for long texts.

Phi-3 with longrope has two sets of frequencies. When a text grows past
``original_max_position_embeddings``, every key must be rotated anew, and its
``prepare_inputs_for_generation`` says so by dropping the cache: the whole text is read again into
a cache that the model makes. The caller's would stay behind, short and outdated, with all its
memory, and without what the call had asked of it (to record what a draft may take back, to release
rows that end). Here the same cache is emptied and read into.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from omlx_cache.cache import PagedCache
from omlx_cache.compat import CACHE_NAMES, PreTrainedModel, cache_name
from omlx_cache.patch_state import state_of
from omlx_cache.rotary import follows_length

PREPARE = "prepare_inputs_for_generation"
_NEW_TOKENS = "next_sequence_length"


def may_switch(model: PreTrainedModel, decoder: nn.Module) -> bool:
    """Whether a model may drop its cache while it generates."""
    has_own = not getattr(type(model), PREPARE).__module__.startswith("transformers.generation")
    return has_own and follows_length(getattr(decoder, "rotary_emb", None))


def preparing(model: PreTrainedModel) -> Callable:
    """Return what stands in for a model's ``prepare_inputs_for_generation``.

    Its signature is the original's, which transformers reads to know the arguments of a model.
    """

    @functools.wraps(getattr(type(model), PREPARE))
    def prepare(self: PreTrainedModel, *args: Any, **kwargs: Any) -> dict[str, Any]:
        original = state_of(self).original(self, PREPARE)
        inputs = original(*args, **kwargs)
        given = (x for x in (*args, *kwargs.values()) if isinstance(x, PagedCache))
        cache = next(given, None)
        if cache is not None and all(inputs.get(name) is None for name in CACHE_NAMES):
            if kwargs.get(_NEW_TOKENS) is not None:
                # Before 5.24 the model drops its cache, and reads the newest tokens alone after it.
                inputs = original(*args, **{**kwargs, _NEW_TOKENS: None})
            cache.reset()
            inputs[cache_name(type(self).forward)] = cache
        return inputs

    return prepare
