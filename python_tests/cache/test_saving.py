"""`target_saving`: the target holds, with the least loss, and nothing is colder than it stays."""

from __future__ import annotations

from dataclasses import replace
from operator import mul

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omlx_cache.policy.saving import HOLDS_FROM, SavingPolicy
from omlx_cache.sequences import Geometry
from omlx_kernels.layout import BlockFormat, Tier

FORMATS = st.builds(
    BlockFormat,
    st.sampled_from([64, 256]),
    st.sampled_from([0, 4, 64]),
    st.just(1),
    st.sampled_from([64, 80, 128]),
    st.sampled_from([torch.float16, torch.float32]),
)


def policy_for(target: float, fmt: BlockFormat, window=None, recent: int = 128) -> SavingPolicy:
    geometry = Geometry(fmt.block_size, fmt.sink_tokens, window)
    return SavingPolicy.for_format(target, recent, geometry, fmt)


def tiers_at(policy: SavingPolicy, length: int) -> list[Tier]:
    """Return the tier of each live block of a text, oldest first; a block begun is HOT."""
    geometry = policy.plan.geometry
    size, origin = geometry.block_size, geometry.sink_tokens
    ends = range(origin + size, origin + geometry.num_blocks(length) * size + 1, size)
    live = list(ends)[geometry.num_released(length) :]
    return [policy.tier_of(e, length) if e <= length else Tier.HOT for e in live]


def stored_at(policy: SavingPolicy, fmt: BlockFormat, length: int) -> int:
    return fmt.bytes_per_block(Tier.SINK) + sum(map(fmt.bytes_per_block, tiers_at(policy, length)))


QUANTIZED = Tier.K8V8, Tier.K8V4, Tier.K4V4
LAYERS = st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 12))


@settings(max_examples=60)
@given(FORMATS, st.floats(0.2, 0.68), st.integers(0, 300), st.integers(300, 16000), LAYERS)
def test_the_target_holds_from_8192_tokens_on(fmt, target, recent, length, layers):
    geometry = Geometry(fmt.block_size, fmt.sink_tokens, None)
    sizes = [replace(fmt, dtype=torch.float16).bytes_per_block(t) for t in (Tier.HOT, *QUANTIZED)]
    most = 1 - sum(map(mul, layers, sizes[1:])) / sum(layers) / sizes[0]
    if target >= most:
        with pytest.raises(ValueError, match=f"must be below {most:.3f}".replace(".", "[.]")):
            SavingPolicy.for_format(target, recent, geometry, fmt, layers)
        return
    policy = SavingPolicy.for_format(target, recent, geometry, fmt, layers)
    stored = plain = 0
    for n in range(length, length + fmt.block_size):
        plain += n * fmt.bytes_per_block(Tier.HOT) // fmt.block_size * sum(layers)
        for count, coldest in zip(layers, QUANTIZED, strict=True):
            stored += count * stored_at(policy.no_colder_than(coldest), fmt, n) if count else 0
    tiers = tiers_at(policy, length)
    old = [tier for tier in tiers if tier is not Tier.HOT]
    is_saved = stored <= (1 - target) * plain
    assert is_saved or length < HOLDS_FROM or set(old) <= {Tier.K4V4}, "or as cold as can be"
    assert old == sorted(old, reverse=True), "the older, the colder"
    assert not ({Tier.K8V8, Tier.K4V4} <= set(old)), "nothing turns to K4V4 while K8V8 is left"
    is_easy = target < 0.45 and not sum(layers[:2])
    assert length < HOLDS_FROM or not is_easy or Tier.K4V4 not in old


def test_layers_that_stay_warm_leave_their_part_to_the_others():
    fmt = BlockFormat(64, 4, 1, 64, torch.float16)
    geometry = Geometry(64, 4, None)
    counts = [
        tiers_at(SavingPolicy.for_format(0.6, 128, geometry, fmt, layers), 8192).count(Tier.K4V4)
        for layers in ((0, 0, 4), (0, 1, 3), (1, 0, 3))
    ]
    assert counts == sorted(counts)
    assert len(set(counts)) == 3


@settings(max_examples=20)
@given(FORMATS, st.floats(0.3, 0.68), st.none() | st.integers(600, 2000))
def test_a_block_only_gets_colder(fmt, target, window):
    policy = policy_for(target, fmt, window)
    size, end = fmt.block_size, fmt.sink_tokens + 4 * fmt.block_size
    lengths = range(end, HOLDS_FROM, size // 2)
    if window is not None:  # until the block leaves
        lengths = range(end, end + window - size, size // 2)
    seen = [policy.tier_of(end, n) for n in lengths]
    assert seen == sorted(seen)


def test_no_colder_than_it_takes():
    fmt = BlockFormat(256, 4, 1, 128, torch.float16)
    assert set(tiers_at(policy_for(0.3, fmt), 8192)) == {Tier.HOT, Tier.K8V8}
    assert set(tiers_at(policy_for(0.5, fmt), 8192)) == {Tier.HOT, Tier.K8V8, Tier.K8V4}
    assert set(tiers_at(policy_for(0.6, fmt), 8192)) == {Tier.HOT, Tier.K8V4, Tier.K4V4}


def test_what_can_not_be_saved_is_refused():
    with pytest.raises(ValueError, match=r"target_saving must be below 0\.719 for this model"):
        policy_for(0.75, BlockFormat(256, 4, 1, 128, torch.float16))


def test_a_float32_model_chooses_as_its_16_bit_form():
    half, full = (BlockFormat(256, 4, 1, 64, dtype) for dtype in (torch.float16, torch.float32))
    assert tiers_at(policy_for(0.6, half), 8192) == tiers_at(policy_for(0.6, full), 8192)
