"""Triton's `convert_blocks`, between any two tiers, against the reference on the same blocks."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_device import needs_device, to_device

import omlx_kernels.triton as kernels
from omlx_kernels import reference
from omlx_kernels.layout import BLOCK_TIERS, BlockFormat, Tier, TierBlocks
from omlx_kernels.quantization import read_blocks

pytestmark = needs_device

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
PAIRS = list(itertools.combinations(BLOCK_TIERS, 2))
IDS = torch.tensor([2, 0], dtype=torch.int32)
TO = torch.tensor([1, 2], dtype=torch.int32)


def formats(heads: int, dim: int, dtype: torch.dtype) -> BlockFormat:
    """Return a format with two quantization groups a block."""
    return BlockFormat(128, 4, heads, dim, dtype)


def stale(fmt: BlockFormat, tier: Tier) -> TierBlocks:
    """Return blocks full of what must not survive."""
    blocks = fmt.allocate(tier, 3, "cpu")
    for tensor in blocks.tensors().values():
        tensor.fill_(float("nan") if tensor.is_floating_point() else 77)
    return blocks


def stored_as(hot: TierBlocks, fmt: BlockFormat, tier: Tier) -> TierBlocks:
    """Return the hot blocks as the reference stores them in ``tier``."""
    if tier is Tier.HOT:
        return hot
    blocks, ids = fmt.allocate(tier, 3, "cpu"), torch.arange(3, dtype=torch.int32)
    reference.convert_blocks(hot, blocks, Tier.HOT, tier, ids, ids)
    return blocks


def check(hot: TierBlocks, fmt: BlockFormat, source: Tier, target: Tier) -> None:
    """Compare scales exactly, codes up to ties, and everything with what was converted."""
    src = stored_as(hot, fmt, source)
    got, want = to_device(stale(fmt, target)), stale(fmt, target)
    kernels.convert_blocks(to_device(src), got, source, target, to_device(IDS), to_device(TO))
    reference.convert_blocks(src, want, source, target, IDS, TO)
    got = TierBlocks(**{name: t.cpu() for name, t in got.tensors().items()})
    for name, b in want.tensors().items():
        a = got.tensors()[name]
        letter = "kv".index(name[0])
        copied = source.bits is not None and source.bits[letter] == target.bits[letter]
        if b.is_floating_point():
            assert torch.equal(a.view(torch.int16), b.view(torch.int16)), name
        else:
            assert (a != b).double().mean() < (0 if copied else 1e-3) + 1e-9  # ties only
    ids, to = IDS.long(), TO.long()
    before = read_blocks(src, source, ids, torch.float64)
    after = read_blocks(got, target, to, torch.float64)
    steps = (
        got.k_scale[to].double().repeat_interleave(64, -2),
        got.v_scale[to].double()[..., None]
        if target.bits[1] == 8
        else got.v_scale[to].double().repeat_interleave(64, -1)[..., : fmt.head_dim],
    )
    for x, x_hat, step in zip(before, after, steps, strict=True):
        # Codes are found in float32: half a step, plus float32's rounding of x / step.
        assert bool(((x - x_hat).abs() <= step / 2 + 1e-6 * x.abs()).all())


@settings(max_examples=24)
@given(
    st.sampled_from(PAIRS),
    st.sampled_from([(1, 64), (2, 80), (1, 128), (1, 32), (1, 256)]),
    st.sampled_from(DTYPES),
    st.floats(-6, 4),
    st.integers(0, 2**20),
)
def test_equals_quantization(tiers, shape, dtype, magnitude, seed):
    heads, dim = shape
    fmt = formats(heads, dim, dtype)
    gen = torch.Generator().manual_seed(seed)
    hot = fmt.allocate(Tier.HOT, 3, "cpu")
    for x in (hot.k, hot.v):
        x.copy_(torch.randn(x.shape, generator=gen) * 10.0**magnitude)
    check(hot, fmt, *tiers)


@pytest.mark.parametrize("tiers", PAIRS, ids=lambda pair: f"{pair[0].name}-{pair[1].name}")
@pytest.mark.parametrize("dim", [64, 80, 96, 112])
def test_every_pair_of_tiers(tiers, dim):
    fmt = formats(1, dim, torch.float16)
    hot = fmt.allocate(Tier.HOT, 3, "cpu")
    hot.k.normal_()
    hot.v.normal_()
    check(hot, fmt, *tiers)


@pytest.mark.parametrize("target", BLOCK_TIERS[1:])
@pytest.mark.parametrize("dtype", DTYPES)
def test_awkward_rows(dtype, target):
    fmt = formats(1, 64, dtype)
    # 65280 is the largest bfloat16 below 65504.
    largest = 65280.0 if dtype is torch.bfloat16 else 65504.0
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
    check(hot, fmt, Tier.HOT, target)
