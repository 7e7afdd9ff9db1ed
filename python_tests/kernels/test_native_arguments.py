"""Malformed arguments of the native ops: an error that names them; nothing written, no crash."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_isas import ISAS
from strategies import make_case

from omlx_kernels import ops
from omlx_kernels.layout import LayerBlocks, TierBlocks

pytestmark = pytest.mark.skipif(not ISAS, reason="the native library is not built")

TABLES = (
    "block_table", "block_starts", "tier_starts", "sink_pages", "seq_lens", "query_start_loc",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _native():
    with ops.use_implementation("native"):
        yield


def attend(case, **changes):
    meta = dataclasses.replace(case.meta, **changes)
    return ops.paged_attention(case.q, case.blocks, meta, sm_scale=0.1)


@pytest.mark.parametrize(
    ("name", "index", "value"),
    [
        ("block_table", (0, 0), -1),
        ("block_table", (0, 0), 10**6),
        ("block_table", (0, 2), 99),
        ("tier_starts", (0, 2), 10**6),
        ("tier_starts", (0, 0), -3),
        ("tier_starts", (0, 1), 100),
        ("sink_pages", (1,), -1),
        ("sink_pages", (0,), 77),
        ("seq_lens", (1,), -5),
        ("seq_lens", (0,), 0),
        ("query_start_loc", (0,), -1),
        ("query_start_loc", (2,), 1000),
        ("query_start_loc", (1,), 5),
    ],
)
@pytest.mark.parametrize("queries", [1, 20])
def test_index_out_of_range(name, index, value, queries):
    case = make_case([300, 200], [queries, 1])
    table = getattr(case.meta, name).clone()
    table[index] = value if name != "query_start_loc" or value != 5 else queries + 5
    with pytest.raises(ValueError, match=r"paged_attention: \w+.* must .* got"):
        attend(case, **{name: table})


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(TABLES),
    st.integers(0, 10**6),
    st.one_of(st.integers(-(2**31), 2**31 - 1), st.integers(-3, 400)),
    st.sampled_from([[1, 1], [3, 1], [30, 2]]),
)
def test_any_value_anywhere_gives_a_result_or_an_error(name, index, value, new):
    case = make_case([300, 200], new)
    table = getattr(case.meta, name).clone()
    table.view(-1)[index % table.numel()] = value
    with contextlib.suppress(ValueError):
        assert attend(case, **{name: table}).shape == case.q.shape


@pytest.mark.parametrize("part", ["k", "k_scale", "k_zero", "v", "v_scale"])
@pytest.mark.parametrize("fault", ["dtype", "shape", "stride", "device"])
def test_quantized_blocks_of_another_format(part, fault):
    case = make_case([300], [1])
    t = getattr(case.blocks.k8v8, part)
    wrong = {
        "dtype": lambda: t.to(torch.float64),
        "shape": lambda: t[..., :-1].contiguous(),
        "stride": lambda: torch.stack([t, t], -1)[..., 0],
        "device": lambda: t.to("meta"),
    }[fault]()
    k8v8 = dataclasses.replace(case.blocks.k8v8, **{part: wrong})
    blocks = dataclasses.replace(case.blocks, k8v8=k8v8)
    with pytest.raises(ValueError, match=rf"paged_attention: K8V8 blocks\.{part} must be"):
        ops.paged_attention(case.q, blocks, case.meta, sm_scale=0.1)


def test_quantized_blocks_without_scales():
    case = make_case([300], [1])
    blocks = dataclasses.replace(case.blocks, k8v8=case.blocks.hot)
    with pytest.raises(ValueError, match=r"K8V8 blocks\.k must be contiguous torch\.uint8"):
        ops.paged_attention(case.q, blocks, case.meta, sm_scale=0.1)
    k8v8 = dataclasses.replace(case.blocks.k8v8, v_scale=None)
    blocks = dataclasses.replace(case.blocks, k8v8=k8v8)
    with pytest.raises(ValueError, match=r"K8V8 blocks\.v_scale must be .* got None"):
        ops.paged_attention(case.q, blocks, case.meta, sm_scale=0.1)


@pytest.mark.parametrize("tier", ["sink", "hot"])
def test_values_of_another_format(tier):
    case = make_case([300], [1])
    old = getattr(case.blocks, tier)
    for wrong in (old.v.double(), old.v[:, :, :-1].contiguous(), old.v.transpose(1, 2)):
        new = TierBlocks(k=old.k, v=wrong)
        blocks = LayerBlocks(**{**vars(case.blocks), tier: new})
        with pytest.raises(ValueError, match=r"blocks\.v must be contiguous"):
            ops.paged_attention(case.q, blocks, case.meta, sm_scale=0.1)


def test_slot_beyond_the_blocks_writes_nothing():
    case = make_case([100], [1])
    hot = case.blocks.hot
    before = hot.k.clone()
    k = torch.ones(2, 1, 64)
    with pytest.raises(ValueError, match=r"append_kv: slot_mapping\[1\] must be below"):
        ops.append_kv(k, k, hot, torch.tensor([0, hot.num_blocks * 64]))
    torch.testing.assert_close(hot.k, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["src_ids", "dst_ids"])
@pytest.mark.parametrize("value", [-1, 1000])
def test_block_id_out_of_range_converts_nothing(name, value):
    case = make_case([400], [1])
    before = case.blocks.k8v8.k.clone()
    ids = {"src_ids": torch.zeros(2).int(), "dst_ids": torch.arange(2).int()}
    ids[name][1] = value
    with pytest.raises(ValueError, match=rf"convert_blocks: {name}\[1\] must be in"):
        ops.convert_blocks(case.blocks.hot, case.blocks.k8v8, **ids)
    torch.testing.assert_close(case.blocks.k8v8.k, before, rtol=0, atol=0)
