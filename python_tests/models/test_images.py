"""Models that read images in their prompt: the tokens of an image are causal like any other."""

from __future__ import annotations

import pytest
import torch
from every_family import tiny_config
from tiny import random_ids
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

import omlx_cache
from omlx_cache.inspection import inspect_model

IMAGE, START, END = 100, 102, 103


def build(architecture: type[PreTrainedModel], kind: type[PretrainedConfig]) -> PreTrainedModel:
    """Build a tiny Qwen-VL for images of 4 x 4 patches, which become 2 x 2 tokens."""
    config = tiny_config(kind)
    config.image_token_id, config.vision_start_token_id, config.vision_end_token_id = (
        IMAGE,
        START,
        END,
    )
    config.text_config.rope_parameters = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [2, 3, 3],
    }
    vision = {"depth": 2, "hidden_size": 64, "embed_dim": 64, "out_hidden_size": 64}
    vision |= {"num_heads": 4, "patch_size": 4, "num_position_embeddings": 16}
    vision |= {"deepstack_visual_indexes": [0]}
    for name, value in vision.items():
        if hasattr(config.vision_config, name):
            setattr(config.vision_config, name, value)
    torch.manual_seed(0)
    model = architecture(config).float().eval()
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize(
    ("architecture", "kind", "chunkable"),
    [
        (Qwen2VLForConditionalGeneration, Qwen2VLConfig, True),
        (Qwen3VLForConditionalGeneration, Qwen3VLConfig, False),  # features enter later layers too
    ],
)
def test_image_in_the_prompt(architecture, kind, chunkable):
    model = build(architecture, kind)
    ids = random_ids(1, 90) % 100
    ids[0, 10:16] = torch.tensor([START, *[IMAGE] * 4, END])
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == IMAGE).int(),
        "pixel_values": torch.randn(16, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    want = model.generate(**inputs, **options)
    spec = inspect_model(model)
    assert spec.chunkable == chunkable
    assert not any(distance.can_pin for distance in spec.sink_distances)
    omlx_cache.patch(model, cache_bits=16, block_size=64, prefill_chunk=12)  # cuts the image
    assert torch.equal(model.generate(**inputs, **options), want)
    inputs["pixel_values"] = torch.randn(16, 3 * 2 * 4 * 4)
    assert not torch.equal(model.generate(**inputs, **options), want)
