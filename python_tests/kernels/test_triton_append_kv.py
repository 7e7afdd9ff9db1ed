"""Triton's `append_kv`: exact copies, any strides, -1 skips, pieces equal the whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_device import needs_device, to_device

import omlx_kernels.triton as kernels
from omlx_kernels import reference
from omlx_kernels.layout import BlockFormat, Tier, TierBlocks

pytestmark = needs_device

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def empty(tier: Tier, heads: int, dim: int, dtype: torch.dtype) -> TierBlocks:
    """Return three blocks (pages) of NaN."""
    blocks = BlockFormat(64, 4, heads, dim, dtype).allocate(tier, 3, "cpu")
    for tensor in blocks.tensors().values():
        tensor.fill_(float("nan"))
    return blocks


def assert_same(got: TierBlocks, want: TierBlocks) -> None:
    """Compare bit for bit, NaN included."""
    for name, tensor in want.tensors().items():
        assert torch.equal(got.tensors()[name].cpu().view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [32, 64, 80, 96, 112, 128, 256])
def test_values_are_rotated_on_request(dim, dtype):
    k, v = torch.randn(2, 5, 3, dim).to(dtype)
    slots = torch.tensor([3, -1, 70, 64, 1])
    got, want = empty(Tier.HOT, 3, dim, dtype), empty(Tier.HOT, 3, dim, torch.float64)
    moved = to_device(got)
    kernels.append_kv(*to_device_all(k, v), moved, to_device(slots), rotate_v=True)
    reference.append_kv(k.double(), v.double(), want, slots, rotate_v=True)
    got = to_cpu(moved)
    assert torch.equal(got.k.double().nan_to_num(9), want.k.nan_to_num(9)), "keys stay as they are"
    # float32 sums, rounded once to the model's dtype; NaN where nothing was written.
    step = torch.finfo(dtype).eps / 2 + 2 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(got.v.double(), want.v, rtol=step, atol=2e-6, equal_nan=True)


@settings(max_examples=20)
@given(
    st.sampled_from([Tier.HOT, Tier.SINK]),
    st.sampled_from([(1, 64), (3, 80), (9, 32), (40, 128)]),
    st.sampled_from(DTYPES),
    st.integers(0, 2**20),
    st.data(),
)
def test_equals_reference(tier, shape, dtype, seed, data):
    heads, dim = shape
    gen = torch.Generator().manual_seed(seed)
    dst = empty(tier, heads, dim, dtype)
    slots = torch.randperm(3 * dst.k.shape[2], generator=gen)[: data.draw(st.integers(1, 12))]
    slots[torch.rand(slots.shape, generator=gen) < 0.3] = -1
    # k as a transposed projection, v with a gap after each channel.
    k = torch.randn(heads, len(slots), dim, generator=gen).to(dtype).transpose(0, 1)
    v = torch.randn(len(slots), heads, 2 * dim, generator=gen).to(dtype)[..., ::2]
    got = to_device(empty(tier, heads, dim, dtype))
    kernels.append_kv(to_device(k), to_device(v), got, to_device(slots))
    reference.append_kv(k, v, dst, slots)
    assert_same(got, dst)


def test_strides_reach_the_kernel(monkeypatch):
    # A copy made on the way would be a second full copy of the prompt.
    monkeypatch.setattr(torch.Tensor, "contiguous", None)
    k = torch.randn(2, 5, 32).transpose(0, 1)
    dst = to_device(empty(Tier.HOT, 2, 32, torch.float32))
    kernels.append_kv(to_device(k), to_device(k), dst, to_device(torch.arange(5)))
    assert torch.equal(dst.k[0, :, :5].cpu(), k.transpose(0, 1))


@pytest.mark.parametrize("cut", [1, 7, 12])
def test_pieces_equal_the_whole(cut):
    k, v = torch.randn(2, 13, 2, 64)
    slots = torch.arange(60, 73)  # across a block boundary
    whole, pieces = (to_device(empty(Tier.HOT, 2, 64, torch.float32)) for _ in range(2))
    kernels.append_kv(*to_device_all(k, v), whole, to_device(slots))
    for part in (slice(None, cut), slice(cut, None)):
        kernels.append_kv(*to_device_all(k[part], v[part]), pieces, to_device(slots[part]))
    assert_same(pieces, to_cpu(whole))


def to_device_all(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Copy several tensors to the kernels' device."""
    return [to_device(t) for t in tensors]


def to_cpu(blocks: TierBlocks) -> TierBlocks:
    """Copy blocks to the CPU."""
    return TierBlocks(**{name: t.cpu() for name, t in blocks.tensors().items()})
