"""`paged_attention(lse=...)`, and tables that list a part of what is stored: merging two parts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_isas import ISAS, forced_isa
from strategies import Case, build_splits, make_case, poison
from tolerance import oracle
from triton_device import needs_device, to_device

from omlx_kernels import native, ops
from omlx_kernels.layout import BLOCK_TIERS, LayerBlocks, Tier, TierBlocks
from omlx_kernels.merge import merge_attention

TRITON = pytest.param("triton", marks=needs_device)
NATIVE = [f"native {isa}" for isa in ISAS] + (["native with torch"] if ISAS else [])
IMPLEMENTATIONS = [TRITON, "vectorized", *NATIVE]

NATIVE_STEP = 2e-4
"""Of scores and of outputs around 1: queries and weights are 15-bit integers there."""


@contextmanager
def forced(implementation: str) -> Iterator[None]:
    """Run the body with one of `IMPLEMENTATIONS`."""
    name, _, how = implementation.partition(" ")
    with ops.use_implementation(name), pytest.MonkeyPatch.context() as patch:
        if how == "with torch":  # where it attends to several queries of a sequence
            patch.setattr(native.library, "max_queries", lambda: 1)
        with forced_isa(how) if how in ISAS else nullcontext():
            yield


def attend(case: Case, implementation: str, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the lse that an implementation writes, over a buffer full of NaN."""
    if implementation == "triton":
        case, kwargs = to_device(case), {k: to_device(v) for k, v in kwargs.items()}
    lse = torch.full(case.q.shape[:2], float("nan"), device=case.q.device)
    kwargs = case.attention_kwargs() | {"lse": lse} | kwargs
    with forced(implementation):
        out = ops.paged_attention(case.q, case.blocks, case.meta, **kwargs)
    return out.cpu(), lse.cpu()


def listing(case: Case, listed: torch.Tensor, sinks: list[bool], per_split: int = 2) -> Case:
    """Return the case with tables of some entries and sink pages; the other ones are poisoned."""
    meta, blocks = case.meta, case.blocks
    table, starts = torch.full_like(meta.block_table, 2**30), torch.zeros_like(meta.block_starts)
    bounds = torch.zeros_like(meta.tier_starts)
    clean = {tier: torch.zeros(blocks.tier(tier).num_blocks, dtype=torch.bool) for tier in Tier}
    for seq in range(meta.num_seqs):
        if sinks[seq]:
            clean[Tier.SINK][meta.sink_pages[seq]] = True
        count = 0
        for i, tier in enumerate(BLOCK_TIERS):
            for entry in range(*meta.tier_starts[seq, i : i + 2].tolist()):
                if listed[seq, entry]:
                    clean[tier][meta.block_table[seq, entry]] = True
                    table[seq, count] = meta.block_table[seq, entry]
                    starts[seq, count] = meta.block_starts[seq, entry]
                    count += 1
            bounds[seq, i + 1] = count
    stored = [bool(blocks.sink_tokens and n) for n in meta.seq_lens.tolist()]
    has_page = [a and b for a, b in zip(sinks, stored, strict=True)]
    splits, split_starts = build_splits(bounds, has_page, per_split)
    part = dataclasses.replace(
        meta,
        block_table=table,
        block_starts=starts,
        tier_starts=bounds,
        sink_pages=torch.where(torch.tensor(sinks), meta.sink_pages, -1),
        splits=splits,
        split_starts=split_starts,
    )
    tiers = {}
    for tier in Tier:
        old = blocks.tier(tier).tensors()
        tiers[tier.name.lower()] = TierBlocks(**{k: t.clone() for k, t in old.items()})
    layer = LayerBlocks(**tiers)
    poison(layer)
    for tier in Tier:
        for name, tensor in layer.tier(tier).tensors().items():
            tensor[clean[tier]] = getattr(blocks.tier(tier), name)[clean[tier]]
    return dataclasses.replace(case, meta=part, blocks=layer)


def halves(case: Case, seed: int) -> tuple[Case, Case]:
    """Deal a case's blocks and sink pages to two parts, each wholly to one of them."""
    gen = torch.Generator().manual_seed(seed)
    listed = torch.rand(case.meta.block_table.shape, generator=gen) < 0.5
    sinks = torch.rand(case.meta.num_seqs, generator=gen) < 0.5
    return listing(case, listed, sinks.tolist()), listing(case, ~listed, (~sinks).tolist())


def draw_case(data, **kwargs) -> tuple[Case, dict]:
    """Draw ragged sequences and what a call may ask for."""
    lens = data.draw(st.lists(st.integers(0, 270), min_size=1, max_size=3), label="lens")
    most = data.draw(st.sampled_from([1, 20]), label="most")
    new = [data.draw(st.integers(0, min(n, most)), label="new") for n in lens]
    heads = data.draw(st.sampled_from([(1, 1), (3, 1), (4, 2)]), label="heads")
    case = make_case(
        lens,
        new,
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=data.draw(st.sampled_from([32, 64, 80]), label="head_dim"),
        sink_tokens=data.draw(st.sampled_from([0, 4, 64]), label="sinks"),
        cold_tiers=BLOCK_TIERS[1:],
        seed=data.draw(st.integers(0, 2**20), label="seed"),
        **kwargs,
    )
    options = {
        "window_size": data.draw(st.none() | st.integers(1, 300), label="window"),
        "keep_sinks": data.draw(st.booleans(), label="keep"),
        "softcap": data.draw(st.sampled_from([None, 5.0]), label="softcap"),
    }
    if data.draw(st.booleans(), label="learned sinks"):
        options["sink_logits"] = torch.randn(heads[0]) * 3
    if data.draw(st.booleans(), label="sink_q"):
        options["sink_q"] = torch.randn_like(case.q)
    return case, options


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@settings(max_examples=15)
@given(data=st.data())
def test_lse_equals_the_oracle(implementation, data):
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    case, kwargs = draw_case(data, dtype=dtype)
    step = torch.finfo(dtype).eps + NATIVE_STEP  # scores and outputs are around 1
    if data.draw(st.booleans(), label="a part"):
        case, _ = halves(case, data.draw(st.integers(0, 99), label="deal"))
    want, want_lse = attend(case, "reference", **kwargs)
    got, lse = attend(case, implementation, **kwargs)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=step)
    torch.testing.assert_close(got, want, rtol=0, atol=4 * step)


@pytest.mark.parametrize(
    ("implementation", "other"),
    [
        *(pytest.param(*p.values, p.values[0], marks=p.marks) for p in [TRITON]),
        *((name, name) for name in ["reference", "vectorized", *NATIVE]),
        *(pytest.param("triton", name, marks=needs_device) for name in NATIVE[:1]),
    ],
)
@settings(max_examples=10)
@given(data=st.data())
def test_merged_parts_equal_all_at_once(implementation, other, data):
    case, kwargs = draw_case(data)
    first, second = halves(case, data.draw(st.integers(0, 99), label="deal"))
    parts = [attend(first, implementation, **kwargs)]
    want = oracle(case, **case.attention_kwargs(), **kwargs)
    kwargs.pop("sink_logits", None)  # counted once
    parts.append(attend(second, other, **kwargs))
    torch.testing.assert_close(merge_attention(parts).double(), want, rtol=0, atol=4 * NATIVE_STEP)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("new", [1, 20])
def test_old_blocks_and_what_is_on_the_device(implementation, new):
    # As with offloading: old blocks only in one part, the sinks and the new tokens in the other.
    case = make_case(
        [400, 150], [new, 1], num_q_heads=4, num_kv_heads=2, dtype=torch.float16,
        cold_tiers=BLOCK_TIERS[1:],
    )  # fmt: skip
    old = torch.zeros(case.meta.block_table.shape, dtype=torch.bool)
    old[0] = case.meta.block_starts[0] < 200
    away, here = listing(case, old, [False] * 2), listing(case, ~old, [True] * 2)
    parts = [attend(part, implementation) for part in (here, away)]
    merged = merge_attention(parts)
    assert merged.dtype == torch.float16
    want = oracle(case, **case.attention_kwargs())
    step = torch.finfo(torch.float16).eps + NATIVE_STEP
    torch.testing.assert_close(merged.double(), want, rtol=0, atol=4 * step)
    assert torch.equal(merged[new:], parts[0][0][new:]), "the second sequence is all on the device"
    assert (parts[1][1][new:] == -math.inf).all()


@pytest.mark.parametrize("implementation", ["reference", *IMPLEMENTATIONS])
@pytest.mark.parametrize("new", [1, 20])
@pytest.mark.parametrize("sink_tokens", [0, 4])
@pytest.mark.parametrize("window", [None, 30])
def test_nothing_listed(implementation, new, sink_tokens, window):
    case = make_case([90, 40], [new, 0], sink_tokens=sink_tokens, num_q_heads=3)
    nothing = torch.zeros(case.meta.block_table.shape, dtype=torch.bool)
    case = listing(case, nothing, [False] * 2)
    kwargs = {"window_size": window, "sink_q": case.q}
    out, lse = attend(case, implementation, **kwargs)
    assert not out.any()
    assert (lse == -math.inf).all()
    logits = torch.tensor([1.5, -2.0, 0.0])
    out, lse = attend(case, implementation, sink_logits=logits, **kwargs)
    assert not out.any()
    torch.testing.assert_close(lse, logits.expand(new, 3))


@pytest.mark.parametrize("implementation", ["reference", "vectorized", *NATIVE])
def test_rows_of_no_sequence(implementation):
    case = make_case([100, 80], [1, 2])
    longer = dataclasses.replace(case, q=torch.cat([case.q, torch.randn(2, 2, 64)]))
    out, lse = attend(longer, implementation)
    assert lse[:3].isfinite().all()
    assert (lse[3:] == -math.inf).all()
    assert not out[3:].any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("new", [1, 7])
def test_output_and_mass_are_the_same_with_and_without_lse(implementation, new):
    case = make_case([100, 40], [new, 1], num_q_heads=4, num_kv_heads=2)
    shape = (case.meta.splits.shape[0], 4)
    masses = [torch.zeros(shape), torch.zeros(shape)]
    if implementation == "triton":
        masses = [to_device(mass) for mass in masses]
    out, lse = attend(case, implementation, split_mass=masses[0])
    plain, _ = attend(case, implementation, lse=None, split_mass=masses[1])
    alone, lse_alone = attend(case, implementation)
    for got in (plain, alone):
        torch.testing.assert_close(got, out, rtol=0, atol=NATIVE_STEP)
    torch.testing.assert_close(lse, lse_alone, rtol=0, atol=NATIVE_STEP)
    torch.testing.assert_close(*masses, rtol=0, atol=NATIVE_STEP)


@pytest.mark.skipif(not ISAS, reason="the native library is not built")
def test_lse_is_the_same_on_several_threads():
    case = make_case([4000], [1], num_q_heads=8, num_kv_heads=4, head_dim=128, block_size=256)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            found.append(attend(case, f"native {ISAS[-1]}")[1])
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(3),
        torch.zeros(9, 2),
        torch.zeros(4, 2).double(),
        torch.zeros(2, 4).T,
        torch.zeros(4, 2, device="meta"),
    ],
)
def test_wrong_buffers_are_refused(wrong):
    case = make_case([10], [4], num_kv_heads=2)
    with pytest.raises(ValueError, match=r"lse must be contiguous float32 \[num_tokens=4, num_q_h"):
        ops.paged_attention(case.q, case.blocks, case.meta, sm_scale=1.0, lse=wrong)


def test_merging_unseen_parts():
    out = torch.tensor([1.0, 2.0, float("nan"), 4.0]).view(4, 1, 1)
    lse = torch.tensor([0.0, 0.0, -math.inf, -math.inf]).view(4, 1)
    other = torch.tensor([3.0, float("nan"), 7.0, float("nan")]).view(4, 1, 1)
    other_lse = torch.tensor([math.log(3.0), -math.inf, 90.0, -math.inf]).view(4, 1)
    want = torch.tensor([2.5, 2.0, 7.0, 0.0]).view(4, 1, 1)
    torch.testing.assert_close(merge_attention([(out, lse), (other, other_lse)]), want)
    torch.testing.assert_close(merge_attention([(other, other_lse), (out, lse)]), want)


def test_merging_many_parts_in_the_first_dtype():
    outs, lses = torch.randn(5, 3, 2, 8), torch.randn(5, 3, 2) * 100
    weights = torch.softmax(lses.double(), 0)[..., None]
    got = merge_attention(list(zip(outs, lses, strict=True)))
    torch.testing.assert_close(got.double(), (weights * outs).sum(0), rtol=1e-5, atol=1e-5)
    assert merge_attention([(outs[0].bfloat16(), lses[0]), (outs[1], lses[1])]).dtype == (
        torch.bfloat16
    )
    torch.testing.assert_close(merge_attention([(outs[0], lses[0])]), outs[0])
    assert merge_attention([(outs[0, :0], lses[0, :0])] * 2).shape == (0, 2, 8)


@pytest.mark.parametrize(
    ("out", "lse", "message"),
    [
        (torch.zeros(3, 2, 4), torch.zeros(3, 2), r"parts\[1\] out must be floats .*\[3, 2, 8\]"),
        (torch.zeros(3, 2, 8).int(), torch.zeros(3, 2), r"parts\[1\] out must be floats"),
        (torch.zeros(3, 2, 8), torch.zeros(2, 3), r"parts\[1\] lse must be float32 .*=3"),
        (torch.zeros(3, 2, 8), torch.zeros(3, 2).half(), r"parts\[1\] lse must be float32"),
        (torch.zeros(3, 2, 8, device="meta"), torch.zeros(3, 2), r"parts\[1\] must be on cpu"),
    ],
)
def test_merging_refuses_by_name(out, lse, message):
    with pytest.raises(ValueError, match=message):
        merge_attention([(torch.zeros(3, 2, 8), torch.zeros(3, 2)), (out, lse)])
    with pytest.raises(ValueError, match="parts must be at least one"):
        merge_attention([])
