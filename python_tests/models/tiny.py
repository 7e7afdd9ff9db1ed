"""Tiny random models of the families that are served, built in code, and inputs for them."""

from __future__ import annotations

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 128

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

FAMILIES = {
    "llama": lambda **kw: LlamaForCausalLM(LlamaConfig(**(_SIZES | kw))),
    "mistral": lambda **kw: MistralForCausalLM(
        MistralConfig(**(_SIZES | {"sliding_window": None} | kw))
    ),
    "mistral-window": lambda **kw: MistralForCausalLM(
        MistralConfig(**(_SIZES | {"sliding_window": 100} | kw))
    ),
    "qwen2": lambda **kw: Qwen2ForCausalLM(Qwen2Config(**(_SIZES | kw))),
    "qwen2-mixed-window": lambda **kw: Qwen2ForCausalLM(
        Qwen2Config(
            **(_SIZES | {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 1})
            | kw
        )
    ),
    "qwen3": lambda **kw: Qwen3ForCausalLM(Qwen3Config(**(_SIZES | {"head_dim": 32} | kw))),
}
"""One builder a family; keyword arguments go to its configuration."""


def tiny_model(family: str = "llama", seed: int = 0, **config) -> PreTrainedModel:
    """Build a random model of ``family`` in float32, on the CPU, in eval mode."""
    torch.manual_seed(seed)
    return FAMILIES[family](**config).eval()


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
