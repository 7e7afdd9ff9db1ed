"""`paged_attention`: the torch path against the float64 oracle, and the oracle against SDPA."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import make_case

from omlx_kernels import ops, reference, vectorized
from omlx_kernels.layout import BLOCK_TIERS


def test_oracle_equals_sdpa_without_quantization():
    case = make_case([130], [130], num_q_heads=4, num_kv_heads=2, hot_blocks=9)
    out = reference.paged_attention(case.q, case.blocks, case.meta, sm_scale=0.125)
    want = F.scaled_dot_product_attention(
        case.q.transpose(0, 1)[None],
        case.keys[0][None],
        case.values[0][None],
        is_causal=True,
        scale=0.125,
        enable_gqa=True,
    )
    torch.testing.assert_close(out, want[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


@st.composite
def ragged(draw):
    lens = draw(st.lists(st.integers(0, 300), min_size=1, max_size=3))
    decode = draw(st.booleans())
    new = [min(n, 1) if decode else draw(st.integers(0, n)) for n in lens]
    window = draw(st.none() | st.integers(1, 320))
    return lens, new, window


@st.composite
def features(draw):
    """Draw the tiers of the old blocks, and what a call may ask for beside a window."""
    tiers = draw(st.sampled_from([(t,) for t in BLOCK_TIERS[1:]] + [BLOCK_TIERS[1:]]))
    return {
        "cold_tiers": tiers,
        "rotated_v": draw(st.booleans()),
        "softcap": draw(st.sampled_from([None, None, 5.0])),
        "learned_sinks": draw(st.booleans()),
        "sink_q": draw(st.booleans()),
    }


@settings(max_examples=120)
@given(
    ragged(),
    features(),
    st.sampled_from([(1, 1), (3, 1), (4, 2)]),
    st.sampled_from([32, 64, 80]),
    st.sampled_from([0, 1, 4, 64]),
    st.booleans(),
    st.integers(0, 2**20),
)
def test_vectorized_equals_oracle(shape, wanted, heads, head_dim, sinks, keep_sinks, seed):
    lens, new, window = shape
    case = make_case(
        lens,
        new,
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        sink_tokens=sinks,
        window_size=window,
        cold_tiers=wanted["cold_tiers"],
        rotated_v=wanted["rotated_v"],
        seed=seed,
    )
    kwargs = case.attention_kwargs() | {
        "window_size": window,
        "keep_sinks": keep_sinks,
        "rotated_v": wanted["rotated_v"],
        "softcap": wanted["softcap"],
        "sink_logits": torch.randn(heads[0]) if wanted["learned_sinks"] else None,
        "sink_q": torch.randn_like(case.q) if wanted["sink_q"] else None,
    }
    want = reference.paged_attention(case.q, case.blocks, case.meta, **kwargs)
    got = vectorized.paged_attention(case.q, case.blocks, case.meta, **kwargs)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5)


def test_rotation_changes_nothing_where_nothing_is_rounded():
    plain = make_case([200], [3], hot_blocks=9, seed=3)
    rotated = make_case([200], [3], hot_blocks=9, rotated_v=True, seed=3)
    want = reference.paged_attention(plain.q, plain.blocks, plain.meta, sm_scale=0.1)
    got = reference.paged_attention(
        rotated.q, rotated.blocks, rotated.meta, sm_scale=0.1, rotated_v=True
    )
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_sinks_outside_of_the_window_are_scored_with_their_own_query():
    case = make_case([150], [20], sink_tokens=4, hot_blocks=9)
    kwargs = {"sm_scale": 0.1, "window_size": 60}
    plain = reference.paged_attention(case.q, case.blocks, case.meta, **kwargs)
    same = reference.paged_attention(case.q, case.blocks, case.meta, sink_q=case.q, **kwargs)
    other = reference.paged_attention(case.q, case.blocks, case.meta, sink_q=-case.q, **kwargs)
    assert torch.equal(plain, same)
    assert not torch.allclose(plain, other)
    wide = {"sm_scale": 0.1, "window_size": 150}  # every sink is inside the window
    inside = reference.paged_attention(case.q, case.blocks, case.meta, sink_q=-case.q, **wide)
    assert torch.equal(
        inside, reference.paged_attention(case.q, case.blocks, case.meta, sm_scale=0.1)
    )


def test_tables_are_checked_once_for_all_layers():
    meta = make_case([10], [1]).meta
    with pytest.raises(ValueError, match=r"block_table must be contiguous torch\.int32 \(1, 2\)"):
        replace(meta, block_table=meta.block_table.long())
    with pytest.raises(ValueError, match=r"tier_starts must be contiguous torch\.int32 \(1, 5\)"):
        replace(meta, tier_starts=meta.tier_starts[:, :3].contiguous())
    with pytest.raises(ValueError, match="splits must be on cpu like seq_lens, got meta"):
        replace(meta, splits=meta.splits.to("meta"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(1, 2, 32)}, "q must be .*head_dim=64"),
        ({"q": torch.zeros(1, 3, 64)}, "a multiple of kv_heads=2"),
        ({"q": torch.zeros(1, 2, 64).half()}, "like the hot blocks"),
        ({"window_size": 0}, "window_size must be None or >= 1, got 0"),
        ({"softcap": 0.0}, "softcap must be None or > 0"),
        ({"sink_q": torch.zeros(1, 2, 32)}, "sink_q must be like q"),
        ({"sink_logits": torch.zeros(3)}, r"sink_logits must be \[num_q_heads=2\]"),
    ],
)
def test_attention_refuses_by_name(change, message):
    case = make_case([10], [1], num_kv_heads=2)
    kwargs = {"q": case.q, "sm_scale": 1.0} | change
    with pytest.raises(ValueError, match=message):
        ops.paged_attention(kwargs.pop("q"), case.blocks, case.meta, **kwargs)
