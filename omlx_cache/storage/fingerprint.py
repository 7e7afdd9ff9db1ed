"""What the keys and values of a cache depend on, in a form that files can keep and compare.

Three parts. The *model*: the shape of its decoder, its rotary embedding, and a sample of its
weights. The *format*: how a `PagedCache` stores. The *tokenizer*, where it is known.

A checkpoint that is loaded in another dtype counts as another model: its keys are not the same
numbers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from omlx_cache.compat import PreTrainedModel
from omlx_cache.fingerprint import autocast_dtype

if TYPE_CHECKING:
    from omlx_cache.cache import PagedCache

SAMPLE = 16
"""Values that are looked at in each weight, evenly spread: some thousands in a model."""

_SHAPE_KEYS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "hidden_act",
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_types",
    "sliding_window",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "partial_rotary_factor",
)
_ROTARY_KEYS = ("rope_theta", "rope_parameters", "rope_scaling", "max_position_embeddings")

_PROBE = "Hello, wörld! 你好 🙂\n\tdef f(x): return x**2  # 1234567890 <|im_start|></s>"


def model_fingerprint(decoder: PreTrainedModel) -> dict[str, str]:
    """Return what identifies a decoder, by aspect; equal for equal weights on any device.

    Some milliseconds for a model of any size: only a sample of each weight is read.

    Args:
        decoder: the module whose forward runs the layers, with its ``config``.
    """
    config = decoder.config.get_text_config(decoder=True).to_dict()
    return {
        "shape": _digest({key: config.get(key) for key in _SHAPE_KEYS}),
        "rotary embedding": _digest({key: config.get(key) for key in _ROTARY_KEYS}),
        "dtype": str(decoder.dtype).removeprefix("torch."),
        "adapters": _digest(list(_adapters(decoder))),
        "weights": _weights_digest(decoder),
    }


def format_fingerprint(cache: PagedCache) -> dict[str, str]:
    """Return what must agree before blocks of one cache may be used in another, by aspect.

    The names are those of the configuration keys to change where they don't.
    """
    geometry = [
        {"window": group.geometry.window_size, "keep_sinks": group.keep_sinks}
        for group in cache.groups
    ]
    return {
        "block_size": str(cache.config.block_size),
        "sink_tokens": str(cache.config.sink_tokens),
        "window_size": json.dumps(geometry),
        "cache_bits or tiers (values are rotated where some have 4 bits)": (
            "rotated" if cache.groups[0].policy.rotates_values else "not rotated"
        ),
    }


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Return what identifies a Hugging Face tokenizer, whatever its class."""
    size = len(tokenizer)
    sampled = range(0, size, max(1, size // 64))
    return _digest(
        {
            "size": size,
            "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
            "tokens": [str(t) for t in tokenizer.convert_ids_to_tokens(list(sampled))],
            "probe": list(tokenizer(_PROBE, add_special_tokens=True)["input_ids"]),
        }
    )


def template_fingerprint(tokenizer: Any) -> str:
    """Return what identifies a tokenizer's chat template; without one, too."""
    return _digest(getattr(tokenizer, "chat_template", None))


def block_fingerprint(cache: PagedCache, decoder: PreTrainedModel) -> bytes:
    """Return what every block of a cache depends on beside its tokens: for `BlockFiles`.

    Stricter than what `PagedCache.load` asks for: also the precision at which earlier tokens
    were seen and computed, in each layer, for blocks that nobody can tell apart must be equal.
    """
    numbers = {id(group): i for i, group in enumerate(cache.groups)}
    precision = {
        "policies": [asdict(group.policy) for group in cache.groups],
        "layers": [numbers[id(layer.group)] for layer in cache.layers],
        "autocast": str(autocast_dtype(decoder)),
    }
    parts = [model_fingerprint(decoder), format_fingerprint(cache), precision]
    return hashlib.sha256(_json(parts).encode()).digest()


def differences(stored: Mapping[str, str], present: Mapping[str, str]) -> list[str]:
    """Return the aspects in which two fingerprints differ."""
    names = dict.fromkeys([*stored, *present])
    return [name for name in names if stored.get(name) != present.get(name)]


def _weights_digest(decoder: nn.Module) -> str:
    digest = hashlib.sha256()
    samples: list[torch.Tensor] = []
    for name, shape, sample in sorted(_samples(decoder), key=lambda named: named[0]):
        digest.update(_json([name, list(shape), str(sample.dtype)]).encode())
        if not sample.is_meta and sample.numel():  # one that is offloaded can't be read
            samples.append(sample.contiguous().view(torch.uint8))
    if not samples:
        raise NotImplementedError(
            f"model_fingerprint: the model must have weights on some device, got a "
            f"{type(decoder).__name__} whose weights are all offloaded"
        )
    for sample in _on_cpu(samples):
        digest.update(sample.numpy())
    return digest.hexdigest()


def _on_cpu(samples: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copy small tensors to the CPU, all of a device at once, and keep their order."""
    found: dict[int, torch.Tensor] = {}
    for device in {sample.device for sample in samples}:
        own = [i for i, sample in enumerate(samples) if sample.device == device]
        together = torch.cat([samples[i] for i in own]).cpu()
        found |= zip(own, together.split([len(samples[i]) for i in own]), strict=True)
    return [found[i] for i in range(len(samples))]


def _samples(decoder: nn.Module) -> Iterator[tuple[str, torch.Size | tuple, torch.Tensor]]:
    """Yield name, shape and a 1-D sample of what a checkpoint holds.

    GPTQ and AWQ kernels pack their weights in an order of their own, some when they run first, so
    of a quantized layer only what no order changes is looked at: the least and greatest scale.
    """
    seen: set[int] = set()  # tied weights count once
    for prefix, module in decoder.named_modules():
        own = {**module._parameters, **module._buffers}
        quantized = {"qweight", "scales"} <= set(own)
        for name, weight in own.items():
            is_stored = name not in module._non_persistent_buffers_set
            if weight is None or id(weight) in seen or not is_stored:
                continue
            seen.add(id(weight))
            whole = f"{prefix}.{name}"
            if not quantized or name == "bias":
                flat = weight.detach().reshape(-1)
                step = max(1, flat.numel() // SAMPLE)
                yield whole, weight.shape, flat[::step][:SAMPLE]
            elif name == "scales":
                least, most = weight.detach().aminmax()
                yield whole, (), torch.stack([least, most]).to(torch.bfloat16)


def _adapters(decoder: nn.Module) -> Iterator[list]:
    """Yield what PEFT's layers do now: an adapter that is switched off changes nothing."""
    for name, module in decoder.named_modules():
        active = getattr(module, "active_adapters", None)
        if isinstance(active, (list, tuple)) and not getattr(module, "disable_adapters", False):
            scaling = getattr(module, "scaling", None) or {}
            yield [name, list(active), [str(scaling.get(adapter)) for adapter in active]]


def _digest(value: object) -> str:
    return hashlib.sha256(_json(value).encode()).hexdigest()


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
