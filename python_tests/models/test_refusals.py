"""What can't be served right is refused by `patch`, by name and with the reason."""

from __future__ import annotations

import logging

import pytest
import torch
from every_family import build, buildable_families, tiny_config
from tiny import random_ids, tiny_model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.llama.modeling_llama import LlamaAttention

import omlx_cache

FAMILIES = {
    "mamba": "keeps a state|linear_attention",
    "jamba": "keeps a state|linear_attention",
    "falcon_h1": "keeps a state|layers of type hybrid",
    "recurrent_gemma": "keeps a state|linear_attention",
    "qwen3_next": "layers of type linear_attention",
    "lfm2": "layers of type conv",
    "llama4_text": "layers of type chunked_attention",
    "deepseek_v2": "latent vectors",
    "deepseek_v3": "latent vectors",
    "gemma3": "Gemma3Model builds masks of its own",
    "gemma3n_text": "share keys and values",
    "mllama": "cross-attention",
    "bart": "one attention module per layer",
    "bert": "BertModel must build its masks",
    "dory": "for other layers than its own",
    "minimax_m3_vl_text": "for block_indices",
    "moshi": "several codebooks",
    "doge": "masks of its own|its own attention masks",
    "opt": "positions follow the attention mask",
    "diffllama": "attends twice",
}


def check_refused(model, reason):
    before = set(vars(model))
    name = type(model).__name__
    with pytest.raises(NotImplementedError, match=rf"{name} \(model_type '.*'\) .*({reason})"):
        omlx_cache.patch(model)
    assert set(vars(model)) == before


@pytest.mark.parametrize("family", [name for name in buildable_families() if name in FAMILIES])
def test_families(family):
    check_refused(build(family, device="meta"), FAMILIES[family])


def paligemma():
    with torch.device("meta"):
        return PaliGemmaForConditionalGeneration(tiny_config(PaliGemmaConfig))


def gpt2_with_cross_attention():
    sizes = {"vocab_size": 50, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, add_cross_attention=True))


def bidirectional_gemma():
    return tiny_model("gemma3", use_bidirectional_attention=True)


def large_heads():
    return tiny_model(head_dim=320)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (paligemma, "PaliGemmaModel builds masks of its own"),
        (gpt2_with_cross_attention, "cross-attention"),
        (bidirectional_gemma, "not causal"),
        (large_heads, "head_dim must be at most 256, got 320"),
    ],
)
def test_models(make, reason):
    check_refused(make(), reason)


def test_an_encoder_decoder():
    model = T5ForConditionalGeneration(T5Config(vocab_size=50, d_model=16, num_layers=1, d_ff=16))
    with pytest.raises(NotImplementedError, match="encoder-decoder"):
        omlx_cache.patch(model)


class BiasedAttention(LlamaAttention):
    """Asks its attention function for something that `patch` has never heard of."""

    def forward(self, hidden_states, cache=None, **kwargs):
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        attention_interface = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        return attention_interface(self, hidden_states, position_bias=1, **kwargs)


class StatefulMLP(torch.nn.Module):
    """Keeps something in the cache that isn't keys and values."""

    def forward(self, x, cache=None):
        return x


def test_modules_that_a_remote_model_may_bring():
    model = tiny_model()
    model.model.layers[1].self_attn = BiasedAttention(model.config, 1)
    check_refused(model, "BiasedAttention asks its attention function for position_bias")
    model = tiny_model()
    model.model.layers[1].mlp = StatefulMLP()
    check_refused(model, "StatefulMLP keeps something else than keys and values")


class NewConfig(LlamaConfig):
    """A family that nobody has tested."""

    model_type = "brand-new"


def test_an_untested_family_is_served_with_a_warning(caplog):
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96}
    model = LlamaForCausalLM(NewConfig(**sizes, num_hidden_layers=2, num_attention_heads=4)).eval()
    ids = random_ids(1, 30)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "omlx_cache"):
        want = model(ids).logits
        omlx_cache.patch(model, cache_bits=16)
        torch.testing.assert_close(model(ids).logits, want, rtol=1e-4, atol=1e-4)
    assert "model_type 'brand-new') is none of the families that the tests compare" in caplog.text
    caplog.clear()
    omlx_cache.patch(tiny_model())
    assert not caplog.text
