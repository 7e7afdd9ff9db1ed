"""Every causal language model of transformers: equal to the stock model, or refused by `patch`."""

from __future__ import annotations

import pytest
import torch
from every_family import build, buildable_families
from tiny import left_padded, random_ids

import omlx_cache
from omlx_cache.compat import uses_attention_interface
from omlx_cache.families import TESTED_FAMILIES
from omlx_cache.inspection import inspect_model
from omlx_cache.paged_layer import PagedLayer

EXACT = {"cache_bits": 16, "block_size": 64, "prefill_chunk": 40}


@pytest.mark.parametrize("family", buildable_families())
def test_served_equal_or_refused(family, monkeypatch):
    """A family of `TESTED_FAMILIES` answers like the stock model; any other is refused.

    ``gemma3`` is the multimodal model around ``gemma3_text``. Before transformers 5.24 some
    families had attention functions of their own.
    """
    model = build(family, device="meta")  # whether it is served doesn't depend on weights
    kind = model.config.get_text_config(decoder=True).model_type
    is_closed = not any(map(uses_attention_interface, model.modules()))
    if kind not in TESTED_FAMILIES or family == "gemma3" or is_closed:
        with pytest.raises(NotImplementedError, match=f"model_type '{kind}'\\) can't be served: "):
            inspect_model(model)
        return
    model = build(family)
    want = answer(model)
    omlx_cache.patch(model, **EXACT)
    got = answer(model)
    assert torch.equal(got.sequences, want.sequences)
    scale = want.logits[0].abs().max()
    torch.testing.assert_close(got.logits, want.logits, rtol=0, atol=2e-5 * scale)
    if hasattr(model.get_decoder(), "rotary_emb"):
        check_sink_distances(model, monkeypatch)


def answer(model):
    """Generate from a left-padded batch that is longer than a block, a chunk and a window."""
    inputs = left_padded(random_ids(2, 90), [90, 31])
    options = {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    return model.generate(
        **inputs, max_new_tokens=6, min_new_tokens=6, output_logits=True, **options
    )


@torch.no_grad()
def check_sink_distances(model, monkeypatch):
    """Check each layer's rotation against the queries that the model makes at two positions.

    A text of one token attends to nothing but itself: all that differs is how queries are rotated.
    """
    attend, seen = PagedLayer.attend, []

    def spy(layer, query, *args, **kwargs):
        seen.append(query)
        return attend(layer, query, *args, **kwargs)

    monkeypatch.setattr(PagedLayer, "attend", spy)
    for position in (9, 2):
        model(random_ids(1, 1), position_ids=torch.tensor([[position]]), use_cache=False)
    distances = inspect_model(omlx_cache.unpatch(model)).sink_distances
    for far, near, distance in zip(
        seen[: len(distances)], seen[len(distances) :], distances, strict=True
    ):
        if not distance.can_pin:
            continue
        moved = far.transpose(1, 2)[0]
        if distance.rotation is not None:
            moved = distance.rotation.rotate(moved, torch.tensor([-7.0]))
        torch.testing.assert_close(moved, near.transpose(1, 2)[0], rtol=1e-4, atol=1e-4)
