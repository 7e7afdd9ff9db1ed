"""A step of a patched model inside `torch.compile`: the cache as three opaque ops.

Planning a step is work for the host: it counts blocks, fills tables, and its sizes change from step
to step. So a traced model holds no table and no block, only::

    begin_step(cache)  ->  attend(cache, layer 0)  ->  ...  ->  end_step(cache)

whose inputs and outputs have the shapes of the step's columns. One graph therefore serves every
length and every cache, without a graph break. Each op declares that it writes the cache's *handle*,
a tensor of one number that leads to the `PagedCache`: this is what keeps them in their order.
They can't be part of a CUDA graph, and say so (`torch.Tag.cudagraph_unsafe`): the compiler then
captures what lies between them.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch

if TYPE_CHECKING:
    from omlx_cache.cache import PagedCache

_caches: WeakValueDictionary[int, PagedCache] = WeakValueDictionary()
_numbers = count()
_TAGS = (torch.Tag.cudagraph_unsafe,)


def new_handle(cache: PagedCache) -> torch.Tensor:
    """Return the handle of a new cache, [1] int64 on the CPU; the cache isn't kept alive by it."""
    number = next(_numbers)
    _caches[number] = cache
    return torch.tensor([number])


def _cache_of(handle: torch.Tensor) -> PagedCache:
    return _caches[int(handle)]


@torch.library.custom_op("omlx_cache::begin_step", mutates_args=("handle",), tags=_TAGS)
def begin_step(
    handle: torch.Tensor, inputs: torch.Tensor, attention_mask: torch.Tensor | None
) -> torch.Tensor:
    """Plan a step over the columns of ``inputs`` and begin it.

    Args:
        handle: of the cache.
        inputs: [batch, columns, ...] token ids or embeddings.
        attention_mask: None, or as `CacheSteps.valid_columns` takes it.

    Returns:
        [1, columns] int64, the column of each input counted over the whole cache.
    """
    cache = _cache_of(handle)
    batch, columns = inputs.shape[:2]
    past = cache.get_seq_length()
    valid = cache.steps.valid_columns(attention_mask, batch, columns)
    cache.steps.require(valid, max(columns, 1))
    cache.steps.begin(valid, inputs if inputs.dim() == 2 else None, traced=True)
    return torch.arange(past, past + columns, device=inputs.device)[None]


@begin_step.register_fake
def _(
    handle: torch.Tensor, inputs: torch.Tensor, attention_mask: torch.Tensor | None
) -> torch.Tensor:
    return inputs.new_empty((1, inputs.shape[1]), dtype=torch.int64)


@torch.library.custom_op("omlx_cache::attend", mutates_args=("handle",), tags=_TAGS)
def attend(
    handle: torch.Tensor,
    layer_idx: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sm_scale: float,
    softcap: float | None,
    sink_logits: torch.Tensor | None,
) -> torch.Tensor:
    """Store the new keys and values of a layer and attend; see `PagedLayer.attend`."""
    layer = _cache_of(handle).layers[layer_idx]
    return layer.attend(query, key, value, sm_scale, softcap=softcap, sink_logits=sink_logits)


@attend.register_fake
def _(
    handle: torch.Tensor, layer_idx: int, query: torch.Tensor, key: torch.Tensor, *args: object
) -> torch.Tensor:
    batch, heads, columns, dim = query.shape
    return query.new_empty((batch, columns, heads, dim))


@torch.library.custom_op("omlx_cache::end_step", mutates_args=("handle",), tags=_TAGS)
def end_step(handle: torch.Tensor) -> None:
    """Make what the step stored part of the cache."""
    cache = _cache_of(handle)
    cache.steps.end()
    cache.steps.prune()
