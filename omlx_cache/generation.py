"""``generate`` of a patched model: it builds the paged cache, where no other one is asked for."""

from __future__ import annotations

import inspect
from typing import Any, NoReturn

import torch

from omlx_cache.cache import PagedCache
from omlx_cache.compat import CACHE_NAMES, PreTrainedModel, StoppingCriteriaList, cache_name
from omlx_cache.patch_state import state_of
from omlx_cache.reuse import FreeEndedRows, Settings, begin_with_known
from omlx_cache.stock_calls import asks_for_stock_cache


def run_generate(
    model: PreTrainedModel,
    inputs: Any,
    generation_config: Any,
    args: tuple,
    kwargs: dict,
) -> Any:
    """Call the model's own ``generate`` with a `PagedCache`, or on the stock attention.

    Args:
        model: the patched model.
        inputs, generation_config, args, kwargs: what the caller passed.

    Raises:
        TypeError: for a cache that is none.
        NotImplementedError: for continuous batching.
        ValueError: for new ids alone without the mask of the chat.
    """
    state = state_of(model)
    kwargs |= dict(zip(_positional(model), args, strict=False))
    settings = Settings(model, generation_config, kwargs)
    wanted = settings.get("cache_implementation")
    if wanted == "paged":
        refuse_continuous_batching()
    given = {name: kwargs.get(name) for name in CACHE_NAMES}
    why = asks_for_stock_cache(wanted, given.values())
    if why is not None:
        with state.switch.stock(why):
            return state.original(model, "generate")(inputs, generation_config, **kwargs)
    if wanted is not None:  # the default by another name, which transformers takes without a cache
        kwargs["cache_implementation"] = None
    for name in CACHE_NAMES:
        kwargs.pop(name, None)
    cache = next((c for c in given.values() if c is not None), None)
    ids = inputs if inputs is not None else kwargs.get("input_ids")
    is_own = cache is None and settings.get("use_cache") is not False
    if is_own:
        cache = PagedCache.for_patch(state)
        if settings.get("is_assistant"):  # drafts tokens that may be taken back
            cache.activate_past_recording()
        begin_with_known(cache, ids, settings)
        _free_rows_that_end(cache, settings, kwargs)
    if cache is not None:
        if not isinstance(cache, PagedCache):
            raise TypeError(
                f"omlx_cache: the cache of a patched model must be a PagedCache, got "
                f"{type(cache).__name__}; pass omlx_cache.PagedCache(model), or no cache at all"
            )
        _check_reuse(cache, ids, kwargs)
        kwargs[cache_name(type(model).forward)] = cache
    try:
        original = state.original(model, "generate")
        return original(inputs, generation_config, **kwargs)
    finally:
        if cache is not None:
            cache.steps.drop_dead_step()
            if is_own:
                cache.keep()
            state.used(cache, snapshot=True)


def refuse_continuous_batching() -> NoReturn:
    """Refuse what brings its own scheduler.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        "omlx_cache: continuous batching (generate_batch) can't be served, it brings a cache and "
        "an attention of its own; call model.generate with a padded batch, or "
        "omlx_cache.unpatch(model) first"
    )


def _positional(model: PreTrainedModel) -> list[str]:
    """Return the names of the arguments of ``generate`` behind its generation configuration."""
    return list(inspect.signature(type(model).generate).parameters)[3:]


def _free_rows_that_end(cache: PagedCache, settings: Settings, kwargs: dict) -> None:
    """Let rows that end early free their blocks, in a cache that nobody sees afterwards.

    In the cache of a caller the next turn's mask says what was padding. The rows of beams move.
    """
    is_plain = settings.is_plain() and (settings.get("num_beams") or 1) == 1
    if is_plain and settings.end_ids() and not settings.get("return_dict_in_generate"):
        others = kwargs.get("stopping_criteria") or []
        criterion = FreeEndedRows(cache, settings.end_ids())
        kwargs["stopping_criteria"] = StoppingCriteriaList([*others, criterion])


def _check_reuse(cache: PagedCache, ids: torch.Tensor | None, kwargs: dict) -> None:
    """Refuse ids that transformers would slice wrongly: new ones alone, without the full mask."""
    past = cache.get_seq_length()
    mask = kwargs.get("attention_mask")
    if not past or ids is None or (mask is not None and mask.shape[1] > ids.shape[1]):
        return
    if ids.shape[1] <= past:
        raise ValueError(
            f"omlx_cache: input_ids must hold the whole chat so far ({past} cached tokens and at "
            f"least one new one), got {ids.shape[1]}; or pass the new ids with an attention_mask "
            f"over all {past} + {ids.shape[1]} tokens"
        )
