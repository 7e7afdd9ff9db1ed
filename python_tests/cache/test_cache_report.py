"""What the line of a report says of the saving."""

from __future__ import annotations

import dataclasses

import pytest

from omlx_cache.cache_report import CacheReport

_FIELDS = {field.name: 0 for field in dataclasses.fields(CacheReport)}


def report(total: int, unquantized: int) -> str:
    values = {"bytes_by_tier": {"hot": total}, "total_bytes": total, "peak_bytes": total}
    return str(CacheReport(**_FIELDS | values | {"unquantized_bytes": unquantized}))


@pytest.mark.parametrize(
    ("total", "unquantized", "said"),
    [
        (25_000_000, 100_000_000, "75% saved"),
        (100, 100, "0% saved"),
        (3_000_000, 1_000_000, "2.00 MB more than unpaged, for blocks that are not full yet"),
        (0, 0, "nothing stored yet"),
        (4_000_000, 0, "nothing stored yet"),
    ],
)
def test_the_saving_in_words(total, unquantized, said):
    assert report(total, unquantized).endswith(f", {said}")


def test_no_negative_share():
    for total in (1001, 1004, 1_000_000):
        assert "%" not in report(total, 1000).partition("peak")[2]
