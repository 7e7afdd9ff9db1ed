"""The forward pass of a patched decoder: cache, padding and prefill chunks, around the original."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from omlx_cache import compiled
from omlx_cache.cache import PagedCache
from omlx_cache.compat import CACHE_NAMES, cache_name
from omlx_cache.patch_state import PatchState
from omlx_cache.stock_calls import asks_for_stock_forward

# Arguments of a decoder that run along the columns, and the dimension in which they do.
_COLUMN_ARGUMENTS = {
    "input_ids": 1,
    "inputs_embeds": 1,
    "position_ids": -1,
    "cache_position": 0,
    "token_type_ids": 1,
}


def run_decoder(state: PatchState, args: tuple, kwargs: dict) -> Any:
    """Run a decoder over any number of columns, at most ``prefill_chunk`` at a time.

    Args:
        state: the patch of the model.
        args, kwargs: what the caller passed to it.

    Returns:
        The decoder's output over all columns, as if it had run once.
    """
    decoder = state.spec.decoder
    original = state.original(decoder, "forward")
    kwargs = _by_name(decoder, args, kwargs)
    cache = next((kwargs[n] for n in CACHE_NAMES if kwargs.get(n) is not None), None)
    why = asks_for_stock_forward(cache, kwargs)
    if why is not None:
        with state.switch.stock(why):
            return original(**kwargs)
    with state.switch.paged():
        return _run_paged(state, original, kwargs)


def _run_paged(state: PatchState, original: Callable, kwargs: dict) -> Any:
    """Run a decoder with the cache that it is given, or a new one."""
    decoder = state.spec.decoder
    _refuse_training(decoder)
    return_dict = kwargs.pop("return_dict", None)
    wants_weights = _pop_output_attentions(decoder, kwargs)
    use_cache = kwargs.pop("use_cache", None)
    use_cache = getattr(decoder.config, "use_cache", True) if use_cache is None else use_cache
    cache = _pop_cache(kwargs)
    is_new = cache is None
    if is_new:
        cache = PagedCache.for_patch(state, unquantized=not use_cache)
    _check_cache(cache, state)
    if wants_weights and cache.config.cpu_offload:
        raise NotImplementedError(
            "omlx_cache: output_attentions can't be served with cpu_offload, where a part of the "
            "keys is elsewhere; patch(model, cpu_offload=False) to look at the weights"
        )
    batch, columns = _batch_and_columns(kwargs)
    valid = cache.steps.valid_columns(kwargs.pop("attention_mask", None), batch, columns)
    chunk = (cache.config.prefill_chunk if state.spec.chunkable else None) or max(columns, 1)
    cache.steps.require(valid, chunk)

    name = cache_name(type(decoder).forward)
    outputs, weights = [], []
    for first in range(0, max(columns, 1), chunk):
        part = {
            key: _slice(value, _COLUMN_ARGUMENTS[key], first, chunk)
            if key in _COLUMN_ARGUMENTS
            else value
            for key, value in kwargs.items()
        }
        step = cache.step(valid[:, first : first + chunk], part.get("input_ids"))
        with step, cache.steps.collect(wants_weights) as found:
            outputs.append(original(**part, **{name: cache}, use_cache=True, return_dict=True))
        weights.append(found)
    cache.steps.prune()
    output = _join(outputs)
    if wants_weights:
        output.attentions = _join_weights(weights)
    if use_cache:
        state.used(cache, snapshot=is_new)
    else:
        output[name] = None
    return output.to_tuple() if return_dict is False else output


def run_traced_decoder(state: PatchState, args: tuple, kwargs: dict) -> Any:
    """Run a decoder while `torch.compile` traces it; see `omlx_cache.compiled`.

    The columns are not cut into chunks: a compiled graph is for decoding, or for prompts whose
    length the caller has chosen. Without a `PagedCache` of the caller's the graph breaks here.
    """
    decoder = state.spec.decoder
    original = state.original(decoder, "forward")
    by_name = _by_name(decoder, args, kwargs)
    cache = next((by_name[n] for n in CACHE_NAMES if by_name.get(n) is not None), None)
    if state.switch.is_stock and not isinstance(cache, PagedCache):
        return original(*args, **kwargs)
    if not isinstance(cache, PagedCache) or by_name.get("use_cache") is False:
        return _run_outside_of_the_graph(state, args, kwargs)
    _refuse_training(decoder)
    for name in CACHE_NAMES:
        by_name.pop(name, None)
    if _pop_output_attentions(decoder, by_name):
        raise NotImplementedError(
            "omlx_cache: output_attentions can't be served by a compiled model; call the model "
            "itself to look at the weights"
        )
    inputs = by_name.get("input_ids")
    inputs = by_name.get("inputs_embeds") if inputs is None else inputs
    return_dict = by_name.pop("return_dict", None)
    mask = by_name.pop("attention_mask", None)
    columns = compiled.begin_step(cache.handle, inputs, mask)
    if by_name.get("position_ids") is None:
        by_name["position_ids"] = columns
    name = cache_name(type(decoder).forward)
    output = original(**by_name, **{name: cache, "use_cache": True, "return_dict": True})
    compiled.end_step(cache.handle)
    return output.to_tuple() if return_dict is False else output


_run_outside_of_the_graph = torch.compiler.disable(
    run_decoder,
    reason="a compiled omlx_cache model needs a cache of the caller's: pass "
    "cache=omlx_cache.PagedCache(model)",
)


def _by_name(decoder: nn.Module, args: tuple, kwargs: dict) -> dict:
    """Return all arguments as keyword arguments."""
    names = list(inspect.signature(type(decoder).forward).parameters)[1:]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _pop_cache(kwargs: dict) -> Any:
    """Remove the cache from the arguments, whatever its name, and return it."""
    given = [kwargs.pop(name, None) for name in CACHE_NAMES]
    return next((cache for cache in given if cache is not None), None)


def _refuse_training(decoder: nn.Module) -> None:
    if decoder.training and torch.is_grad_enabled():
        raise RuntimeError(
            "omlx_cache: a patched model can't be trained; call model.eval(), or "
            "omlx_cache.unpatch(model) first"
        )


def _pop_output_attentions(decoder: nn.Module, kwargs: dict) -> bool:
    """Remove the argument that asks for the weights of attention, and say whether it does."""
    wanted = kwargs.pop("output_attentions", None)
    if wanted is None:
        wanted = getattr(decoder.config, "output_attentions", None)
    return bool(wanted)


def _check_cache(cache: Any, state: PatchState) -> None:
    if not isinstance(cache, PagedCache):
        raise TypeError(
            f"omlx_cache: the cache of a patched model must be a PagedCache, got "
            f"{type(cache).__name__}; pass omlx_cache.PagedCache(model), or no cache at all"
        )
    if cache.windows != state.spec.windows:
        raise ValueError(
            f"omlx_cache: the cache must be made for this model "
            f"({len(state.spec.windows)} layers), got one for {len(cache)} layers, or with other "
            f"windows; pass omlx_cache.PagedCache(model)"
        )


def _batch_and_columns(kwargs: dict) -> tuple[int, int]:
    names = ("input_ids", "inputs_embeds")
    given = [kwargs[name] for name in names if kwargs.get(name) is not None]
    if len(given) != 1:
        raise ValueError("omlx_cache: pass exactly one of input_ids and inputs_embeds")
    return given[0].shape[0], given[0].shape[1]


def _slice(value: Any, dim: int, first: int, length: int) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.narrow(dim, first, min(length, value.shape[dim] - first))


def _join(outputs: list) -> Any:
    """Concatenate the outputs of the chunks along the columns, into the last one."""
    joined = outputs[-1]
    if len(outputs) > 1:
        joined.last_hidden_state = torch.cat([o.last_hidden_state for o in outputs], 1)
        if joined.get("hidden_states") is not None:
            layers = zip(*(o.hidden_states for o in outputs), strict=True)
            joined.hidden_states = tuple(torch.cat(parts, 1) for parts in layers)
    return joined


def _join_weights(chunks: list[list[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    """Put each layer's weights under each other; a chunk does not see the columns after it."""
    columns = chunks[-1][0].shape[-1]
    return tuple(
        torch.cat([torch.nn.functional.pad(x, (0, columns - x.shape[-1])) for x in layer], 2)
        for layer in zip(*chunks, strict=True)
    )
