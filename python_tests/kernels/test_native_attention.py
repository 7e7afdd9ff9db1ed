"""Native `paged_attention` against the float64 oracle, on every instruction set of the machine."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_isas import ISAS, forced_isa
from strategies import make_case

from omlx_kernels import native, reference, vectorized
from omlx_kernels.layout import BLOCK_TIERS

# What the output type can hold: one step between neighbours, relative.
STEP = {torch.float32: 0.0, torch.bfloat16: 2**-7, torch.float16: 2**-10}
# Of outputs around 1: queries as 15-bit integers, weights as 15-bit integers.
QUANTIZED_DOT = 2e-4

FEW = 16  # queries of a sequence that are never left to torch
ANY = 2**31  # as a limit: never any

per_isa = pytest.mark.parametrize("isa", ISAS)


def run(case, isa="", **kwargs):
    kwargs = case.attention_kwargs() | kwargs
    with forced_isa(isa or ISAS[-1]):
        got = native.paged_attention(case.q, case.blocks, case.meta, **kwargs)
    return got, reference.paged_attention(case.q, case.blocks, case.meta, **kwargs)


def assert_agrees(got, want, atol=QUANTIZED_DOT):
    torch.testing.assert_close(got, want, rtol=STEP[got.dtype], atol=atol)


@st.composite
def ragged(draw):
    lens = draw(st.lists(st.integers(0, 400), min_size=1, max_size=3))
    limit = draw(st.sampled_from([1, 1, FEW]))
    new = [min(n, draw(st.integers(0, limit))) for n in lens]
    window = draw(st.none() | st.integers(1, 420))
    return lens, new, window


@st.composite
def features(draw):
    """Draw the tiers of old blocks, and what a call may ask for beside a window."""
    tiers = draw(st.sampled_from([(t,) for t in BLOCK_TIERS[1:]] + [BLOCK_TIERS[1:]]))
    case = {"cold_tiers": tiers, "rotated_v": draw(st.booleans())}
    call = {
        "keep_sinks": draw(st.booleans()),
        "softcap": draw(st.sampled_from([None, None, 5.0])),
        "sink_logits": draw(st.booleans()),
        "sink_q": draw(st.booleans()),
    }
    return case, call


def tensors_for(case, call, seed):
    """Turn the drawn features of a call into its arguments."""
    gen = torch.Generator().manual_seed(seed)
    q = case.q
    logits = torch.randn(q.shape[1], generator=gen)
    sink_q = torch.randn(q.shape, generator=gen).to(q.dtype)
    return call | {
        "sink_logits": logits if call["sink_logits"] else None,
        "sink_q": sink_q if call["sink_q"] else None,
    }


@per_isa
@settings(deadline=None, max_examples=120)
@given(
    ragged(),
    features(),
    st.sampled_from([(1, 1), (3, 1), (4, 2), (9, 3), (7, 1)]),
    st.sampled_from([8, 32, 40, 64, 80, 96, 104, 128, 256]),
    st.sampled_from([0, 1, 4, 64, 70]),
    st.sampled_from([64, 128]),
    st.sampled_from(list(STEP)),
    st.integers(0, 2**20),
)
def test_ragged(isa, shape, wanted, heads, head_dim, sinks, block_size, dtype, seed):
    lens, new, window = shape
    stored, call = wanted
    case = make_case(
        lens,
        new,
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        sink_tokens=sinks,
        block_size=block_size,
        dtype=dtype,
        window_size=window,
        seed=seed,
        **stored,
    )
    call = tensors_for(case, call, seed) | {"rotated_v": stored["rotated_v"]}
    assert_agrees(*run(case, isa, window_size=window, **call))


@per_isa
@pytest.mark.parametrize(
    ("heads", "head_dim"), [((9, 3), 64), ((32, 8), 128), ((32, 32), 128), ((8, 1), 576)]
)
@pytest.mark.parametrize("cold_tiers", [BLOCK_TIERS[1:2], BLOCK_TIERS[1:]])
def test_real_shapes(isa, heads, head_dim, cold_tiers):
    case = make_case(
        [1500, 700],
        [1, 1],
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        block_size=256,
        dtype=torch.bfloat16,
        cold_tiers=cold_tiers,
        rotated_v=len(cold_tiers) > 1,
    )
    assert_agrees(*run(case, isa, rotated_v=len(cold_tiers) > 1))


@per_isa
@pytest.mark.parametrize("dtype", list(STEP))
def test_without_quantized_blocks_only_the_output_is_rounded(isa, dtype):
    case = make_case([333, 64], [2, 1], hot_blocks=99, num_q_heads=3, dtype=dtype)
    assert_agrees(*run(case, isa), atol=2e-6)


@per_isa
def test_window_edges(isa):
    for window in (63, 64, 65, 66, 127, 128, 129, 300, 301, 302):
        case = make_case([301], [1], window_size=window, num_q_heads=2)
        assert_agrees(*run(case, isa, window_size=window))


@per_isa
@pytest.mark.parametrize("tier", BLOCK_TIERS[1:])
def test_biased_keys_do_not_lose_precision(isa, tier):
    case = make_case([700], [1], head_dim=128, hot_blocks=1, cold_tiers=(tier,))
    case.blocks.tier(tier).k_zero[..., 5] += 300.0
    case.blocks.sink.k[..., 5] += 300.0
    case.blocks.hot.k[..., 5] += 300.0
    assert_agrees(*run(case, isa))


@per_isa
@pytest.mark.parametrize("tier", BLOCK_TIERS[1:])
def test_scores_far_apart_and_tiny_values(isa, tier):
    case = make_case([500], [1], num_q_heads=2, cold_tiers=(tier,))
    case.q.mul_(200.0)
    case.blocks.tier(tier).v_scale.fill_(2.0**-24)
    assert_agrees(*run(case, isa), atol=2e-3)


@per_isa
@pytest.mark.parametrize(("queries", "limit"), [(1, FEW), (FEW + 1, FEW), (FEW + 1, ANY)])
def test_nothing_but_learned_sinks_is_seen(isa, queries, limit, monkeypatch):
    monkeypatch.setattr(native.library, "max_queries", lambda: limit)
    case = make_case([300], [queries], window_size=1, num_q_heads=2)
    case.meta.tier_starts[:] = 0
    logits = torch.tensor([3.0, float("-inf")])
    got, want = run(case, isa, window_size=1, keep_sinks=False, sink_logits=logits)
    assert not want.any()
    assert_agrees(got, want)


def test_sink_queries_may_have_strides_of_their_own():
    case = make_case([300], [2], window_size=9, num_q_heads=2)
    sink_q = torch.randn(2, 2, 64)
    want = native.paged_attention(
        case.q, case.blocks, case.meta, sm_scale=0.1, window_size=9, sink_q=sink_q
    )
    for other in (sink_q.transpose(0, 1).contiguous().transpose(0, 1), sink_q.mT.contiguous().mT):
        got = native.paged_attention(
            case.q, case.blocks, case.meta, sm_scale=0.1, window_size=9, sink_q=other
        )
        assert torch.equal(got, want)


def test_queries_with_strides_and_rows_of_no_sequence():
    case = make_case([100, 80], [1, 2], num_q_heads=2)
    want = reference.paged_attention(case.q, case.blocks, case.meta, sm_scale=0.1)
    wide = torch.full((5, 4, 64), float("nan"))
    wide[:3, ::2] = case.q
    got = native.paged_attention(wide[:, ::2], case.blocks, case.meta, sm_scale=0.1)
    assert_agrees(got[:3], want)
    assert not got[3:].any()
    flipped = case.q.transpose(1, 2).contiguous().transpose(1, 2)
    assert_agrees(native.paged_attention(flipped, case.blocks, case.meta, sm_scale=0.1), want)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_thread_counts_agree(threads):
    before = torch.get_num_threads()
    case = make_case([3000, 140, 0], [1, 100, 0], num_q_heads=6, num_kv_heads=3, head_dim=128)
    try:
        torch.set_num_threads(threads)
        assert_agrees(*run(case))
    finally:
        torch.set_num_threads(before)


def test_physical_order_changes_nothing():
    case = make_case([1000], [1], num_q_heads=2)
    first = run(case)[0]
    order = torch.randperm(case.blocks.k8v8.num_blocks)
    moved = {n: t[order] for n, t in case.blocks.k8v8.tensors().items()}
    blocks = dataclasses.replace(case.blocks, k8v8=type(case.blocks.k8v8)(**moved))
    table = case.meta.block_table.clone()
    hot, total = case.meta.tier_starts[0, 1], case.meta.tier_starts[0, 2]
    table[0, hot:total] = torch.argsort(order)[table[0, hot:total].long()].int()
    meta = dataclasses.replace(case.meta, block_table=table)
    second = native.paged_attention(case.q, blocks, meta, **case.attention_kwargs())
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_nan_in_a_query_reaches_its_own_output_only():
    case = make_case([300, 300], [1, 1])
    case.q[0] = float("nan")
    got = native.paged_attention(case.q, case.blocks, case.meta, **case.attention_kwargs())
    assert got[0].isnan().all()
    assert not got[1].isnan().any()


@per_isa
@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.tuples(st.integers(0, 250), st.integers(0, 90)), min_size=1, max_size=3),
    st.none() | st.integers(1, 300),
    features(),
    st.sampled_from([0, 4, 64]),
    st.sampled_from([64, 80]),
    st.sampled_from(list(STEP)),
    st.sampled_from([64, 2**12, 2**16, 2**30]),
    st.sampled_from([FEW, ANY]),
    st.integers(0, 2**20),
)
def test_extend(isa, lengths, window, wanted, sinks, head_dim, dtype, scratch, limit, seed):
    stored, call = wanted
    case = make_case(
        [past + new for past, new in lengths],
        [new for _, new in lengths],
        num_q_heads=6,
        num_kv_heads=3,
        head_dim=head_dim,
        sink_tokens=sinks,
        dtype=dtype,
        window_size=window,
        seed=seed,
        **stored,
    )
    call = tensors_for(case, call, seed)
    kwargs = call | {"window_size": window, "rotated_v": stored["rotated_v"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native.extend, "SCRATCH_BYTES", scratch)
        patch.setattr(native.library, "max_queries", lambda: limit)
        got, want = run(case, isa, **kwargs)
    if limit == ANY:
        assert_agrees(got, want)
        return
    # torch attends here: allow twice the error of plain torch at the same precision.
    kwargs |= case.attention_kwargs()
    plain = vectorized.paged_attention(case.q, case.blocks, case.meta, **kwargs)
    error = (plain.float() - want.float()).abs().max().item() if want.numel() else 0.0
    torch.testing.assert_close(got, want, rtol=2 * STEP[dtype], atol=2 * error + QUANTIZED_DOT)
