"""`Geometry` against a brute-force walk over positions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from omlx_cache.sequences import Geometry, StoredBlock
from omlx_kernels.layout import Tier


def block_of(position: int, sinks: int, size: int) -> int | None:
    return None if position < sinks else (position - sinks) // size


@given(st.integers(0, 700), st.integers(0, 300), st.sampled_from([64, 128]), st.integers(0, 64))
def test_new_starts_cover_exactly_the_new_positions(length, new, size, sinks):
    geometry = Geometry(size, sinks, None, 0)
    old = {block_of(p, sinks, size) for p in range(length)} - {None}
    both = {block_of(p, sinks, size) for p in range(length + new)} - {None}
    assert geometry.num_blocks(length) == len(old)
    assert [(s - sinks) // size for s in geometry.new_starts(length, new)] == sorted(both - old)


@given(st.integers(0, 700), st.integers(1, 400), st.sampled_from([64, 128]), st.integers(0, 64))
def test_released_means_invisible_to_every_later_query(length, window, size, sinks):
    geometry = Geometry(size, sinks, window, 0)
    for j in range(geometry.num_blocks(length) + 1):
        last = sinks + (j + 1) * size - 1
        visible = last > length - window  # to the next query, which stands at `length`
        block = StoredBlock(sinks + j * size, Tier.HOT, 0)
        assert geometry.is_released(block, length) == (not visible)
        assert (j < geometry.num_released(length)) == (not visible)


@given(st.integers(0, 700), st.integers(0, 300))
def test_aged_means_full_and_older_than_the_recent_tokens(length, recent):
    geometry = Geometry(64, 4, None, recent)
    for start in range(4, length, 64):
        newest = start + 63
        expected = newest < length - recent
        assert geometry.has_aged(StoredBlock(start, Tier.HOT, 0), length) == expected
