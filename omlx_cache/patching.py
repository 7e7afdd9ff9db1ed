"""`patch`, `unpatch`, `patched`: put the paged cache into a loaded model, and take it out again."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from omlx_cache.attention import ATTENTION_NAME, PagedAttention, register
from omlx_cache.cache import PagedCache
from omlx_cache.cache_report import CacheReport
from omlx_cache.compat import (
    PreTrainedModel,
    create_masks_for_generate,
    install_capturing_hooks,
    remove_capturing_hooks,
)
from omlx_cache.config import CacheConfig, check_model_bits
from omlx_cache.decoder import run_decoder, run_traced_decoder
from omlx_cache.generation import refuse_continuous_batching, run_generate
from omlx_cache.inspection import ModelSpec, inspect_model
from omlx_cache.patch_state import (
    PatchState,
    attach_state,
    attached_state,
    detach_state,
    find_state,
    state_of,
)
from omlx_cache.policy.choice import may_reach_4_bit_keys
from omlx_cache.prefix_disk import check_storable
from omlx_cache.reuse import check_reusable
from omlx_cache.rope_switch import PREPARE, may_switch, preparing
from omlx_cache.stand_ins import StandIn
from omlx_cache.stock_calls import is_stock_cache
from omlx_cache.unwrap import gptq_bits, unwrap

Model = TypeVar("Model")

logger = logging.getLogger(__name__)


def patch(
    model: Model,
    config: CacheConfig | Mapping[str, Any] | str | os.PathLike | None = None,
    **overrides: Any,
) -> Model:
    """Replace the KV cache and the attention of a loaded model by the paged ones.

    Args:
        model: a causal language model of transformers, plain or wrapped by GPTQModel, auto-gptq
            or PEFT. Patching a patched model replaces its configuration.
        config: a `CacheConfig`, a dict, or the path of a YAML file; None is the default.
        **overrides: configuration keys that win over ``config``, e.g. ``window_size=1024``.

    Returns:
        ``model`` itself.

    Raises:
        ValueError: for a wrong configuration, or ``model_bits`` that contradict the model.
        NotImplementedError: with the reason, for a model or a setting that can't be served.

    Mutates:
        The model's attention modules, and ``forward`` of its decoder and ``generate`` of the
        model; nothing else, and nothing at all when it raises. `unpatch` undoes it.
    """
    cache_config = CacheConfig.resolve(config, **overrides)
    inner = unwrap(model)
    check_model_bits(cache_config, _weight_bits(model, inner))
    if cache_config.prefix_cache:
        check_reusable(inner)
    if cache_config.disk_cache:
        check_storable(inner)
    state = find_state(inner)
    if state is not None:
        PagedCache.for_patch(PatchState(cache_config, state.spec))  # or say why it can't be
        if state.config != cache_config:
            _say_what_is_raised(cache_config, state.spec)
            state.config = cache_config
            state.close_store()
        return model
    state = PatchState(cache_config, inspect_model(inner))
    PagedCache.for_patch(state)
    _say_what_is_raised(cache_config, state.spec)
    register()
    state.hooks = install_capturing_hooks(state.spec.decoder)
    for site in state.spec.sites:
        setattr(site.parent, site.name, PagedAttention(site.module))
    _give_own_configs(state)
    _replace_method(state, state.spec.decoder, "forward", _decoder_forward)
    _replace_method(state, inner, "generate", _generate)
    _replace_method(state, inner, "create_masks_for_generate", _create_masks_for_generate)
    _replace_method(state, inner, "init_continuous_batching", _refuse_continuous_batching)
    if may_switch(inner, state.spec.decoder):
        _replace_method(state, inner, PREPARE, preparing(inner))
    return model


def unpatch(model: Model) -> Model:
    """Put the original attention, forward and generate back; return ``model``.

    Does nothing to a model that isn't patched. Hooks that accelerate has added meanwhile stay.

    Raises:
        RuntimeError: something else has replaced a method that `patch` had replaced, and would be
            lost; nothing is changed then.
    """
    inner = unwrap(model)
    state = find_state(inner)
    if state is None:
        return model
    for stand_in in state.methods:
        stand_in.check()
    state.close_store()
    for site in state.spec.sites:
        setattr(site.parent, site.name, getattr(site.parent, site.name).hand_back())
    remove_capturing_hooks(state.spec.decoder, state.hooks)
    state.switch.withdraw()
    for stand_in in state.methods:
        stand_in.withdraw()
        detach_state(stand_in.module)
    return model


@contextmanager
def patched(
    model: Model,
    config: CacheConfig | Mapping[str, Any] | str | os.PathLike | None = None,
    **overrides: Any,
) -> Iterator[Model]:
    """Patch a model for the length of a ``with`` block; see `patch`.

    A model that was patched before gets its former configuration back.
    """
    before = find_state(unwrap(model))
    former = before.config if before is not None else None
    patch(model, config, **overrides)
    try:
        yield model
    finally:
        if former is None:
            unpatch(model)
        else:
            patch(model, former)


def report(model_or_cache: Any) -> CacheReport:
    """Say what a cache holds now.

    Args:
        model_or_cache: a `PagedCache`, or a patched model: then the cache that it used last, as
            it is, or as it was at the end of its last call when it is gone.

    Raises:
        ValueError: when the model is not patched, or has not used a cache yet.
    """
    if isinstance(model_or_cache, PagedCache):
        return model_or_cache.report()
    state = state_of(model_or_cache)
    cache = state.last_cache() if state.last_cache is not None else None
    if cache is not None:
        return cache.report()
    if state.last_report is None:
        got = "one that has not run" if state.last_cache is None else "one whose cache is gone"
        raise ValueError(
            f"omlx_cache.report: the model must be one that has used a cache, got {got}; call "
            f"model.generate(...) first, or pass the PagedCache itself"
        )
    return state.last_report


def flush(model: Any) -> bool:
    """Wait until what a model with ``disk_cache`` keeps is on the disk.

    What a call has left is written in the background, and before the process ends; after this, not
    even ``kill -9`` loses it.

    Args:
        model: a patched model.

    Returns:
        Whether it is: False when the disk is full or can't be written to, which was logged.

    Raises:
        ValueError: when the model is not patched, or without ``disk_cache``.
    """
    state = state_of(model)
    if not state.config.disk_cache:
        raise ValueError(
            "omlx_cache.flush: the model must be patched with disk_cache, got False; call "
            "omlx_cache.patch(model, disk_cache=True)"
        )
    return state.store is None or state.store.flush()


def _weight_bits(model: Any, inner: PreTrainedModel) -> int | None:
    """Return the bits of a weight: of its codes, or of its dtype where it has none."""
    if getattr(inner.config, "quantization_config", None) is not None:
        return gptq_bits(model)
    return gptq_bits(model) or inner.dtype.itemsize * 8


def _say_what_is_raised(config: CacheConfig, spec: ModelSpec) -> None:
    """Warn when layers get other keys than the configuration asks for."""
    if config.keep_layers != "auto" or not spec.fragile_layers or not may_reach_4_bit_keys(config):
        return
    logger.warning(
        "omlx_cache.patch: keys of %s %s stay at 8 bits: their projections add biases that the "
        "rotary embedding turns into waves, beside which 4 bits would lose the text; "
        "keep_layers=None gives them 4 bits all the same",
        "layer" if len(spec.fragile_layers) == 1 else "layers",
        ", ".join(map(str, sorted(spec.fragile_layers))),
    )


def _give_own_configs(state: PatchState) -> None:
    """Let the decoder and its attention modules read a configuration that names our attention.

    It is a copy: other models may share the original, and `model.config` stays what it was.
    """
    copies: dict[int, Any] = {}
    for module in (state.spec.decoder, *(site.module for site in state.spec.sites)):
        config = module.config
        if id(config) not in copies:
            copies[id(config)] = copy.copy(config)
            copies[id(config)]._attn_implementation = ATTENTION_NAME
        state.switch.add(module, copies[id(config)])


def _replace_method(state: PatchState, module: nn.Module, name: str, function: Callable) -> None:
    """Shadow a method by a function, and remember what stood there."""
    state.methods.append(StandIn.put(module, name, function))
    attach_state(module, state)


def _decoder_forward(self: nn.Module, *args, **kwargs):
    """Stand in for the decoder's forward."""
    run = run_traced_decoder if torch.compiler.is_compiling() else run_decoder
    state: Any = attached_state(self)  # never None where this stands in
    return run(state, args, kwargs)


def _create_masks_for_generate(
    self: nn.Module,
    *,
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | None,
    is_first_iteration: bool = False,
    **kwargs,
) -> Any:
    """Stand in for what makes 4-D masks of the 2-D one: the cache reads the 2-D one.

    A token's own column is enough once generation goes on, and has one shape at every length; a
    copy of it has one stride too, for which a compiled step would be compiled again otherwise.
    """
    if is_stock_cache(*kwargs.values()):
        return create_masks_for_generate(
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )
    if attention_mask is None or is_first_iteration or inputs_embeds.shape[1] != 1:
        return attention_mask
    return attention_mask[:, -1:].clone(memory_format=torch.contiguous_format)


def _generate(self: nn.Module, inputs=None, generation_config=None, *args, **kwargs):
    """Stand in for the model's generate."""
    return run_generate(self, inputs, generation_config, args, kwargs)


def _refuse_continuous_batching(self: nn.Module, *args, **kwargs) -> None:
    """Stand in for what generate_batch begins with, before it changes the model's attention."""
    refuse_continuous_batching()
