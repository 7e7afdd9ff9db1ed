"""`paged_attention(split_mass=...)`: what each split weighs, in every implementation."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_isas import ISAS, forced_isa
from strategies import Case, make_case
from triton_device import needs_device, to_device

from omlx_kernels import ops, reference
from omlx_kernels.layout import BLOCK_TIERS, Tier

IMPLEMENTATIONS = [
    pytest.param("triton", marks=needs_device),
    "vectorized",
    *(f"native {isa}" for isa in ISAS),
]


def mass_of(case: Case, implementation: str, **kwargs) -> torch.Tensor:
    """Return the mass that an implementation writes, over a buffer full of NaN."""
    if implementation == "triton":
        case, kwargs = to_device(case), {k: to_device(v) for k, v in kwargs.items()}
    shape = (case.meta.splits.shape[0], case.q.shape[1])
    mass = torch.full(shape, float("nan"), device=case.q.device)
    implementation, _, isa = implementation.partition(" ")
    with ops.use_implementation(implementation), forced_isa(isa) if isa else nullcontext():
        ops.paged_attention(
            case.q, case.blocks, case.meta, **case.attention_kwargs(), split_mass=mass, **kwargs
        )
    return mass.cpu()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@settings(max_examples=15)
@given(data=st.data())
def test_mass_equals_oracle(implementation, data):
    lens = data.draw(st.lists(st.integers(0, 270), min_size=1, max_size=3), label="lens")
    new = [data.draw(st.integers(0, min(n, 9)), label="new") for n in lens]
    heads = data.draw(st.sampled_from([(1, 1), (3, 1), (4, 2)]), label="heads")
    window = data.draw(st.none() | st.integers(1, 300), label="window")
    case = make_case(
        lens,
        new,
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=32,
        sink_tokens=data.draw(st.sampled_from([0, 4]), label="sinks"),
        blocks_per_split=data.draw(st.integers(1, 2), label="blocks_per_split"),
        cold_tiers=BLOCK_TIERS[1:],
        seed=data.draw(st.integers(0, 2**20), label="seed"),
    )
    kwargs = {"window_size": window, "softcap": data.draw(st.sampled_from([None, 5.0]))}
    if data.draw(st.booleans(), label="learned sinks"):
        kwargs["sink_logits"] = torch.randn(heads[0])
    if data.draw(st.booleans(), label="sink_q"):
        kwargs["sink_q"] = torch.randn_like(case.q)
    want = mass_of(case, "reference", **kwargs)
    torch.testing.assert_close(mass_of(case, implementation, **kwargs), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", ["reference", *IMPLEMENTATIONS])
@pytest.mark.parametrize("new", [1, 5])
def test_masses_add_up(implementation, new):
    case = make_case([300, 3], [new, 0], num_q_heads=4, num_kv_heads=2, head_dim=32)
    mass = mass_of(case, implementation)
    own = case.meta.splits[:, 0] == 0
    torch.testing.assert_close(mass[own].sum(0), torch.ones(4))
    assert not mass[~own].any(), "a sequence without queries has no mass"


def test_mass_follows_the_keys():
    # All but one block is made invisible by a huge key of the newest block.
    case = make_case([4 + 64 * 3], [1], blocks_per_split=1, hot_blocks=9, num_q_heads=1)
    newest = int(case.meta.block_starts[0, :3].argmax())
    case.blocks.hot.k[case.meta.block_table[0, newest], :, -1] = case.q[0, 0] * 100
    mass = mass_of(case, "reference")[:, 0]
    split = next(i for i, s in enumerate(case.meta.splits.tolist()) if s[1:3] == [Tier.HOT, newest])
    assert mass[split] > 0.999


@pytest.mark.parametrize(
    "wrong", [torch.zeros(3), torch.zeros(99, 2), torch.zeros(2, 2).double(), torch.zeros(2, 2).T]
)
def test_wrong_buffers_are_refused(wrong):
    case = make_case([10], [1], num_kv_heads=2)
    wrong = wrong if wrong.shape != (2, 2) or wrong.dtype != torch.float32 else torch.zeros(4, 2).T
    with pytest.raises(ValueError, match=r"split_mass must be contiguous float32 \[num_splits=2"):
        ops.paged_attention(case.q, case.blocks, case.meta, sm_scale=1.0, split_mass=wrong)


@pytest.mark.parametrize("implementation", ["vectorized", *(["native"] if ISAS else [])])
def test_output_is_the_same_with_and_without_mass(implementation):
    case = make_case([200, 90], [7, 1], num_q_heads=4, num_kv_heads=2)
    mass = torch.empty(case.meta.splits.shape[0], 4)
    with ops.use_implementation(implementation):
        plain = ops.paged_attention(case.q, case.blocks, case.meta, sm_scale=0.1)
        got = ops.paged_attention(case.q, case.blocks, case.meta, sm_scale=0.1, split_mass=mass)
    torch.testing.assert_close(got, plain)


def test_newest_queries():
    meta = make_case([200, 9, 90], [7, 0, 1]).meta
    newest, rows = meta.newest_queries()
    assert rows.tolist() == [6, 7]
    assert newest.query_start_loc.tolist() == [0, 1, 1, 2]
    assert newest.max_query_len == 1


@pytest.mark.parametrize("implementation", ["reference", *IMPLEMENTATIONS])
@pytest.mark.parametrize("window", [None, 70])
def test_each_of_the_newest_queries(implementation, window):
    count, lens, new = 4, [200, 9, 90, 3], [7, 0, 1, 3]
    case = make_case(
        lens,
        new,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=32,
        blocks_per_split=1,
        cold_tiers=BLOCK_TIERS[1:],
    )
    newest, rows = case.meta.newest_queries(count)
    assert rows.tolist() == [6, 7, 10, 5, 9, 4, 8, 3]
    found = mass_of(replace(case, q=case.q[rows], meta=newest), implementation, window_size=window)
    found = found.unflatten(0, (count, -1))
    want = torch.zeros_like(found)
    kwargs = case.attention_kwargs() | {"window_size": window}
    of_rows = reference.attention_probabilities(case.q, case.blocks, case.meta, **kwargs)
    for seq, (probs, _, positions, _) in enumerate(of_rows):
        for split, (owner, tier, first, last) in enumerate(case.meta.splits.tolist()):
            starts = case.meta.block_starts[seq, first:last].tolist()
            spans = [(0, 4)] if tier == Tier.SINK else [(at, at + 64) for at in starts]
            keys = [any(low <= p < high for low, high in spans) for p in positions.tolist()]
            for i in range(min(count, new[seq]) if owner == seq else 0):
                want[i, split] = probs[:, new[seq] - 1 - i, torch.tensor(keys)].sum(-1)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
