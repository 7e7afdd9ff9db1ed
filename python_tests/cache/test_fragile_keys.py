"""Which layers keep 8-bit keys: what biases do to 4 bits, as estimated and as measured."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omlx_cache.fragile_keys import LIMIT, estimated_divergence
from omlx_cache.rotary import Rotation
from omlx_kernels.quantization import dequantize_k, quantize_k

DIM, TOKENS = 64, 1024
INV_FREQ = 10000.0 ** (-torch.arange(0, DIM, 2) / DIM)


def measured_divergence(bias: torch.Tensor, rotation: Rotation, seed: int) -> float:
    """Return what 4-bit keys do to the attention of one head with unit keys and queries of 2."""
    generator = torch.Generator().manual_seed(seed)
    keys, queries = (torch.randn(TOKENS, DIM, generator=generator) for _ in range(2))
    keys = rotation.rotate((keys + bias)[:, None], torch.arange(TOKENS).float())[:, 0]
    stored = dequantize_k(*quantize_k(keys, 4), 4, torch.float32)
    p, q = ((2 * queries[:128] @ k.T / DIM**0.5).log_softmax(-1) for k in (keys, stored))
    return (p.exp() * (p - q)).sum(-1).mean().item()


def bias_on(pair: int, amplitude: float, is_interleaved: bool) -> torch.Tensor:
    bias = torch.zeros(DIM)
    bias[2 * pair if is_interleaved else pair] = amplitude
    return bias


@settings(max_examples=30)
@given(
    st.integers(0, DIM // 2 - 1),
    st.sampled_from([20.0, 60.0, 200.0]),
    st.booleans(),
    st.integers(0, 9),
)
def test_the_estimate_is_what_a_bias_adds_or_more(pair, amplitude, is_interleaved, seed):
    rotation = Rotation(INV_FREQ, is_interleaved)
    bias = bias_on(pair, amplitude, is_interleaved)
    estimate = estimated_divergence(bias[None], torch.zeros(1, DIM), rotation).item()
    added = measured_divergence(bias, rotation, seed) - measured_divergence(
        0 * bias, rotation, seed
    )
    assert estimate < LIMIT or added > estimate / 20, "not raised without a reason"
    assert estimate >= LIMIT or added < 2 * LIMIT, "what is lost is raised"


def test_a_constant_costs_nothing():
    rotary = Rotation(INV_FREQ[: DIM // 4])  # the channels from DIM / 2 on stay where they are
    bias = torch.zeros(2, DIM)
    bias[0, DIM // 2 :] = 1000.0
    bias[1, 0] = 1000.0
    still, turning = estimated_divergence(bias, torch.zeros(2, DIM), rotary).tolist()
    assert still == 0
    assert turning > 1


def test_an_unknown_rotation_may_be_any():
    bias = bias_on(DIM // 2 - 1, 100.0, False)[None]
    known, unknown = (
        estimated_divergence(bias, torch.zeros(1, DIM), rotation).item()
        for rotation in (Rotation(INV_FREQ), None)
    )
    assert known < LIMIT < unknown


@pytest.mark.parametrize("size", [1.0, 10.0])
def test_queries_with_a_bias_ask_more(size):
    bias = bias_on(3, 50.0, False)[None]
    plain = estimated_divergence(bias, torch.zeros(1, DIM), Rotation(INV_FREQ))
    asked = estimated_divergence(bias, bias_on(3, size, False)[None], Rotation(INV_FREQ))
    assert torch.allclose(asked / plain, torch.tensor(1 + size**2 / 2 / 4))
