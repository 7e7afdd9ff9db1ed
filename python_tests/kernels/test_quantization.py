"""The quantizers: error bounds against the stored scales, and the inputs that break naive ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omlx_kernels import reference, vectorized
from omlx_kernels.layout import BLOCK_TIERS, BlockFormat, Tier
from omlx_kernels.quantization import (
    dequantize_k,
    dequantize_v4,
    dequantize_v8,
    hadamard,
    quantize_k,
    quantize_v4,
    quantize_v8,
)

INPUTS = {
    "normal": lambda *shape: torch.randn(shape),
    "constant rows": lambda *shape: torch.randn(shape[0], 1, 1).expand(shape).clone(),
    "zero": lambda *shape: torch.zeros(shape),
    "tiny": lambda *shape: torch.randn(shape) * 1e-7,
    "huge": lambda *shape: torch.randn(shape) * 15000,
    "+-max float16": lambda *shape: torch.randn(shape).sign() * 65504,
    "one huge channel": lambda *shape: torch.randn(shape) + 400 * (torch.arange(shape[-1]) == 3),
    "one huge token": lambda *shape: (
        torch.randn(shape) * (1 + 500 * (torch.arange(shape[-2]) == 5))[:, None]
    ),
}


def within_half_a_step(x, x_hat, scale):
    # The products are rounded to float32 again, a hair beside the exact half step.
    slack = 1e-6 * x.abs().amax() + 1e-9
    return ((x - x_hat).abs() <= scale * 0.5 + slack).all()


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("bits", [4, 8])
def test_keys_stay_within_half_a_step(kind, bits):
    k = INPUTS[kind](2, 128, 80).clamp(-65504, 65504)
    codes, scale, zero = quantize_k(k, bits)
    assert codes.shape == (2, 128, 80 * bits // 8)
    assert scale.isfinite().all()
    assert (scale > 0).all()
    x_hat = dequantize_k(codes, scale, zero, bits, torch.float64)
    assert within_half_a_step(k, x_hat, scale.double().repeat_interleave(64, -2))


@pytest.mark.parametrize("kind", INPUTS)
def test_8_bit_values_stay_within_half_a_step(kind):
    v = INPUTS[kind](2, 64, 80).clamp(-65504, 65504)
    codes, scale = quantize_v8(v)
    assert (scale > 0).all()
    x_hat = dequantize_v8(codes, scale, torch.float64)
    assert within_half_a_step(v, x_hat, scale.double()[..., None])


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("dim", [32, 64, 80, 128])
def test_4_bit_values_stay_within_half_a_step(kind, dim):
    v = INPUTS[kind](2, 64, dim).clamp(-65504, 65504)
    codes, scale, zero = quantize_v4(v)
    assert codes.shape == (2, 64, dim // 2)
    assert (scale > 0).all()
    x_hat = dequantize_v4(codes, scale, zero, torch.float64)
    step = scale.double().repeat_interleave(64, -1)[..., :dim]
    assert within_half_a_step(v, x_hat, step)


@pytest.mark.parametrize("kind", ["normal", "one huge channel", "one huge token", "huge"])
@pytest.mark.parametrize("bits", [4, 8])
def test_quantizing_again_changes_nothing(kind, bits):
    """A block that is re-opened and converted again must not drift."""
    k = v = INPUTS[kind](2, 64, 64)
    for _ in range(3):
        first = dequantize_k(*quantize_k(k, bits), bits, torch.float32)
        again = dequantize_k(*quantize_k(first, bits), bits, torch.float32)
        step = quantize_k(k, bits)[1].float()
        assert ((again - first).abs() <= 1.01 * step).all()  # a zero below the range may move once
        third = dequantize_k(*quantize_k(again, bits), bits, torch.float32)
        assert torch.allclose(third, again, rtol=1e-5, atol=1e-6)
        k = third
    values = quantize_v8(v) if bits == 8 else quantize_v4(v)
    undo = dequantize_v8 if bits == 8 else dequantize_v4
    first = undo(*values, torch.float32)
    again = undo(*(quantize_v8 if bits == 8 else quantize_v4)(first), torch.float32)
    third = undo(*(quantize_v8 if bits == 8 else quantize_v4)(again), torch.float32)
    assert torch.allclose(third, again, rtol=1e-5, atol=1e-6)


@given(st.sampled_from([16, 32, 64, 80, 96, 112, 128, 256]), st.integers(0, 2**20))
def test_hadamard_is_its_own_inverse_and_keeps_norms(dim, seed):
    x = torch.randn(5, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    torch.testing.assert_close(hadamard(hadamard(x)), x)
    torch.testing.assert_close(hadamard(x).norm(dim=-1), x.norm(dim=-1))
    assert not torch.allclose(hadamard(x), x)


@pytest.mark.parametrize(
    ("dim", "size"), [(64, 64), (128, 128), (256, 256), (80, 16), (96, 32), (112, 16), (40, 8)]
)
def test_hadamard_rotates_by_the_largest_power_of_two_that_divides(dim, size):
    matrix = hadamard(torch.eye(dim, dtype=torch.float64))
    blocks = torch.block_diag(*[torch.ones(size, size, dtype=torch.float64)] * (dim // size))
    torch.testing.assert_close(matrix.abs(), blocks * size**-0.5)


@pytest.mark.parametrize("bits", [8, 4])
def test_biased_keys_never_collapse(bits):
    """A few channels with |bias| = 400, as in Qwen2: KL of the attention distribution."""
    generator = torch.Generator().manual_seed(1)
    k = torch.randn(1024, 128, generator=generator)
    bias = torch.zeros(128)
    bias[[5, 40, 99]] = torch.tensor([400.0, -400.0, 400.0])
    q = torch.randn(64, 128, generator=generator)

    def kl_of(x_hat: torch.Tensor) -> torch.Tensor:
        p, p_hat = (q @ x.mT * 128**-0.5 for x in (k + bias, x_hat))
        return torch.nn.functional.kl_div(
            p_hat.log_softmax(-1), p.log_softmax(-1), log_target=True, reduction="batchmean"
        )

    x_hat = dequantize_k(*quantize_k(k + bias, bits), bits, torch.float32)
    assert kl_of(x_hat) <= {8: 0.001, 4: 0.05}[bits]
    per_token = dequantize_v8(*quantize_v8(k + bias), torch.float32)
    assert kl_of(per_token) > 0.2, "the case is none: with a scale a token the same keys collapse"


@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize(
    ("source", "target"),
    [(a, b) for a in BLOCK_TIERS for b in BLOCK_TIERS if a < b],
)
def test_vectorized_conversion_equals_the_oracle(source, target, head_dim):
    layout = BlockFormat(128, 4, 2, head_dim, torch.float32)
    hot = layout.allocate(Tier.HOT, 3, "cpu")
    hot.k.normal_()
    hot.v.normal_()
    ids = torch.tensor([2, 0], dtype=torch.int32)
    src = hot
    if source is not Tier.HOT:
        src = layout.allocate(source, 3, "cpu")
        everything = torch.arange(3, dtype=torch.int32)
        reference.convert_blocks(hot, src, Tier.HOT, source, everything, everything)
    results = []
    for implementation in (reference, vectorized):
        dst = layout.allocate(target, 4, "cpu")
        for tensor in dst.tensors().values():
            tensor.fill_(77)
        to = torch.tensor([1, 3], dtype=torch.int32)
        implementation.convert_blocks(src, dst, source, target, ids, to)
        results.append(dst.tensors())
    for name, want in results[0].items():
        got = results[1][name]
        assert torch.equal(got[[0, 2]], torch.full_like(got[[0, 2]], 77)), "an unlisted block"
        if want.is_floating_point():
            torch.testing.assert_close(got, want, rtol=2e-3, atol=1e-6)
        else:
            assert (got != want).float().mean() < 1e-3  # ties may fall either way


def test_keys_are_copied_when_only_the_values_get_colder():
    layout = BlockFormat(64, 0, 1, 64, torch.float32)
    hot, warm, cool = (layout.allocate(t, 1, "cpu") for t in (Tier.HOT, Tier.K8V8, Tier.K8V4))
    hot.k.normal_()
    hot.v.normal_()
    zero = torch.zeros(1, dtype=torch.int32)
    vectorized.convert_blocks(hot, warm, Tier.HOT, Tier.K8V8, zero, zero)
    vectorized.convert_blocks(warm, cool, Tier.K8V8, Tier.K8V4, zero, zero)
    for part in ("k", "k_scale", "k_zero"):
        assert torch.equal(getattr(warm, part), getattr(cool, part))
