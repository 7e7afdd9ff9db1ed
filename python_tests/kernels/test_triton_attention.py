"""Triton's `paged_attention`, decode and extend, against the float64 oracle on the same codes."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import Case, build_splits, make_case
from tolerance import assert_as_exact_as_plain
from triton_device import Spy, needs_device, to_device

import omlx_kernels.triton as kernels
from omlx_kernels.layout import BLOCK_TIERS, Tier

pytestmark = needs_device

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
COLD = {tier.name: (tier,) for tier in BLOCK_TIERS[1:]} | {"all tiers": BLOCK_TIERS[1:]}
# Sampled, not drawn from a range: Hypothesis prefers the small numbers of a range, and most cases
# would have no old block and no query.
BLOCKS = st.sampled_from(range(6))
REST = st.integers(0, 63) | st.sampled_from([0, 1, 3, 4, 5, 63])


def sequences(draw, most_new: int, most_sequences: int) -> tuple[list[int], list[int]]:
    """Draw length and new tokens of some sequences.

    The first is rarely short and has a query; the others may be empty, or ask nothing.
    """
    counts = st.sampled_from([n for n in (1, 2, 15, 16, 17, 70) if n <= most_new])
    lens, new = [], []
    for i in range(draw(st.integers(1, most_sequences), label="sequences")):
        blocks = draw(st.sampled_from([2, 3, 4, 5]) | BLOCKS if i == 0 else BLOCKS, label="blocks")
        past = 64 * blocks + draw(REST, label="rest")
        if i == 0 or draw(st.booleans(), label="asks"):
            new.append(draw(counts | st.integers(1, most_new), label="new"))
        else:
            new.append(0)
        lens.append(past + new[-1])
    return lens, new


def run(case: Case, **kwargs) -> torch.Tensor:
    """Run the kernels on the case and return the output on the CPU."""
    case = to_device(case)
    kwargs = {name: to_device(value) for name, value in kwargs.items()}
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns with NaN
    try:
        out = kernels.paged_attention(
            case.q, case.blocks, case.meta, **case.attention_kwargs(), **kwargs
        )
    finally:
        torch.use_deterministic_algorithms(False)
    return out.cpu()


def check(case: Case, **kwargs) -> None:
    """Compare the kernels with the oracle."""
    got = run(case, **kwargs)
    assert_as_exact_as_plain(got, case, **case.attention_kwargs(), **kwargs)


def settings_of_case(
    draw, lens: list[int], new: list[int], cold: tuple[Tier, ...]
) -> tuple[Case, dict]:
    """Draw everything but the lengths."""
    heads = draw(st.sampled_from([(1, 1), (3, 1), (4, 2), (2, 2), (18, 1)]), label="heads")
    # Anywhere, or within a key or two of a block's first token for the newest query.
    edges = st.builds(lambda block, d: max(1, lens[0] - 64 * block - 4 + d), BLOCKS,
                      st.sampled_from([-1, 0, 1, 2]))  # fmt: skip
    window = draw(st.none() | st.integers(1, 300) | edges, label="window")
    rotated = draw(st.booleans(), label="rotated")
    case = make_case(
        lens,
        new,
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=draw(st.sampled_from([64, 64, 32, 80, 96, 112, 128, 256]), label="head_dim"),
        block_size=draw(st.sampled_from([64, 64, 64, 128]), label="block_size"),
        sink_tokens=draw(st.sampled_from([0, 1, 4, 64]), label="sinks"),
        hot_blocks=draw(st.sampled_from([0, 0, 1, 2]), label="hot"),
        dtype=draw(st.sampled_from(DTYPES), label="dtype"),
        blocks_per_split=draw(st.sampled_from([1, 2, 4]), label="blocks_per_split"),
        cold_tiers=cold,
        rotated_v=rotated,
        # Left out of the table or only masked: both are legal.
        window_size=window if draw(st.booleans(), label="released") else None,
        seed=draw(st.integers(0, 2**20), label="seed"),
    )
    options = {
        "window_size": window,
        "keep_sinks": draw(st.booleans(), label="keep"),
        "rotated_v": rotated,
        "softcap": draw(st.sampled_from([None, None, 5.0]), label="softcap"),
    }
    if draw(st.booleans(), label="learned sinks"):
        options["sink_logits"] = torch.randn(heads[0]) * 3
    if draw(st.booleans(), label="sink_q"):
        options["sink_q"] = torch.randn_like(case.q)
    return case, options


@pytest.mark.parametrize("cold", COLD.values(), ids=COLD)
@settings(max_examples=12)
@given(data=st.data())
def test_decode_equals_oracle(cold, data):
    lens, new = sequences(data.draw, 1, 3)
    case, kwargs = settings_of_case(data.draw, lens, new, cold)
    check(case, **kwargs)


@pytest.mark.parametrize("cold", COLD.values(), ids=COLD)
@settings(max_examples=9)
@given(data=st.data())
def test_extend_equals_oracle(cold, data):
    lens, new = sequences(data.draw, 70, 2)
    case, kwargs = settings_of_case(data.draw, lens, new, cold)
    check(
        dataclasses.replace(case, meta=dataclasses.replace(case.meta, max_query_len=71)), **kwargs
    )


@pytest.mark.parametrize("new", [1, 40])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [-1, 0, 1, 2])
def test_window_edges(new, dtype, width):
    # The window ends around the first token of a block, for the only or the last query.
    case = make_case([200], [new], dtype=dtype, head_dim=32, sink_tokens=4)
    check(case, window_size=200 - 132 + width, keep_sinks=False)


@pytest.mark.parametrize("new", [1, 30])
@pytest.mark.parametrize("window", [210, 211, 2**31 - 1])
def test_window_of_all_tokens_is_no_window(new, window):
    case = make_case([210], [new], head_dim=32)
    assert torch.equal(run(case, window_size=window), run(case, window_size=None))


@pytest.mark.parametrize("new", [1, 30])
def test_tiles_outside_the_window_are_not_loaded(new):
    window = 50
    case = make_case([650], [new], head_dim=32, hot_blocks=3, cold_tiers=BLOCK_TIERS[1:])
    want = run(case, window_size=window)
    starts, bounds = case.meta.block_starts[0], case.meta.tier_starts[0].tolist()
    unseen = starts + case.format.block_size <= 650 - new - window + 1
    unseen[bounds[-1] :] = False
    for first, last in itertools.pairwise(bounds):
        assert unseen[first:last].any(), "each tier has a block outside the window"
    case.meta.block_table[0, unseen] = 2**30  # reading there ends the process
    assert torch.equal(run(case, window_size=window), want)


@settings(max_examples=5)
@given(st.integers(1, 5), st.integers(0, 3))
def test_any_split_count_agrees(blocks_per_split, padding):
    case = make_case(
        [330, 70, 3], [1, 1, 1], num_q_heads=3, dtype=torch.float16, cold_tiers=BLOCK_TIERS[1:]
    )
    splits, split_starts = build_splits(case.meta.tier_starts, [True] * 3, blocks_per_split)
    empty = torch.tensor([[0, int(Tier.HOT), 0, 0]] * padding, dtype=torch.int32).reshape(-1, 4)
    meta = dataclasses.replace(
        case.meta, splits=torch.cat([splits, empty]), split_starts=split_starts
    )
    check(dataclasses.replace(case, meta=meta))


def test_split_without_a_visible_key_is_neutral():
    # One block a split, of which the window sees only the last.
    case = make_case([330], [1], blocks_per_split=1, hot_blocks=0, head_dim=32)
    check(case, window_size=20, keep_sinks=False)


def test_permuted_table_rows_change_nothing_but_rounding():
    case = make_case([400], [40], hot_blocks=2, head_dim=32)
    bounds = case.meta.tier_starts[0].tolist()
    for first, last in itertools.pairwise(bounds):
        for table in (case.meta.block_table, case.meta.block_starts):
            table[0, first:last] = table[0, first:last].flip(0)
    check(case, window_size=150)


@pytest.mark.parametrize("new", [1, 40])
def test_permuted_physical_blocks_change_nothing(new):
    case = make_case([460, 70], [new, 1], head_dim=32, cold_tiers=BLOCK_TIERS[1:], hot_blocks=2)
    want = run(case, window_size=300)
    gen = torch.Generator().manual_seed(1)
    moved = {}  # tier -> new place of each physical block
    for tier in Tier:
        blocks = case.blocks.tier(tier)
        moved[tier] = torch.randperm(blocks.num_blocks, generator=gen).int()
        for tensor in blocks.tensors().values():
            tensor[moved[tier].long()] = tensor.clone()
    meta = case.meta
    meta.sink_pages.copy_(moved[Tier.SINK][meta.sink_pages.long()])
    for seq, bounds in enumerate(meta.tier_starts.tolist()):
        for tier, (first, last) in zip(BLOCK_TIERS, itertools.pairwise(bounds), strict=True):
            row = meta.block_table[seq, first:last]
            row.copy_(moved[tier][row.long()])
    assert torch.equal(run(case, window_size=300), want)


@pytest.mark.parametrize("cut", [1, 17, 39])
@pytest.mark.parametrize("window", [None, 100])
def test_pieces_equal_the_whole(cut, window):
    # The first piece is asked while the second is already stored: it must not see it.
    case = make_case([300], [40], head_dim=32, num_q_heads=4, cold_tiers=BLOCK_TIERS[1:])
    whole = run(case, window_size=window)

    def piece(first: int, last: int) -> torch.Tensor:
        meta = dataclasses.replace(
            case.meta,
            seq_lens=torch.tensor([260 + last], dtype=torch.int32),
            query_start_loc=torch.tensor([0, last - first], dtype=torch.int32),
            max_query_len=last - first,
        )
        return run(dataclasses.replace(case, q=case.q[first:last], meta=meta), window_size=window)

    pieces = torch.cat([piece(0, cut), piece(cut, 40)])
    torch.testing.assert_close(pieces, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("new", [1, 3])
def test_more_query_heads_than_a_tile_has_rows(new, monkeypatch):
    from omlx_kernels.triton import decode, extend

    grids = []
    for module, name in ((decode, "_paged_decode_kernel"), (extend, "_paged_extend_kernel")):
        monkeypatch.setattr(module, name, Spy(getattr(module, name), name, [], grids))
    case = make_case([140], [new], num_q_heads=130, num_kv_heads=1, cold_tiers=BLOCK_TIERS[1:])
    check(case)
    programs = grids[0][0] // len(case.meta.splits) if new == 1 else grids[0][1]
    assert programs == 3, "tiles of at most 64 query heads for the only kv head"


@pytest.mark.parametrize("new", [1, 20])
def test_strided_queries(new):
    case = make_case([90], [new], num_q_heads=4, num_kv_heads=2, head_dim=32)
    wide = torch.full((4, new, 40), float("nan"))
    wide[:, :, :32] = case.q.transpose(0, 1)
    check(dataclasses.replace(case, q=wide[:, :, :32].transpose(0, 1)))


@pytest.mark.parametrize("new", [1, 20])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [2.0**-7, 2.0**-9])
def test_small_values_keep_their_precision(new, dtype, size):
    # Value scales near float16's smallest normal number: probability * scale must not underflow.
    case = make_case([460], [new], dtype=dtype, cold_tiers=BLOCK_TIERS[1:])
    for tier in Tier:
        blocks = case.blocks.tier(tier)
        for tensor in (blocks.v,) if tier.bits is None else (blocks.v_scale, blocks.v_zero):
            if tensor is not None:
                tensor.mul_(size)
    check(case)


@pytest.mark.parametrize("new", [1, 20])
def test_biased_keys(new):
    # A few channels far from zero, as in Qwen2: their codes are small steps on a large offset.
    case = make_case([460], [new], dtype=torch.float16, cold_tiers=BLOCK_TIERS[1:])
    bias = torch.zeros(64)
    bias[::16] = torch.tensor([400.0, -300.0, 250.0, -420.0])
    for tier in Tier:
        blocks = case.blocks.tier(tier)
        tensor = blocks.k if tier.bits is None else blocks.k_zero
        tensor.add_(bias.to(tensor.dtype))
    check(case)


@pytest.mark.parametrize("new", [1, 20])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 80, 96, 112, 160, 224])
def test_every_head_dim_in_every_tier(new, head_dim):
    # 160 and 224 have no whole number of value groups in half of their channels.
    case = make_case(
        [460], [new], head_dim=head_dim, dtype=torch.float16, cold_tiers=BLOCK_TIERS[1:],
        rotated_v=True,
    )  # fmt: skip
    assert all(a < b for a, b in itertools.pairwise(case.meta.tier_starts[0].tolist()))
    check(case, rotated_v=True)


@pytest.mark.parametrize("new", [1, 20])
def test_learned_sinks_alone_weigh_nothing(new):
    # Every key is outside of what may be seen: no sinks are kept, no block is listed.
    case = make_case([40], [new], sink_tokens=64, window_size=1)
    case = dataclasses.replace(
        case, meta=dataclasses.replace(case.meta, seq_lens=torch.zeros(1, dtype=torch.int32))
    )
    got = run(case, sink_logits=torch.randn(2))
    assert torch.equal(got, torch.zeros_like(got))


@pytest.mark.parametrize("new", [1, 20])
def test_sink_queries_matter_outside_of_the_window_only(new):
    case = make_case([150], [new], head_dim=32)
    other = torch.randn_like(case.q)
    inside = run(case, window_size=150, sink_q=other)
    assert torch.equal(inside, run(case, window_size=150))
    check(case, window_size=60, sink_q=other)
    assert not torch.allclose(run(case, window_size=60, sink_q=other), run(case, window_size=60))
