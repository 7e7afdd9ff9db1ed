"""Tiny random models of the families that are served, built in code, and inputs for them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 128
WINDOW = 100

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,  # large enough that attention matters to the logits
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}

_TWO = {"num_hidden_layers": 2}
_MIXED = _TWO | {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": WINDOW,
}
_GEMMA = _MIXED | {"head_dim": 256, "query_pre_attn_scalar": 64, "tie_word_embeddings": False}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# The heads of Phi-3 rotate 96 channels: one pair of factors for each two.
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + i / 48 for i in range(48)],
    "long_factor": [1.0 + i / 12 for i in range(48)],
    "original_max_position_embeddings": 4096,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama3-rope": ("llama", _TWO | {"rope_parameters": _LLAMA3}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": WINDOW}),
    "mixtral": ("mixtral", _TWO | {"sliding_window": None, "num_local_experts": 4}),
    "qwen2": ("qwen2", _TWO),
    "qwen2-mixed-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "gemma2": ("gemma2", _GEMMA | {"attn_logit_softcapping": 5.0}),
    "gemma3": ("gemma3_text", _GEMMA),
    "phi3": ("phi3", _TWO | {"hidden_size": 4 * 96, "sliding_window": None}),
    "phi3-longrope": (
        "phi3",
        _TWO
        | {"hidden_size": 4 * 96, "max_position_embeddings": 8192, "rope_parameters": _LONGROPE},
    ),
    "gpt-oss": ("gpt_oss", _MIXED | {"head_dim": 16, "num_local_experts": 4}),
    "smollm3": ("smollm3", _TWO | {"no_rope_layers": [1, 0]}),
    "olmo2": ("olmo2", _TWO),
    "olmo3": ("olmo3", _MIXED),
}
"""Family: its ``model_type``, and what its configuration has beside the common sizes."""

WINDOWED = ("mistral-window", "qwen2-mixed-window", "gemma2", "gemma3", "gpt-oss", "olmo3")
"""Families with layers that have a window of `WINDOW` tokens."""


def tiny_model(family: str = "llama", seed: int = 0, **config) -> PreTrainedModel:
    """Build a random model of ``family`` in float32, on the CPU, in eval mode.

    Parameters that start out constant (norms, biases, learned sinks) are disturbed, and Qwen2 gets
    keys with the bias of a real one: a few channels in the hundreds.
    """
    torch.manual_seed(seed)
    model_type, own = FAMILIES[family]
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **(_SIZES | own | config)),
        dtype=torch.float32,
        # The one that heeds everything: before 5.24 others leave soft caps out in silence.
        attn_implementation="eager",
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.min() == parameter.max() or name.endswith("sinks"):
            parameter.data += torch.randn(parameter.shape, generator=generator) * 0.3
        if family.startswith("qwen2") and name.endswith("k_proj.bias"):
            parameter.data.view(-1, 16)[:, -2:] = 300.0  # the channels that turn least
    return model


def random_ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Return [batch, length] ids, none of which is special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


def left_padded(batch: torch.Tensor, lengths: list[int]) -> dict[str, torch.Tensor]:
    """Keep the last ``lengths[i]`` ids of row ``i``, and pad on the left."""
    mask = torch.zeros_like(batch)
    for row, length in enumerate(lengths):
        mask[row, batch.shape[1] - length :] = 1
    return {"input_ids": batch * mask, "attention_mask": mask}


def greedy(model: PreTrainedModel, inputs: dict, new_tokens: int, **kwargs) -> torch.Tensor:
    """Generate greedily without stopping early; return only the new ids."""
    length = inputs["input_ids"].shape[1]
    out = model.generate(
        **inputs, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, **kwargs
    )
    return out[:, length:]
