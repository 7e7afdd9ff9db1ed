"""`paged_attention`: the torch path against the float64 oracle, and the oracle against SDPA."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import make_case

from omlx_kernels import ops, reference, vectorized


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


@settings(deadline=None, max_examples=60)
@given(
    ragged(),
    st.sampled_from([(1, 1), (3, 1), (4, 2)]),
    st.sampled_from([32, 64, 80]),
    st.sampled_from([0, 1, 4, 64]),
    st.booleans(),
    st.integers(0, 2**20),
)
def test_vectorized_equals_oracle(shape, heads, head_dim, sinks, keep_sinks, seed):
    lens, new, window = shape
    case = make_case(
        lens,
        new,
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        sink_tokens=sinks,
        window_size=window,
        seed=seed,
    )
    kwargs = dict(case.attention_kwargs(), window_size=window, keep_sinks=keep_sinks)
    want = reference.paged_attention(case.q, case.blocks, case.meta, **kwargs)
    got = vectorized.paged_attention(case.q, case.blocks, case.meta, **kwargs)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_ops_refuse_wrong_table_dtype():
    case = make_case([10], [1])
    bad = type(case.meta)(**{**vars(case.meta), "block_table": case.meta.block_table.long()})
    with pytest.raises(ValueError, match=r"paged_attention: block_table must be contiguous int32"):
        ops.paged_attention(case.q, case.blocks, bad, sm_scale=1.0)
