"""Find the Hugging Face model inside what quantization and adapter libraries wrap around it.

`patch` works on the `PreTrainedModel`, whoever loaded it:

    GPTQModel       LlamaQModel            .model -> LlamaForCausalLM
    auto-gptq       LlamaGPTQForCausalLM   .model -> LlamaForCausalLM
    PEFT            PeftModelForCausalLM   .base_model -> LoraModel .model -> LlamaForCausalLM
      (prompt learning)                    .base_model -> LlamaForCausalLM

and nestings of these. The libraries aren't imported: a wrapper is known by the package and the
name of a class that it inherits from. Attributes alone would not do, for every wrapper forwards
unknown attributes to what it wraps, and LlamaForCausalLM has a `.model` too, its decoder.
"""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# (top package, base class) -> the attribute that holds what it wraps
_WRAPPERS = {
    ("gptqmodel", "BaseQModel"): "model",
    ("gptqmodel", "BaseGPTQModel"): "model",  # older releases' name for it
    ("auto_gptq", "BaseGPTQForCausalLM"): "model",
    ("peft", "PeftModel"): "base_model",
    ("peft", "PeftMixedModel"): "base_model",
    ("peft", "BaseTuner"): "model",
}
# PEFT methods that fill the key/value cache themselves, with learned vectors.
_CACHE_FILLING_ADAPTERS = ("PREFIX_TUNING", "CARTRIDGE")
# Where other objects (pipelines, DistributedDataParallel, torch.compile, …) keep a model: only
# looked at to name it in an error.
_USUAL_ATTRIBUTES = ("_orig_mod", "module", "pretrained_model", "model", "base_model")
_LOAD = "AutoModelForCausalLM.from_pretrained(…)"


def unwrap(model: Any) -> "PreTrainedModel":
    """Return the Hugging Face causal language model inside `model`.

    Args:
        model: a `PreTrainedModel` with a language-model head (returned as it is), or one inside
            any nesting of GPTQModel, auto-gptq and PEFT objects.

    Returns:
        The very object that the wrappers call: what is patched there is patched for them.

    Raises:
        TypeError: `model` is none of these; says what was passed and what to pass instead.
        ValueError: the Hugging Face model has no language-model head.
        NotImplementedError: it is an encoder-decoder, or a PEFT adapter fills the cache itself
            (prefix tuning).

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(vocab_size=8, hidden_size=8, intermediate_size=8)
        >>> config = LlamaConfig(num_hidden_layers=1, num_attention_heads=1, **sizes)
        >>> model = LlamaForCausalLM(config)
        >>> unwrap(model) is model
        True
    """
    inner = _chain(model)[-1]
    if getattr(inner.config, "is_encoder_decoder", False):
        raise NotImplementedError(
            f"unwrap: model must be decoder-only, got the encoder-decoder {_name(inner)}, whose "
            "cross-attention keeps a second cache that omlx_cache doesn't serve; run it unpatched"
        )
    if not _inherits(inner, "transformers", "GenerationMixin"):
        raise ValueError(
            f"unwrap: model must be a causal language model, with a head that gives logits, got "
            f"{_name(inner)}; load it with {_LOAD}"
        )
    return inner


def gptq_bits(model: Any) -> int | None:
    """Return the bits per quantized weight of a loaded model.

    Reads what the loader left there: `config.quantization_config` of the Hugging Face model (GPTQ,
    AWQ, bitsandbytes and whatever else states a whole number of bits), then `quantize_config` of
    the GPTQModel or auto-gptq object around it. Exceptions for single layers (GPTQModel's
    `dynamic`) don't count.

    Args:
        model: anything that `unwrap` takes.

    Returns:
        4 for a 4-bit GPTQ model; None if the model isn't quantized or doesn't say.

    Raises:
        TypeError: as `unwrap`.
    """
    *wrappers, inner = _chain(model)
    configs = [getattr(inner.config, "quantization_config", None)]
    # vars(): a wrapper's getattr would forward the name to what it wraps.
    configs += [vars(wrapper).get("quantize_config") for wrapper in reversed(wrappers)]
    stated = (_stated_bits(config) for config in configs if config is not None)
    return next((bits for bits in stated if bits is not None), None)


def _chain(model: Any) -> list[Any]:
    """Return `model`, what it wraps, what that wraps, …, the `PreTrainedModel`."""
    chain = [model]
    while not _inherits(chain[-1], "transformers", "PreTrainedModel"):
        attribute = _wrapping_attribute(chain[-1])
        if attribute is None:
            raise TypeError(
                "unwrap: model must be a Hugging Face PreTrainedModel or a GPTQModel, auto-gptq or "
                f"PEFT object around one, got {' around '.join(map(_name, chain))}; "
                f"{_remedy(chain[-1])}"
            )
        _refuse_cache_filling_adapters(chain[-1])
        chain.append(getattr(chain[-1], attribute))
    return chain


def _inherits(thing: Any, package: str, class_name: str) -> bool:
    """Tell whether `thing` is an instance of the package's class, without importing the package."""
    return any(
        cls.__name__ == class_name and cls.__module__.partition(".")[0] == package
        for cls in type(thing).__mro__
    )


def _wrapping_attribute(thing: Any) -> str | None:
    names = (name for wrapper, name in _WRAPPERS.items() if _inherits(thing, *wrapper))
    return next(names, None)


def _refuse_cache_filling_adapters(wrapper: Any) -> None:
    if not _inherits(wrapper, "peft", "PeftModel"):
        return
    for adapter, config in wrapper.peft_config.items():
        method = getattr(config.peft_type, "value", config.peft_type)
        if method in _CACHE_FILLING_ADAPTERS:
            raise NotImplementedError(
                f"unwrap: a PEFT adapter must leave the key/value cache to the model, got adapter "
                f"'{adapter}' of type {method}, which fills a stock cache with learned vectors; "
                "use another type of adapter, or run the model unpatched"
            )


def _stated_bits(config: Any) -> int | None:
    """Read the weight bits from a quantization config: an object, or the dict of a config.json."""

    def get(key: str) -> Any:
        return config.get(key) if isinstance(config, dict) else getattr(config, key, None)

    if get("load_in_4bit"):
        return 4
    if get("load_in_8bit"):
        return 8
    for key in ("bits", "w_bit", "nbits", "num_bits"):
        bits = get(key)
        bits = getattr(bits, "bits", bits)  # GPTQModel states GGUF formats as an object
        is_number = isinstance(bits, int | float) and not isinstance(bits, bool)
        if is_number and float(bits).is_integer():
            return int(bits)
    return None


def _remedy(found: Any) -> str:
    if isinstance(found, str | os.PathLike):
        return f"load it first: {_LOAD}"
    if found is None:
        return f"pass the model that {_LOAD} returned"
    if isinstance(found, type):
        return "pass a model, not its class"
    if _inherits(found, "transformers", "PreTrainedTokenizerBase"):
        return "pass the model, not its tokenizer"
    for attribute in _USUAL_ATTRIBUTES:
        inner = getattr(found, attribute, None)
        if _inherits(inner, "transformers", "GenerationMixin"):
            return f"pass its .{attribute}, {_name(inner)}"
    return f"pass what {_LOAD}, GPTQModel.load or AutoGPTQForCausalLM.from_quantized returned"


def _name(thing: Any) -> str:
    if isinstance(thing, str):
        return f"the string {thing!r}"
    return f"the class {thing.__name__}" if isinstance(thing, type) else type(thing).__name__
