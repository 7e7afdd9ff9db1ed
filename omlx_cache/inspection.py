"""Read from a loaded model what the cache must know, or why the model can't be served."""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass

import torch
from torch import nn

from omlx_cache.attention_source import read_source
from omlx_cache.compat import (
    CACHE_NAMES,
    PretrainedConfig,
    PreTrainedModel,
    config_value,
    mask_builders,
    uses_attention_interface,
)
from omlx_cache.families import TESTED_FAMILIES
from omlx_cache.fragile_keys import has_fragile_keys
from omlx_cache.rotary import SinkDistance, follows_length, sink_distance

logger = logging.getLogger(__name__)

_WRONG = {
    "opt": "its positions follow the attention mask, which the paged decoder doesn't hand on",
    "doge": "it builds its own attention masks",
    "diffllama": "it attends twice to what it stores once",
    "jetmoe": "it repeats its keys and values before it attends to them",
}
"""Families that look as if they could be served, and can't."""

_SERVED_LAYERS = ("full_attention", "sliding_attention")
_WINDOW_MASK = "create_sliding_window_causal_mask"
_SERVED_MASKS = {"create_causal_mask", _WINDOW_MASK}
_SERVED_ARGUMENTS = {"scaling", "softcap", "s_aux"}
"""What a module may ask of its attention function, beside what doesn't change the result:"""
_IGNORED_ARGUMENTS = {
    "attention_mask",  # None: see omlx_cache.compat.register_attention
    "dropout",  # a patched model isn't trained
    "is_causal",  # checked on the module
    "output_attentions",  # the decoder answers it
    "position_ids",
    "sliding_window",  # comes from the configuration, as the mask of the stock model does
}

_UNCUT = {"visual_pos_masks", "deepstack_visual_embeds"}
"""Arguments of a decoder that belong to all columns of a prompt at once (Qwen3-VL)."""


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
            length of what runs at once, or where an argument can't be cut.
        sink_distances: how each layer may look at sinks outside of the window.
        fragile_layers: layers whose keys lose too much in 4 bits; see `fragile_keys`.
    """

    decoder: PreTrainedModel
    sites: tuple[AttentionSite, ...]
    windows: tuple[int | None, ...]
    trained_length: int | None
    chunkable: bool
    sink_distances: tuple[SinkDistance, ...]
    fragile_layers: frozenset[int] = frozenset()


def inspect_model(model: PreTrainedModel) -> ModelSpec:
    """Find the decoder, its attention modules and their windows.

    Raises:
        NotImplementedError: with the reason, for a model that can't be served right.
    """
    config = model.config.get_text_config(decoder=True)
    name = f"{type(model).__name__} (model_type {config.model_type!r})"
    try:
        spec = _inspect(model, config)
    except NotImplementedError as reason:
        raise NotImplementedError(
            f"omlx_cache.patch: {name} can't be served: {reason}"
        ) from reason.__cause__
    if config.model_type not in TESTED_FAMILIES:
        logger.warning(
            "omlx_cache.patch: %s is none of the families that the tests compare with the stock "
            "model; nothing speaks against serving it, but compare its answers once with those "
            "of the stock model",
            name,
        )
    return spec


def _inspect(model: PreTrainedModel, config: PretrainedConfig) -> ModelSpec:
    _check_config(model.config, config)
    _check_model(model)
    decoder = model.get_decoder()
    _check_decoder(model, decoder)
    sites = _find_sites(decoder, config)
    for site in sites:
        _check_attention(site.module)
    _check_other_modules(decoder, sites)
    distances = tuple(sink_distance(decoder, s.module, head_dim_of(s.module)) for s in sites)
    return ModelSpec(
        decoder,
        sites,
        _layer_windows(config, decoder_masks=mask_builders(model, decoder)[0]),
        config_value(config, "max_position_embeddings"),
        _is_chunkable(decoder),
        distances,
        frozenset(
            i
            for i, (site, distance) in enumerate(zip(sites, distances, strict=True))
            if has_fragile_keys(site.module, head_dim_of(site.module), distance)
        ),
    )


def _is_chunkable(decoder: nn.Module) -> bool:
    arguments = set(inspect.signature(type(decoder).forward).parameters)
    return not follows_length(getattr(decoder, "rotary_emb", None)) and not arguments & _UNCUT


def _check_config(config: PretrainedConfig, text: PretrainedConfig) -> None:
    """Refuse what the configuration says can't be served."""
    if text.model_type in _WRONG:
        raise NotImplementedError(_WRONG[text.model_type])
    if config.is_encoder_decoder:
        raise NotImplementedError(
            "it is an encoder-decoder; only decoder-only models have one growing cache"
        )
    if config_value(text, "num_hidden_layers") is None:
        raise NotImplementedError("its configuration names no num_hidden_layers")
    if config_value(text, "kv_lora_rank"):
        raise NotImplementedError("it caches latent vectors (MLA), not keys and values")
    if config_value(text, "is_causal") is False:
        raise NotImplementedError("its attention is not causal")
    if config_value(text, "kv_sharing_modes") or config_value(text, "num_kv_shared_layers"):
        raise NotImplementedError("its layers share keys and values")
    if config_value(text, "cross_attention_layers") or config_value(text, "add_cross_attention"):
        raise NotImplementedError(
            "it has cross-attention, whose keys and values don't grow with the text"
        )
    if (config_value(text, "num_codebooks") or 1) > 1:
        raise NotImplementedError("it writes several codebooks, each as a row of its own")
    other = sorted(set(config_value(text, "layer_types") or ()) - set(_SERVED_LAYERS))
    if other:
        raise NotImplementedError(
            f"it has layers of type {', '.join(other)}; served are {', '.join(_SERVED_LAYERS)}"
        )


def _check_model(model: PreTrainedModel) -> None:
    """Refuse a model whose class or weights can't be served."""
    if getattr(model, "_is_stateful", False):
        raise NotImplementedError(
            "it keeps a state beside keys and values (linear attention, state space layers)"
        )
    if model.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise NotImplementedError(
            f"its dtype must be float16, bfloat16 or float32, got {model.dtype}"
        )


def _check_decoder(model: PreTrainedModel, decoder: nn.Module) -> None:
    """Refuse a decoder that can't be given a cache, or whose masks aren't causal ones."""
    if decoder is model:
        raise NotImplementedError("it has no decoder apart from its language-model head")
    if not set(CACHE_NAMES) & set(inspect.signature(type(decoder).forward).parameters):
        raise NotImplementedError("its decoder takes no argument named cache or past_key_values")
    masks, around = mask_builders(model, decoder)
    if around:
        raise NotImplementedError(
            f"{around[0]} builds masks of its own (as for the tokens of an image or a prefix, "
            f"which see each other), and a paged cache is causal; for text alone load its text "
            f"model, where there is one"
        )
    if not masks & _SERVED_MASKS:
        raise NotImplementedError(
            f"{type(decoder).__name__} must build its masks with one of "
            f"{', '.join(sorted(_SERVED_MASKS))}, and does it in another way"
        )


def _find_sites(decoder: nn.Module, config: PretrainedConfig) -> tuple[AttentionSite, ...]:
    sites = [
        AttentionSite(parent, child_name, child)
        for parent in decoder.modules()
        for child_name, child in parent.named_children()
        if uses_attention_interface(child)
    ]
    indices = [getattr(site.module, "layer_idx", None) for site in sites]
    if indices != list(range(config.num_hidden_layers)):
        raise NotImplementedError(
            f"expected one attention module per layer that uses transformers' attention interface "
            f"({config.num_hidden_layers} layers), found {len(indices)}, of layers {indices}"
        )
    return tuple(sites)


def _check_attention(module: nn.Module) -> None:
    """Refuse an attention module that asks for more than paged attention gives."""
    name, head_dim = type(module).__name__, head_dim_of(module)
    if head_dim > 256:
        raise NotImplementedError(f"head_dim must be at most 256, got {head_dim}")
    value_dim = getattr(module, "v_head_dim", head_dim)
    if value_dim != head_dim:
        raise NotImplementedError(
            f"keys and values must have one head_dim, got {head_dim} and {value_dim}"
        )
    if not getattr(module, "is_causal", True):
        raise NotImplementedError("its attention is not causal")
    source = read_source(type(module))
    other = source.arguments - _SERVED_ARGUMENTS - _IGNORED_ARGUMENTS
    if other:
        raise NotImplementedError(
            f"{name} asks its attention function for {', '.join(sorted(other))}, which paged "
            f"attention doesn't know"
        )
    if not source.stores_by_layer_idx:
        raise NotImplementedError(f"{name} stores keys and values for other layers than its own")


def _check_other_modules(decoder: nn.Module, sites: tuple[AttentionSite, ...]) -> None:
    """Refuse a decoder in which something else than its attention modules uses the cache."""
    attention = {id(site.module) for site in sites}
    for module in decoder.modules():
        takes_cache = set(CACHE_NAMES) & set(inspect.signature(type(module).forward).parameters)
        if takes_cache and not attention & {id(child) for child in module.modules()}:
            raise NotImplementedError(
                f"{type(module).__name__} keeps something else than keys and values in the cache"
            )


def head_dim_of(module: nn.Module) -> int:
    """Return the channels of an attention module's head.

    Raises:
        NotImplementedError: where it doesn't say.
    """
    for name in ("head_dim", "head_size", "attention_head_size"):
        if (head_dim := getattr(module, name, None)) is not None:
            return head_dim
    raise NotImplementedError(f"{type(module).__name__} doesn't say its head_dim")


def _layer_windows(config: PretrainedConfig, decoder_masks: set[str]) -> tuple[int | None, ...]:
    """Return each layer's own window from the configuration.

    Raises:
        NotImplementedError: when the decoder's masks don't apply it. The stock model's cache does,
            and forgets what its masks show.
    """
    window = config_value(config, "sliding_window")
    kinds = config_value(config, "layer_types")
    kinds = kinds or ["sliding_attention"] * config.num_hidden_layers
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if any(windows) and _WINDOW_MASK not in decoder_masks:
        raise NotImplementedError(
            f"its configuration names a window of {window} tokens that its decoder doesn't apply"
        )
    return windows
