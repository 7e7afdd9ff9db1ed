"""Which calls of ``generate`` may begin with the blocks of an earlier one.

A block may be reused where token ids say everything about its keys and values, and where
transformers knows how to go on behind columns that are cached. That is most calls; any other runs
as if there were no prefix store.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from omlx_cache.cache import PagedCache
from omlx_cache.compat import CACHE_NAMES, GenerationConfig, PreTrainedModel, StoppingCriteria
from omlx_cache.rotary import follows_length

_OTHER_WAYS = (
    "assistant_model",
    "assistant_early_exit",
    "prompt_lookup_num_tokens",
    "use_mtp",
    "is_assistant",
    "penalty_alpha",
    "dola_layers",
    "custom_generate",
    "constraints",
    "force_words_ids",
    "prefill_chunk_size",  # transformers 5.17 reads all chunks again behind what is cached
)
"""Settings with which ``generate`` goes over the prompt in another way."""


def check_reusable(model: PreTrainedModel) -> None:
    """Check that the blocks of a model's texts depend on nothing but the ids.

    Raises:
        NotImplementedError: with the reason, when they may not.
    """
    reason = None
    if model.config.get_text_config(decoder=True) is not model.config:
        reason = "its prompts may hold images or sound, which token ids don't tell apart"
    if follows_length(getattr(model.get_decoder(), "rotary_emb", None)):
        reason = "its rotary frequencies follow the length of the text"
    if reason is not None:
        raise NotImplementedError(
            f"omlx_cache.patch: prefix_cache can't be used with {type(model).__name__}: {reason}; "
            f"delete the key"
        )


class Settings:
    """What a call of ``generate`` was asked for, wherever it was said.

    Args:
        model: the model.
        config: the `GenerationConfig` that was passed, or None.
        kwargs: the keyword arguments.
    """

    def __init__(self, model: PreTrainedModel, config: Any, kwargs: Mapping[str, Any]) -> None:
        self._places = [c for c in (config, model.generation_config) if c is not None]
        self._kwargs = kwargs
        self._known = set(inspect.signature(type(model).generate).parameters)

    def get(self, name: str) -> Any:
        """Return the value that holds: of the call, else of its configuration or the model's."""
        if self._kwargs.get(name) is not None:
            return self._kwargs[name]
        values = (getattr(place, name, None) for place in self._places)
        return next((value for value in values if value is not None), None)

    def end_ids(self) -> list[int]:
        """Return the ids that end a row."""
        ids = self.get("eos_token_id")
        if ids is None:
            return []
        return torch.as_tensor(ids).flatten().tolist()

    def only_ids(self) -> bool:
        """Whether the model is given token ids and their mask, and nothing else."""
        known = {"input_ids", "attention_mask", *CACHE_NAMES, *self._known}
        given = {name for name, value in self._kwargs.items() if value is not None}
        return given <= known | set(GenerationConfig().to_dict())

    def is_plain(self) -> bool:
        """Whether the prompt is read in one go: greedy search, sampling and beams."""
        return not any(self.get(name) for name in _OTHER_WAYS)


def begin_with_known(cache: PagedCache, ids: Any, settings: Settings) -> None:
    """Let a new cache begin with what is known of its prompts, where that is right.

    Args:
        cache: empty, for this call alone.
        ids: the prompts, [rows, columns]; or whatever the caller passed.
        settings: of the call.
    """
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.is_floating_point():
        return
    if not ids.numel() or not settings.only_ids() or not settings.is_plain():
        return
    valid = _real_columns(ids, settings)
    if valid is not None:
        cache.record(ids, valid)


def _real_columns(ids: torch.Tensor, settings: Settings) -> np.ndarray | None:
    """Return which columns are real tokens; None where transformers would have to guess."""
    mask, padding = settings.get("attention_mask"), settings.get("pad_token_id")
    if mask is None:
        guesses = padding is not None and bool(torch.isin(ids, torch.as_tensor(padding)).any())
        return None if guesses else np.ones(tuple(ids.shape), bool)
    if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape:
        return None
    return mask.detach().cpu().numpy() != 0


class FreeEndedRows(StoppingCriteria):
    """Tell a cache which rows of a batch have ended; stops nothing itself.

    ``generate`` goes on with padding for a row that has produced its end token, until all rows
    have: without this, the padding would be cached as if it were text. What the last rows to end
    hold stays: nothing follows, and it is what a report of the call tells of.
    """

    def __init__(self, cache: PagedCache, end_ids: list[int]) -> None:
        self._cache, self._end_ids = cache, torch.tensor(end_ids)
        self._ended: set[int] = set()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Look at the newest token of each row, [rows, columns]."""
        ends = torch.isin(input_ids[:, -1].cpu(), self._end_ids).nonzero().flatten().tolist()
        new = [row for row in ends if row not in self._ended]
        self._ended.update(new)
        if new and len(self._ended) < len(input_ids):
            self._cache.end_rows(new)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
