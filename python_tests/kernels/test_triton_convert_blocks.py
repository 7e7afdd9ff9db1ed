"""Triton's `convert_blocks` against `omlx_kernels.quantization`, and the bound on the error."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_device import needs_device, to_device

import omlx_kernels.triton as kernels
from omlx_kernels import reference
from omlx_kernels.layout import BlockFormat, Tier, TierBlocks
from omlx_kernels.quantization import dequantize_k8, dequantize_v8

pytestmark = needs_device

IDS = torch.tensor([2, 0], dtype=torch.int32)
TO = torch.tensor([1, 2], dtype=torch.int32)


def formats(heads: int, dim: int, dtype: torch.dtype) -> BlockFormat:
    """Return a format with two quantization groups a block."""
    return BlockFormat(128, 4, heads, dim, dtype)


def convert(hot: TierBlocks, fmt: BlockFormat) -> tuple[TierBlocks, TierBlocks]:
    """Convert with Triton and with the reference, over the same stale content."""
    got, want = (fmt.allocate(Tier.K8V8, 3, "cpu") for _ in range(2))
    for blocks in (got, want):
        for tensor in blocks.tensors().values():
            tensor.fill_(float("nan") if tensor.is_floating_point() else 77)
    moved = to_device(got)
    kernels.convert_blocks(to_device(hot), moved, to_device(IDS), to_device(TO))
    reference.convert_blocks(hot, want, IDS, TO)
    return TierBlocks(**{name: t.cpu() for name, t in moved.tensors().items()}), want


def check(hot: TierBlocks, fmt: BlockFormat) -> None:
    """Compare scales exactly, codes up to ties, and both with the original."""
    got, want = convert(hot, fmt)
    for name in ("k_scale", "k_zero", "v_scale"):
        a, b = got.tensors()[name], want.tensors()[name]
        assert torch.equal(a.view(torch.int16), b.view(torch.int16)), name
    for name in ("k", "v"):
        a, b = got.tensors()[name], want.tensors()[name]
        assert int((a.int() - b.int()).abs().max()) <= 1
        assert (a != b).double().mean() < 1e-4  # ties only
    for i, j in zip(IDS.tolist(), TO.tolist(), strict=True):
        k = dequantize_k8(got.k[j], got.k_scale[j], got.k_zero[j], torch.float64)
        v = dequantize_v8(got.v[j], got.v_scale[j], torch.float64)
        k_step = got.k_scale[j].double().repeat_interleave(64, -2)
        v_step = got.v_scale[j].double()[..., None]
        for x, x_hat, step in ((hot.k[i], k, k_step), (hot.v[i], v, v_step)):
            # Codes are found in float32: half a step, plus float32's rounding of x / step.
            slack = 1e-6 * x.double().abs()
            assert bool(((x.double() - x_hat).abs() <= step / 2 + slack).all())


@settings(max_examples=15)
@given(
    st.sampled_from([(1, 64), (2, 80), (1, 128), (1, 32)]),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    st.floats(-6, 4),
    st.integers(0, 2**20),
)
def test_equals_quantization(shape, dtype, magnitude, seed):
    heads, dim = shape
    fmt = formats(heads, dim, dtype)
    gen = torch.Generator().manual_seed(seed)
    hot = fmt.allocate(Tier.HOT, 3, "cpu")
    for x in (hot.k, hot.v):
        x.copy_(torch.randn(x.shape, generator=gen) * 10.0**magnitude)
    check(hot, fmt)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_awkward_rows(dtype):
    fmt = formats(1, 64, dtype)
    largest = min(65504.0, torch.finfo(dtype).max)
    if dtype is torch.bfloat16:
        largest = 65280.0  # the largest bfloat16 below 65504
    hot = fmt.allocate(Tier.HOT, 3, "cpu")
    for x in (hot.k, hot.v):
        x.normal_()
        x[0] = 0.0
        x[2, :, :, ::4] = 3.25  # constant channels
        x[2, :, ::4] = -7.0  # constant tokens
        x[2, :, 1::2, 5] = largest
        x[2, :, ::2, 5] = -largest
        x[2, :, :, 9] *= 3000.0  # one huge channel
        x[2, :, 77] = 2.0**-24
    check(hot, fmt)


def test_no_stale_scale_survives():
    fmt = formats(2, 64, torch.float16)
    hot = fmt.allocate(Tier.HOT, 3, "cpu")
    hot.k.normal_(std=100.0)
    hot.v.normal_(std=100.0)
    dst = to_device(fmt.allocate(Tier.K8V8, 3, "cpu"))
    kernels.convert_blocks(to_device(hot), dst, to_device(IDS), to_device(TO))
    hot.k.mul_(0.001)
    hot.v.mul_(0.001)
    kernels.convert_blocks(to_device(hot), dst, to_device(IDS), to_device(TO))
    _, want = convert(hot, fmt)
    assert torch.equal(dst.k_scale[1].cpu(), want.k_scale[1])
    assert torch.equal(dst.v_scale[2].cpu(), want.v_scale[2])
