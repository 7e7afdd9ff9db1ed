"""Native `append_kv` and `convert_blocks` against the oracle, on every instruction set."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_isas import ISAS, forced_isa

from omlx_kernels import native, reference, vectorized
from omlx_kernels.layout import BLOCK_TIERS, BlockFormat, Tier, TierBlocks

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

per_isa = pytest.mark.parametrize("isa", ISAS)


def copy(blocks: TierBlocks) -> TierBlocks:
    return TierBlocks(**{name: t.clone() for name, t in blocks.tensors().items()})


def assert_same(got: TierBlocks, want: TierBlocks) -> None:
    for name, t in want.tensors().items():
        torch.testing.assert_close(got.tensors()[name], t, rtol=0, atol=0, equal_nan=True)


@per_isa
@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 60),
    st.sampled_from([(Tier.HOT, 64), (Tier.SINK, 4), (Tier.SINK, 7)]),
    st.sampled_from([1, 3]),
    st.sampled_from([8, 40, 64, 96, 128]),
    st.booleans(),
    st.sampled_from(DTYPES),
    st.sampled_from(["packed", "heads first", "every other channel", "expanded"]),
    st.integers(0, 2**20),
)
def test_append(isa, count, kind, heads, dim, rotate_v, dtype, strides, seed):
    gen = torch.Generator().manual_seed(seed)
    tier, size = kind
    fmt = BlockFormat(64, size, heads, dim, dtype)
    want = fmt.allocate(tier, 16, "cpu")
    for t in want.tensors().values():
        t.fill_(float("nan"))
    got = copy(want)
    slots = torch.randperm(16 * size, generator=gen)[:count]
    slots[torch.rand(slots.shape, generator=gen) < 0.2] = -1
    count = slots.shape[0]
    k = torch.randn(count, heads, dim, generator=gen).to(dtype)
    v = torch.randn(count, heads, dim, generator=gen).to(dtype)
    if strides == "heads first":
        k = k.transpose(0, 1).contiguous().transpose(0, 1)
    elif strides == "every other channel":
        v = torch.stack([v, v], -1).flatten(-2)[..., ::2]
    elif strides == "expanded":
        k = k[:, :1].expand(-1, heads, -1)
    reference.append_kv(k, v, want, slots, rotate_v=rotate_v)
    with forced_isa(isa):
        native.append_kv(k, v, got, slots, rotate_v=rotate_v)
    if rotate_v:  # sums in another order
        step = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(got.v, want.v, rtol=step, atol=5e-6, equal_nan=True)
        got.v.copy_(want.v)
    assert_same(got, want)


@pytest.mark.parametrize("rotate_v", [False, True])
def test_append_of_a_prompt_uses_threads(rotate_v):
    fmt = BlockFormat(256, 0, 8, 128, torch.bfloat16)
    want = fmt.allocate(Tier.HOT, 9, "cpu")
    for t in want.tensors().values():
        t.zero_()
    got = copy(want)
    k, v = torch.randn(2, 2000, 8, 128).bfloat16()
    slots = torch.randperm(9 * 256)[:2000]
    vectorized.append_kv(k, v, want, slots, rotate_v=rotate_v)
    native.append_kv(k, v, got, slots, rotate_v=rotate_v)
    if rotate_v:
        torch.testing.assert_close(got.v, want.v, rtol=2**-7, atol=5e-6)
        got.v.copy_(want.v)
    assert_same(got, want)


def filled(blocks: TierBlocks) -> TierBlocks:
    """Fill with what no conversion may leave behind."""
    for t in blocks.tensors().values():
        t.fill_(float("nan") if t.is_floating_point() else 99)
    return blocks


@per_isa
@settings(deadline=None, max_examples=100)
@given(
    st.sampled_from([(a, b) for a in BLOCK_TIERS for b in BLOCK_TIERS if a < b]),
    st.sampled_from([64, 128]),
    st.sampled_from([1, 3]),
    st.sampled_from([8, 32, 40, 64, 80, 104, 128, 200]),
    st.sampled_from(DTYPES),
    st.sampled_from([0.0, 1e-7, 1e-3, 1.0, 100.0, 6e4]),
    st.sampled_from(["random", "constant", "one outlier"]),
    st.integers(0, 2**20),
)
def test_convert(isa, tiers, size, heads, dim, dtype, magnitude, kind, seed):
    gen = torch.Generator().manual_seed(seed)
    source, target = tiers
    fmt = BlockFormat(size, 0, heads, dim, dtype)
    src = fmt.allocate(Tier.HOT, 4, "cpu")
    for t in src.tensors().values():
        x = torch.rand(t.shape, generator=gen) * 2 - 1
        if kind == "constant":
            x = torch.ones_like(x)
        elif kind == "one outlier":
            x[..., 3, 5] = 50.0
        t.copy_((x * magnitude).clamp(-65504, 65504))
    if source is not Tier.HOT:
        hot, src = src, fmt.allocate(source, 4, "cpu")
        everything = torch.arange(4, dtype=torch.int32)
        reference.convert_blocks(hot, src, Tier.HOT, source, everything, everything)
    want = filled(fmt.allocate(target, 5, "cpu"))
    got = copy(want)
    src_ids = torch.tensor([3, 0, 2], dtype=torch.int32)
    dst_ids = torch.tensor([1, 4, 0], dtype=torch.int32)
    reference.convert_blocks(src, want, source, target, src_ids, dst_ids)
    with forced_isa(isa):
        native.convert_blocks(src, got, source, target, src_ids, dst_ids)
    assert_same(got, want)
