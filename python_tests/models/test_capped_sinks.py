"""Sinks at a capped distance: past the window a query looks at them from position ``window``."""

from __future__ import annotations

import torch
from every_family import build
from tiny import random_ids, tiny_model
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import omlx_cache
from omlx_cache.compat import cache_name
from omlx_cache.inspection import inspect_model
from omlx_cache.rotary import SinkDistance

WINDOW, SINKS = 90, 4


def naive_attention(model, hidden: torch.Tensor) -> torch.Tensor:
    """Run the only attention layer of ``model`` with every score written out."""
    attention, heads = model.model.layers[0].self_attn, 4
    length = hidden.shape[1]
    shape = (1, length, -1, attention.head_dim)
    q, k, v = (
        p(hidden).view(shape).transpose(1, 2)
        for p in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    position = torch.arange(length)[None]
    rotated_k = apply_rotary_pos_emb(k, k, *model.model.rotary_emb(k, position))[0]
    far_q, near_q = (
        apply_rotary_pos_emb(q, q, *model.model.rotary_emb(q, p))[0]
        for p in (position, position.clamp(max=WINDOW))
    )
    i, j = torch.arange(length)[:, None], torch.arange(length)[None]
    is_sink, outside = j < SINKS, j <= i - WINDOW
    scores = (
        torch.where(is_sink & outside, near_q @ rotated_k.mT, far_q @ rotated_k.mT)
        * attention.head_dim**-0.5
    )
    scores = scores.masked_fill((j > i) | (outside & ~is_sink), float("-inf"))
    out = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    return attention.o_proj(out)


@torch.no_grad()
def test_attention_past_the_window_equals_the_written_out_scores():
    model = tiny_model(num_hidden_layers=1)
    ids = random_ids(1, 300)
    layer, seen = model.model.layers[0], []
    layer.self_attn.register_forward_hook(lambda module, args, out: seen.append(out[0]))
    hidden = layer.input_layernorm(model.get_input_embeddings()(ids))
    want = naive_attention(model, hidden)
    omlx_cache.patch(model, cache_bits=16, window_size=WINDOW, block_size=64, prefill_chunk=70)
    cache = omlx_cache.PagedCache(model)
    name = cache_name(type(model).forward)
    model(ids[:, :-5], **{name: cache})
    for i in range(295, 300):
        model(ids[:, i : i + 1], **{name: cache})
    torch.testing.assert_close(torch.cat(seen, 1), want, rtol=1e-4, atol=1e-4)


def test_frequencies_that_depend_on_the_length_are_left_alone():
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = tiny_model(rope_parameters=scaling)
    assert set(inspect_model(model).sink_distances) == {SinkDistance(None, can_pin=True)}


def layer_kinds(model):
    """Say for each layer how it may look at the sinks."""
    return [
        "unpinned" if not d.can_pin else "as it is" if d.rotation is None else "capped"
        for d in inspect_model(model).sink_distances
    ]


def test_layers_of_one_model_differ():
    """SmolLM3 rotates in some layers only, Gemma 3 by other frequencies in its window layers."""
    assert layer_kinds(tiny_model("smollm3")) == ["capped", "as it is"]
    gemma = tiny_model("gemma3")
    assert layer_kinds(gemma) == ["capped", "capped"]
    local, full = (d.rotation.inv_freq for d in inspect_model(gemma).sink_distances)
    assert torch.equal(local, gemma.model.rotary_emb.sliding_attention_inv_freq)
    assert torch.equal(full, gemma.model.rotary_emb.full_attention_inv_freq)
    assert not torch.equal(local, full)


def test_an_unknown_rotation_leaves_the_sinks_to_the_window():
    """HunYuan scales channels after it has rotated them; a window then keeps no sinks."""
    model = build("hunyuan_v1_dense")
    assert layer_kinds(model) == ["unpinned", "unpinned"]
    omlx_cache.patch(model, window_size=64)
    assert [group.keep_sinks for group in omlx_cache.PagedCache(model).groups] == [False]
    omlx_cache.patch(model, window_size=None)
    assert [group.keep_sinks for group in omlx_cache.PagedCache(model).groups] == [True]
