"""`output_attentions` on a patched model: the weights of the stock model."""

from __future__ import annotations

import pytest
import torch
from tiny import FAMILIES, left_padded, random_ids, tiny_model

import omlx_cache
from omlx_cache.compat import cache_name

INPUTS = left_padded(random_ids(2, 130), [130, 50])
POSITIONS = (INPUTS["attention_mask"].cumsum(-1) - 1).clamp(min=0)
PAGES = {"block_size": 64, "prefill_chunk": 48, "recent_tokens": 0}


def weights_of(model, split: int = 0, **kwargs) -> list[torch.Tensor]:
    """Attend to INPUTS, at once or in two calls; return the weights of the second."""
    ids, mask = INPUTS["input_ids"], INPUTS["attention_mask"]
    with torch.no_grad():
        if split:
            kwargs[cache_name(type(model).forward)] = omlx_cache.PagedCache(model)
            model(ids[:, :split], attention_mask=mask[:, :split], **kwargs)
        found = model(
            ids[:, split:],
            attention_mask=mask,
            position_ids=POSITIONS[:, split:],
            output_attentions=True,
            **kwargs,
        )
    assert len(found.attentions) == model.config.num_hidden_layers
    return [weights[:1] for weights in found.attentions] + [
        w[1:, :, -50:] for w in found.attentions
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_stock(family):
    model = tiny_model(family)
    want = weights_of(model)
    omlx_cache.patch(model, **PAGES, cache_bits=16)
    for got, stock in zip(weights_of(model), want, strict=True):
        torch.testing.assert_close(got, stock, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("bits", [8, 4])
def test_later_calls_see_quantized_history(bits):
    model = tiny_model()
    want = [w[:, :, -3:] for w in weights_of(model)]
    omlx_cache.patch(model, **PAGES, cache_bits=bits)
    got = weights_of(model, split=127)
    for weights, stock in zip(got[:3], want, strict=False):
        assert weights.shape == stock.shape == (1, 4, 3, 130)
        assert 0 < (weights - stock).abs().max() < (0.02 if bits == 8 else 0.5)
        torch.testing.assert_close(weights.sum(-1), torch.ones(1, 4, 3))


def test_a_window_leaves_zeros_behind_and_keeps_the_sinks():
    model = omlx_cache.patch(tiny_model(), **PAGES, window_size=40, sink_tokens=4)
    first = weights_of(model)[0][0, :, -1]
    assert (first[:, :4] > 0).all()
    assert (first[:, -40:] > 0).all()
    assert not first[:, 4:-40].any()


def test_generate_returns_them_and_nothing_is_kept():
    model = omlx_cache.patch(tiny_model(), **PAGES)
    cache = omlx_cache.PagedCache(model)
    out = model.generate(
        **INPUTS,
        max_new_tokens=3,
        do_sample=False,
        output_attentions=True,
        return_dict_in_generate=True,
        **{cache_name(type(model).forward): cache},
    )
    shapes = [tuple(step[0].shape) for step in out.attentions]
    assert shapes == [(2, 4, 130, 130), (2, 4, 1, 131), (2, 4, 1, 132)]
    assert cache.steps.weights is None


def test_a_compiled_model_refuses():
    model = omlx_cache.patch(tiny_model())
    cache = {cache_name(type(model).forward): omlx_cache.PagedCache(model)}
    with pytest.raises(Exception, match="can't be served by a compiled model"):
        torch.compile(model, backend="eager", fullgraph=True)(
            random_ids(1, 5), output_attentions=True, **cache
        )
