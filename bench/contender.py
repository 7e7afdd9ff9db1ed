"""One model with one kind of cache, which reads a text and then decodes on: what end-to-end times.

A contender patches its model only while it runs, so several of them may share one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

import omlx_cache
from omlx_cache.compat import cache_name


class Contender:
    """A model that has read ``ids`` and decodes on, always the likeliest token.

    Args:
        model: not patched.
        ids: [1, num_tokens] int64.
        setting: overrides of the configuration to patch with; None is the stock model.
        stock_cache: makes the stock model's cache; by default a `DynamicCache`.

    Attributes:
        first_token_s: seconds from the text to the first token.
        step_s: seconds of each token after it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        ids: torch.Tensor,
        setting: dict | None,
        stock_cache: Callable[[], Cache] | None = None,
    ) -> None:
        self.model, self.setting = model, setting
        self.step_s: list[float] = []
        with self._patch():
            if setting is not None:
                self.cache = omlx_cache.PagedCache(model)
            else:
                self.cache = stock_cache() if stock_cache else DynamicCache(config=model.config)
            start = time.perf_counter()
            self.token = self._forward(ids)
            self.first_token_s = time.perf_counter() - start

    def _patch(self) -> AbstractContextManager:
        """Return the context in which the model runs: patched, or as it is."""
        if self.setting is None:
            return nullcontext()
        return omlx_cache.patched(self.model, **self.setting)

    @torch.no_grad()
    def _forward(self, ids: torch.Tensor) -> torch.Tensor:
        kwargs = {cache_name(type(self.model).forward): self.cache, "logits_to_keep": 1}
        token = self.model(ids, **kwargs).logits[:, -1:].argmax(-1)
        if token.is_cuda:
            torch.cuda.synchronize()
        return token

    def decode(self, steps: int) -> None:
        """Decode some tokens and note what each took."""
        with self._patch():
            for _ in range(steps):
                start = time.perf_counter()
                self.token = self._forward(self.token)
                self.step_s.append(time.perf_counter() - start)

    def num_bytes(self) -> int:
        """Bytes that the cache's tensors hold."""
        if isinstance(self.cache, omlx_cache.PagedCache):
            return self.cache.report().total_bytes
        layers = [value for layer in self.cache.layers for value in vars(layer).values()]
        return sum(storage.nbytes() for storage in _storages(layers).values())


def _storages(value: object) -> dict[int, torch.UntypedStorage]:
    """Return the storages of all tensors in nested lists, tuples and dicts, by address."""
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        return {storage.data_ptr(): storage}
    if isinstance(value, dict):
        value = list(value.values())
    found = {}
    for item in value if isinstance(value, list | tuple) else ():
        found |= _storages(item)
    return found
