"""A tiny random model of every causal language model that transformers has, built from its name.

Configurations name the same sizes differently, and check them against each other, so a size is set
where a configuration has it, and a few families get their own. What is still unlike a real model
is random: parameters that start out constant (biases, norms, learned sinks) are disturbed, so that
an attention which forgets one of them is noticed.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 128
LAYERS = 2
WINDOW = 20

_SIZES: list[tuple[int | float | None, str]] = [
    (VOCABULARY, "vocab_size vocab_size_per_layer_input"),
    (64, "hidden_size n_embd d_model dim embedding_size word_embed_proj_dim mamba_d_ssm"),
    (96, "intermediate_size n_inner ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size"),
    (
        LAYERS,
        "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers "
        "num_decoder_layers num_encoder_layers",
    ),
    (
        4,
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads num_experts "
        "encoder_attention_heads num_local_experts n_routed_experts moe_num_experts "
        "linear_num_key_heads linear_num_value_heads mamba_n_heads",
    ),
    (2, "num_key_value_heads num_kv_heads num_experts_per_tok moe_k moe_topk"),
    (
        16,
        "head_dim attention_head_dim swa_head_dim q_lora_rank kv_lora_rank v_head_dim "
        "qk_head_dim query_pre_attn_scalar hidden_size_per_layer_input linear_key_head_dim "
        "linear_value_head_dim mamba_d_head",
    ),
    (8, "qk_nope_head_dim qk_rope_head_dim rotary_dim state_size mamba_d_state"),
    (
        32,
        "moe_intermediate_size shared_expert_intermediate_size "
        "moe_shared_expert_intermediate_size expert_ffn_hidden_size global_head_dim",
    ),
    (
        1,
        "n_shared_experts n_group topk_group num_expert_groups bos_token_id "
        "num_global_key_value_heads first_k_dense_replace",
    ),
    (512, "max_position_embeddings n_positions n_ctx max_seq_len"),
    (WINDOW, "sliding_window attention_window_size sliding_window_size"),
    (24, "attention_chunk_size"),
    (0, "pad_token_id"),
    (0.2, "initializer_range init_std"),  # large enough that attention matters to the logits
    (None, "eos_token_id"),
]

_SIZE_OF = {name: size for size, names in _SIZES for name in names.split()}

_OWN_SIZES: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_d_head": 32},
    "dots3_note_text": {"num_key_value_heads": 4},
    "gemma3n_text": {"num_kv_shared_layers": 1, "layer_types": ["full_attention"] * LAYERS},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    "granitemoehybrid": {"mamba_d_head": 32},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "moshi": {"audio_vocab_size": 128},
    "reformer": {"axial_pos_embds_dim": (16, 48), "axial_pos_shape": (16, 32), "is_decoder": True},
    "zaya": {"num_experts_per_tok": 1},
}


_UNBUILT = {
    "cohere_compass_text": "its default configuration names no rotary parameters for its layers",
    "dbrx": "its configuration lacks the rotary parameters that its model reads",
    "gemma3n": "needs timm; its text model is gemma3n_text",
    "gemma4_assistant": "its parts can't be made small",
    "gemma4_unified_assistant": "its parts can't be made small",
    "qwen4_exp": "its default configuration is incomplete",
    "qwen4_exp_text": "its default configuration is incomplete",
    "zamba": "its default configuration fits no other number of layers",
    "zamba2": "its default configuration fits no other number of layers",
}
"""Families that can't be built from their configuration's defaults, and why."""


def buildable_families() -> list[str]:
    """Return the names of the families that `build` knows how to build."""
    return [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in _UNBUILT]


def build(model_type: str, device: str = "cpu") -> PreTrainedModel:
    """Build the tiny model of a family in float32, in eval mode; on ``meta`` it has no weights."""
    architecture = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    # A multimodal family's text model is built from a part of the family's configuration.
    own = architecture.config_class
    kind = own if own is not None and own.model_type != "" else CONFIG_MAPPING[model_type]
    torch.manual_seed(0)
    with torch.device(device):
        model = architecture(tiny_config(kind)).float().eval()
    if device != "meta":
        # The one that heeds everything: before 5.24 others leave soft caps out in silence.
        model.set_attn_implementation("eager")
    for parameter in model.parameters():
        if device != "meta" and parameter.numel() and parameter.min() == parameter.max():
            parameter.data += torch.randn(parameter.shape) * 0.3
    return model


def tiny_config(kind: type[PretrainedConfig]) -> PretrainedConfig:
    """Return a configuration of ``kind`` with the sizes above, and so its parts."""
    own = _OWN_SIZES.get(kind.model_type, {})
    known = kind().to_dict()
    sizes = {n: s for n, s in _SIZE_OF.items() if n in known and not isinstance(known[n], list)}
    for name in ("layer_types", "mlp_layer_types"):
        if known.get(name) and name not in own:  # keep each type of layer once
            kinds = list(dict.fromkeys(known[name]))
            sizes[name] = [kinds[i % len(kinds)] for i in range(LAYERS)]
    for name, part in (getattr(kind, "sub_configs", None) or {}).items():
        if part is AutoConfig:
            part_type = (known.get(name) or {}).get("model_type")
            part = CONFIG_MAPPING[part_type] if part_type else None
        if part is not None:
            sizes[name] = tiny_config(part).to_dict()
    return kind(**{**sizes, **own})
