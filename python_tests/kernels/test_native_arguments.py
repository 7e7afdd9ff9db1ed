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
from omlx_kernels.layout import BLOCK_TIERS, LayerBlocks, Tier, TierBlocks

pytestmark = pytest.mark.skipif(not ISAS, reason="the native library is not built")

TABLES = (
    "block_table", "block_starts", "tier_starts", "sink_pages", "seq_lens", "query_start_loc",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _native():
    with ops.use_implementation("native"):
        yield


def attend(case, split_mass=None, lse=None, **changes):
    meta = dataclasses.replace(case.meta, **changes)
    return ops.paged_attention(
        case.q, case.blocks, meta, sm_scale=0.1, split_mass=split_mass, lse=lse
    )


@pytest.mark.parametrize(
    ("name", "index", "value"),
    [
        ("block_table", (0, 0), -1),
        ("block_table", (0, 0), 10**6),
        ("block_table", (0, 2), 99),
        ("block_table", (0, 3), 99),
        ("tier_starts", (0, 2), 10**6),
        ("tier_starts", (0, 0), -3),
        ("tier_starts", (0, 1), 100),
        ("sink_pages", (1,), -2),
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
    case = make_case([400, 300], [queries, 1], cold_tiers=BLOCK_TIERS[1:])
    table = getattr(case.meta, name).clone()
    table[index] = value if name != "query_start_loc" or value != 5 else queries + 5
    lse = torch.zeros(case.q.shape[:2])
    with pytest.raises(ValueError, match=r"paged_attention: \w+.* must .* got"):
        attend(case, lse=lse, **{name: table})
    assert (lse == float("-inf")).all(), "nothing is written but what the op begins with"


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(TABLES),
    st.integers(0, 10**6),
    st.one_of(st.integers(-(2**31), 2**31 - 1), st.integers(-3, 400)),
    st.sampled_from([[1, 1], [3, 1], [30, 2]]),
)
def test_any_value_anywhere_gives_a_result_or_an_error(name, index, value, new):
    case = make_case([400, 200], new, cold_tiers=BLOCK_TIERS[1:])
    table = getattr(case.meta, name).clone()
    table.view(-1)[index % table.numel()] = value
    lse = torch.zeros(case.q.shape[:2])
    with contextlib.suppress(ValueError):
        assert attend(case, lse=lse, **{name: table}).shape == case.q.shape


def mass_for(case):
    return torch.empty(len(case.meta.splits), case.q.shape[1])


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(["splits", "split_starts", *TABLES]),
    st.integers(0, 10**6),
    st.one_of(st.integers(-(2**31), 2**31 - 1), st.integers(-3, 20)),
)
def test_any_work_list_gives_masses_or_an_error(name, index, value):
    case = make_case([400, 200, 9], [1, 1, 0], cold_tiers=BLOCK_TIERS[1:], blocks_per_split=1)
    table = getattr(case.meta, name).clone()
    table.view(-1)[index % table.numel()] = value
    mass, lse = mass_for(case), torch.zeros(case.q.shape[:2])
    with contextlib.suppress(ValueError):
        attend(case, split_mass=mass, lse=lse, **{name: table})
        assert mass.shape == mass_for(case).shape


@pytest.mark.parametrize(
    ("name", "index", "value"),
    [
        ("splits", (0, 0), 1),  # the first split belongs to sequence 0
        ("splits", (0, 1), 5),
        ("splits", (0, 1), -1),
        ("splits", (1, 2), -1),
        ("splits", (1, 3), 10**6),
        ("splits", (1, 1), int(Tier.K4V4)),  # entries of another tier
        ("split_starts", (0,), -1),
        ("split_starts", (1,), 0),  # the splits of sequence 0 are said to be those of sequence 1
        ("split_starts", (2,), 10**6),
    ],
)
def test_work_list_out_of_range(name, index, value):
    case = make_case([400, 200], [1, 1])
    table = getattr(case.meta, name).clone()
    table[index] = value
    mass = mass_for(case)
    with pytest.raises(ValueError, match=r"paged_attention: split\w+.* must .* got"):
        attend(case, split_mass=mass, **{name: table})
    assert not mass.any()


def test_mass_of_several_queries_is_refused():
    case = make_case([400], [2])
    with pytest.raises(ValueError, match="split_mass must be asked for with one query per seq"):
        attend(case, split_mass=mass_for(case), max_query_len=1)


@pytest.mark.parametrize(
    ("tier", "part"),
    [
        *((Tier.K8V8, part) for part in ("k", "k_scale", "k_zero", "v", "v_scale")),
        *((Tier.K8V4, part) for part in ("k", "k_scale", "k_zero", "v", "v_scale", "v_zero")),
        *((Tier.K4V4, part) for part in ("k", "k_scale", "k_zero", "v", "v_scale", "v_zero")),
    ],
)
@pytest.mark.parametrize("fault", ["dtype", "shape", "stride", "device", "missing"])
def test_quantized_blocks_of_another_format(tier, part, fault):
    case = make_case([300], [1], cold_tiers=(tier,))
    t = getattr(case.blocks.tier(tier), part)
    wrong = {
        "dtype": lambda: t.to(torch.float64),
        "shape": lambda: t[..., :-1].contiguous(),
        "stride": lambda: torch.stack([t, t], -1)[..., 0],
        "device": lambda: t.to("meta"),
        "missing": lambda: t[0] if part == "k" else None,  # keys say how many blocks there are
    }[fault]()
    changed = dataclasses.replace(case.blocks.tier(tier), **{part: wrong})
    blocks = dataclasses.replace(case.blocks, **{tier.name.lower(): changed})
    name = rf"{tier.name} blocks\.{part}"
    with pytest.raises(ValueError, match=rf"paged_attention: {name} must be .* got"):
        ops.paged_attention(case.q, blocks, case.meta, sm_scale=0.1)


def test_blocks_in_the_place_of_another_tier():
    case = make_case([300], [1])
    blocks = dataclasses.replace(case.blocks, k8v8=case.blocks.hot)
    with pytest.raises(ValueError, match=r"K8V8 blocks\.k must be contiguous torch\.uint8"):
        ops.paged_attention(case.q, blocks, case.meta, sm_scale=0.1)
    blocks = dataclasses.replace(case.blocks, k4v4=case.blocks.k8v4)
    with pytest.raises(ValueError, match=r"K4V4 blocks\.k must be .* 32\)"):
        ops.paged_attention(case.q, blocks, case.meta, sm_scale=0.1)


@pytest.mark.parametrize("name", ["sink_q", "sink_logits"])
def test_tensors_elsewhere(name):
    case = make_case([300], [1])
    tensor = {"sink_q": case.q, "sink_logits": torch.zeros(2)}[name].to("meta")
    with pytest.raises(ValueError, match=rf"paged_attention: {name} must be on cpu, got meta"):
        ops.paged_attention(case.q, case.blocks, case.meta, sm_scale=0.1, **{name: tensor})


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
@pytest.mark.parametrize("tiers", [(Tier.HOT, Tier.K8V8), (Tier.K8V4, Tier.K4V4)])
def test_block_id_out_of_range_converts_nothing(name, value, tiers):
    case = make_case([900], [1], cold_tiers=BLOCK_TIERS[1:])
    src, dst = (case.blocks.tier(tier) for tier in tiers)
    before = dst.k.clone()
    ids = {"src_ids": torch.zeros(2).int(), "dst_ids": torch.arange(2).int()}
    ids[name][1] = value
    with pytest.raises(ValueError, match=rf"convert_blocks: {name}\[1\] must be in"):
        ops.convert_blocks(src, dst, *tiers, **ids)
    torch.testing.assert_close(dst.k, before, rtol=0, atol=0)


@pytest.mark.parametrize(("side", "part"), [("src", "k_zero"), ("src", "v"), ("dst", "v_zero")])
def test_conversion_of_another_format_converts_nothing(side, part):
    case = make_case([900], [1], cold_tiers=BLOCK_TIERS[1:])
    blocks = {"src": case.blocks.k8v8, "dst": case.blocks.k4v4}
    wrong = getattr(blocks[side], part)[:, :, :-1].contiguous()
    blocks[side] = dataclasses.replace(blocks[side], **{part: wrong})
    ids = torch.zeros(1).int()
    with pytest.raises(ValueError, match=rf"convert_blocks: {side}\.{part} must be contiguous"):
        ops.convert_blocks(*blocks.values(), Tier.K8V8, Tier.K4V4, ids, ids)


def copy(blocks, src, dst):
    ops.copy_blocks(blocks, *(torch.tensor(x, dtype=torch.int32) for x in (src, dst)))


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        ([0, -1], [1, 2], r"src_ids\[1\] must be in \[0, \d\), got -1"),
        ([0, 1], [99, 2], r"dst_ids\[0\] must be in \[0, \d\), got 99"),
        ([0, 1], [2, 2], r"dst_ids must be distinct, got 2 twice"),
        ([0, 1], [2, 0], r"dst_ids must not be in src_ids, got src_ids\[0\] = 0 in both"),
    ],
)
@pytest.mark.parametrize("tier", [Tier.HOT, Tier.K8V4])
def test_copy_of_wrong_ids_copies_nothing(tier, src, dst, message):
    blocks = make_case([900], [1], cold_tiers=BLOCK_TIERS[1:]).blocks.tier(tier)
    before = {name: t.clone() for name, t in blocks.tensors().items()}
    with pytest.raises(ValueError, match=f"copy_blocks: {message}"):
        copy(blocks, src, dst)
    for name, t in blocks.tensors().items():
        assert torch.equal(t.view(torch.uint8), before[name].view(torch.uint8))


@settings(deadline=None, max_examples=50)
@given(*[st.lists(st.one_of(st.integers(-1, 6), st.integers(-(2**31), 2**31 - 1)))] * 2)
def test_any_ids_copy_or_give_an_error(src, dst):
    blocks = make_case([300], [1]).blocks.k8v8
    with contextlib.suppress(ValueError):
        copy(blocks, src, dst)


@pytest.mark.parametrize("part", ["k", "k_scale", "k_zero", "v", "v_scale", "v_zero"])
@pytest.mark.parametrize("fault", ["stride", "device", "fewer blocks"])
def test_copy_of_malformed_blocks(part, fault):
    blocks = make_case([900], [1], cold_tiers=BLOCK_TIERS[1:]).blocks.k4v4
    t = getattr(blocks, part)
    wrong = {
        "stride": lambda: torch.stack([t, t], -1)[..., 0],
        "device": lambda: t.to("meta"),
        "fewer blocks": lambda: t[:-1],
    }[fault]()
    # The keys say where the blocks are, and how many: if theirs differ, something else is wrong.
    with pytest.raises(ValueError, match=r"copy_blocks: (blocks\.\w+|src_ids) must be .* got"):
        copy(dataclasses.replace(blocks, **{part: wrong}), [0], [1])
