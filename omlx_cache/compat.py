"""The only file that knows how versions of transformers differ (5.17 .. 5.24)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any

from torch import nn
from transformers import (
    AttentionInterface,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache
from transformers.masking_utils import create_masks_for_generate
from transformers.utils.output_capturing import maybe_install_capturing_hooks

try:  # configurations that hold values for each layer, since 5.24
    from transformers.integrations.heterogeneity import AmbiguousGlobalPerLayerAttributeError
except ImportError:

    class AmbiguousGlobalPerLayerAttributeError(RuntimeError):  # type: ignore[no-redef]
        """Stand in for an error that this version never raises."""


__all__ = [
    "CACHE_NAMES",
    "Cache",
    "CacheLayerMixin",
    "DynamicCache",
    "GenerationConfig",
    "PreTrainedModel",
    "PretrainedConfig",
    "StoppingCriteria",
    "StoppingCriteriaList",
    "TextIteratorStreamer",
    "cache_name",
    "config_value",
    "create_masks_for_generate",
    "install_capturing_hooks",
    "mask_builders",
    "register_attention",
    "remove_capturing_hooks",
    "uses_attention_interface",
]

CACHE_NAMES = ("cache", "past_key_values")
"""What the argument that carries the cache is called: since 5.24, and before."""


def cache_name(forward: Callable) -> str:
    """Return the name under which ``forward`` (of a model or layer) takes the cache."""
    parameters = inspect.signature(forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), CACHE_NAMES[-1])


def config_value(config: PretrainedConfig, name: str) -> Any:
    """Return a value of a configuration; None where it has none.

    Raises:
        NotImplementedError: when it is another one in each layer.
    """
    try:
        return getattr(config, name, None)
    except AmbiguousGlobalPerLayerAttributeError:
        raise NotImplementedError(f"its layers differ in {name}") from None


def register_attention(name: str, function: Callable) -> None:
    """Make ``function`` selectable as ``config._attn_implementation = name``.

    No mask function is registered beside it: transformers then builds no mask at all, and the
    padding reaches the cache through the patched decoder, which refuses what it can't serve.
    """
    AttentionInterface.register(name, function)


def uses_attention_interface(module: nn.Module) -> bool:
    """Whether ``module`` is an attention layer that uses transformers' attention interface."""
    forward = inspect.unwrap(type(module).forward)
    names = getattr(forward, "__code__", None)
    return names is not None and "ALL_ATTENTION_FUNCTIONS" in names.co_names


def mask_builders(model: PreTrainedModel, decoder: nn.Module) -> tuple[set[str], list[str]]:
    """Find out who builds the masks of ``decoder``.

    Returns:
        The functions, such as ``create_causal_mask``, with which the decoder's own forward builds
        masks, and the classes around it that build masks for it.
    """
    around = [
        type(module).__name__
        for module in model.modules()
        if module is not decoder
        and _masks_in(type(module).forward)
        and any(child is decoder for child in module.modules())
    ]
    if hasattr(type(model), "create_masks_for_generate"):  # how a model declares masks of its own
        around.append(type(model).__name__)
    return _masks_in(type(decoder).forward), around


def _masks_in(forward: Callable) -> set[str]:
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return {name for name in _names_in(code) if name.startswith("create_") and "mask" in name}


def _names_in(code: CodeType | None) -> set[str]:
    """Return the global and attribute names that a function uses, nested functions included."""
    if code is None:
        return set()
    nested = [_names_in(const) for const in code.co_consts if isinstance(const, CodeType)]
    return set(code.co_names).union(*nested)


def install_capturing_hooks(decoder: nn.Module) -> list[tuple[nn.Module, int]]:
    """Let transformers hook the modules whose outputs it may be asked for, if it hasn't yet.

    It does so once, when outputs are first asked for. Were that while other modules stand where its
    attention modules stood, ``output_attentions`` would be empty ever after.

    Returns:
        (module, id of the hook) of the hooks that are new.
    """
    before = {module: set(module._forward_hooks) for module in decoder.modules()}
    maybe_install_capturing_hooks(decoder)
    return [(m, i) for m, ids in before.items() for i in m._forward_hooks if i not in ids]


def remove_capturing_hooks(decoder: nn.Module, hooks: list[tuple[nn.Module, int]]) -> None:
    """Remove what `install_capturing_hooks` added."""
    for module, number in hooks:
        module._forward_hooks.pop(number, None)
    if hooks:
        for module in decoder.modules():
            module.__dict__.pop("_output_capturing_hooks_installed", None)
