"""Read with a Hugging Face model: the stock one and a cache of its kind, or the patched one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import omlx_cache
from omlx_cache.compat import cache_name
from omlx_cache.tools.loading import load_model

if TYPE_CHECKING:
    from peers_contenders import Source


class StockSession:
    """A Hugging Face model filling a cache.

    Args:
        model: the model.
        cache: an empty cache.
        counts: whether to say each token's position, which a cache that dropped some has lost.
    """

    def __init__(self, model, cache, counts: bool = False) -> None:
        self.model, self.cache, self.counts = model, cache, counts
        self.seen = 0

    @torch.no_grad()
    def feed(self, ids: Sequence[int], kept: int) -> torch.Tensor:
        """Read ids; return float32 logits [kept, vocabulary] after the last ``kept`` of them."""
        device = next(self.model.parameters()).device
        kwargs = {cache_name(type(self.model).forward): self.cache, "logits_to_keep": kept}
        if self.counts:
            positions = torch.arange(self.seen, self.seen + len(ids), device=device)
            kwargs["position_ids"] = positions[None]
        self.seen += len(ids)
        return self.model(torch.tensor([ids], device=device), **kwargs).logits[0].float()

    def num_bytes(self) -> int:
        """Return the bytes of all tensors that the cache holds now."""
        if isinstance(self.cache, omlx_cache.PagedCache):
            return self.cache.report().total_bytes
        return tensor_bytes([vars(self.cache), *(vars(layer) for layer in self.cache.layers)])


class StockReader:
    """A model and a way to make an empty cache for it."""

    def __init__(self, model, make: Callable[[], object], counts: bool = False) -> None:
        self.model, self.make, self.counts = model, make, counts

    def start(self, max_tokens: int) -> StockSession:
        """Return a session with an empty cache; it grows as it has to."""
        return StockSession(self.model, self.make(), self.counts)


def open_stock(make: Callable, source: Source, dtype: torch.dtype) -> StockReader:
    """Return a reader of the stock model; ``make(config)`` gives its cache."""
    model = load_model(source.checkpoint, dtype=dtype)
    make(model.config)  # what is not installed says so now
    return StockReader(model, lambda: make(model.config))


def open_paged(setting: dict, source: Source, dtype: torch.dtype) -> StockReader:
    """Return a reader of the patched model."""
    model = omlx_cache.patch(load_model(source.checkpoint, dtype=dtype), **setting)
    return StockReader(model, lambda: omlx_cache.PagedCache(model))


def tensor_bytes(value) -> int:
    """Return the bytes of all storages below nested lists, tuples and dicts, each counted once.

    >>> x = torch.zeros(4)
    >>> tensor_bytes({"a": [x, x[:2]], "b": (torch.zeros(2, dtype=torch.int8),)})
    18
    """
    storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in _tensors(value))}
    return sum(storages.values())


def _tensors(value) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if is_traceable_wrapper_subclass(value):  # quanto's, whose parts hold the bytes
            for name in value.__tensor_flatten__()[0]:
                yield from _tensors(getattr(value, name))
        else:
            yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
