"""Read from a loaded model what the cache must know, or why the model can't be served."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
from torch import nn

from omlx_cache.compat import (
    CACHE_NAMES,
    PretrainedConfig,
    PreTrainedModel,
    uses_attention_interface,
)
from omlx_cache.rotary import inverse_frequencies

TESTED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""``config.model_type`` of the families that the tests compare with the stock model."""

_WRONG = {
    "opt": "its positions follow the attention mask, which the paged decoder doesn't hand on",
    "moshi": "its configuration names a window that the model doesn't apply",
    "doge": "it builds its own attention masks",
    "diffllama": "it attends twice to what it stores once",
    "jetmoe": "it repeats its keys and values before it attends to them",
}
"""Families that look as if they could be served, and can't."""

_SERVED_LAYERS = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class AttentionSite:
    """Where an attention module sits: ``setattr(parent, name, ...)`` replaces it."""

    parent: nn.Module
    name: str
    module: nn.Module


@dataclass(frozen=True)
class ModelSpec:
    """What the cache must know about a model.

    Attributes:
        decoder: the module whose forward runs the layers.
        sites: its attention modules, in the order of ``layer_idx``.
        windows: each layer's own window in tokens, itself included; None is full attention.
        trained_length: tokens that the model was trained for; None when its config doesn't say.
        chunkable: whether a prompt may run in chunks; not where the rotary frequencies follow the
            length of what runs at once.
        inv_freqs: each layer's rotary frequencies, see `omlx_cache.rotary`; None where its queries
            can't be stood at another position.
    """

    decoder: nn.Module
    sites: tuple[AttentionSite, ...]
    windows: tuple[int | None, ...]
    trained_length: int | None
    chunkable: bool
    inv_freqs: tuple[torch.Tensor | None, ...]


def inspect_model(model: PreTrainedModel) -> ModelSpec:
    """Find the decoder, its attention modules and their windows.

    Raises:
        NotImplementedError: with the reason, for a model that can't be served right.
    """
    config = model.config.get_text_config(decoder=True)
    name = type(model).__name__

    def refuse(reason: str) -> NotImplementedError:
        return NotImplementedError(
            f"omlx_cache.patch: {name} (model_type {config.model_type!r}) can't be served: {reason}"
        )

    if reason := _config_reason(model.config, config):
        raise refuse(reason)
    if model.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise refuse(f"its dtype must be float16, bfloat16 or float32, got {model.dtype}")
    decoder = model.get_decoder()
    if not set(CACHE_NAMES) & set(inspect.signature(type(decoder).forward).parameters):
        raise refuse("its decoder takes no argument named cache or past_key_values")
    sites = [
        AttentionSite(parent, child_name, child)
        for parent in decoder.modules()
        for child_name, child in parent.named_children()
        if uses_attention_interface(child)
    ]
    indices = [getattr(site.module, "layer_idx", None) for site in sites]
    expected = list(range(config.num_hidden_layers))
    if indices != expected:
        raise refuse(
            f"expected one attention module per layer that uses transformers' attention interface "
            f"({config.num_hidden_layers} layers), found layer indices {indices}"
        )
    for site in sites:
        if reason := _module_reason(site.module):
            raise refuse(reason)
    trained = getattr(config, "max_position_embeddings", None)
    inv_freqs = tuple(inverse_frequencies(decoder, site.module) for site in sites)
    windows = _layer_windows(config)
    return ModelSpec(decoder, tuple(sites), windows, trained, _has_static_rope(decoder), inv_freqs)


def _has_static_rope(decoder: nn.Module) -> bool:
    rope_type = getattr(getattr(decoder, "rotary_emb", None), "rope_type", "default")
    types = rope_type.values() if isinstance(rope_type, dict) else [rope_type]
    return not any(kind in ("dynamic", "longrope") for kind in types)


def _config_reason(config: PretrainedConfig, text: PretrainedConfig) -> str | None:
    """Return why a model of this configuration can't be served; None when it can."""
    if text.model_type in _WRONG:
        return _WRONG[text.model_type]
    if config.is_encoder_decoder:
        return "it is an encoder-decoder; only decoder-only models have one growing cache"
    if getattr(text, "kv_lora_rank", None):
        return "it caches latent vectors (MLA), not keys and values"
    if not getattr(text, "is_causal", True):
        return "its attention is not causal"
    if getattr(text, "attn_logit_softcapping", None):
        return "it caps its attention scores (attn_logit_softcapping), which the kernels don't yet"
    if getattr(text, "kv_sharing_modes", None) or getattr(text, "num_kv_shared_layers", 0):
        return "its layers share keys and values"
    other = sorted(set(getattr(text, "layer_types", None) or ()) - set(_SERVED_LAYERS))
    if other:
        return f"it has layers of type {', '.join(other)}; served are {', '.join(_SERVED_LAYERS)}"
    return None


def _module_reason(module: nn.Module) -> str | None:
    """Return why this attention module can't be served; None when it can."""
    head_dim = getattr(module, "head_dim", None)
    if head_dim is None or head_dim > 256:
        return f"head_dim must be at most 256, got {head_dim}"
    if getattr(module, "sinks", None) is not None:
        return "it has learned attention sinks, which the kernels don't know yet"
    if not getattr(module, "is_causal", True):
        return "its attention is not causal"
    return None


def _layer_windows(config: PretrainedConfig) -> tuple[int | None, ...]:
    """Return each layer's own window from the configuration."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        return (window,) * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in types)
