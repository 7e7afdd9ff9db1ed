"""Read with what others built for Hugging Face models, as their own documentation says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from peers_transformers import StockReader, StockSession
from transformers import DynamicCache

from omlx_cache.tools.loading import load_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from peers_contenders import Source


class PressedSession(StockSession):
    """A session of kvpress: what is read first is the prompt, and is compressed; the rest isn't."""

    def __init__(self, model, cache, press) -> None:
        super().__init__(model, cache, counts=True)
        self.press = press

    def feed(self, ids: Sequence[int], kept: int) -> torch.Tensor:
        """Read ids; return float32 logits [kept, vocabulary] after the last ``kept`` of them."""
        if self.seen:
            return super().feed(ids, kept)
        with self.press(self.model):
            return super().feed(ids, kept)


class PressedReader(StockReader):
    """A model that a press of kvpress works on."""

    def __init__(self, model, press) -> None:
        super().__init__(model, DynamicCache)
        self.press = press

    def start(self, max_tokens: int) -> PressedSession:
        """Return a session with an empty cache."""
        return PressedSession(self.model, self.make(), self.press)


def open_kvpress(source: Source, dtype: torch.dtype) -> PressedReader:
    """Return a reader that keeps half of the prompt's tokens, chosen as in SnapKV."""
    from kvpress import SnapKVPress

    return PressedReader(load_model(source.checkpoint, dtype=dtype), SnapKVPress(0.5))


def open_fused_turboquant(source: Source, dtype: torch.dtype) -> StockReader:
    """Return a reader whose keys and values are 4-bit codes; its attention is a Triton kernel."""
    from fused_turboquant.hf import patch_model

    model = load_model(source.checkpoint, dtype=dtype)
    return StockReader(model, lambda: patch_model(model, bits=4))


def open_turboquant_kv(source: Source, dtype: torch.dtype) -> StockReader:
    """Return a reader whose keys and values are 4-bit codes, decoded in whole at every step."""
    from turboquant import TurboQuantModel

    model = load_model(source.checkpoint, dtype=dtype)
    wrapped = TurboQuantModel(model, bits=4, device=str(model.device), dtype=dtype)
    return StockReader(model, wrapped.make_dynamic_cache)
