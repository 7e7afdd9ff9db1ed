"""The only file that knows how versions of transformers differ (5.17 .. 5.24)."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from torch import nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

__all__ = [
    "CACHE_NAMES",
    "Cache",
    "CacheLayerMixin",
    "PreTrainedModel",
    "PretrainedConfig",
    "cache_name",
    "register_attention",
    "uses_attention_interface",
]

CACHE_NAMES = ("cache", "past_key_values")
"""What the argument that carries the cache is called: since 5.24, and before."""


def cache_name(forward: Callable) -> str:
    """Return the name under which ``forward`` (of a model or layer) takes the cache."""
    parameters = inspect.signature(forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), CACHE_NAMES[-1])


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
