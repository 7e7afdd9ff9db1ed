"""What a step's tables say of rows that have nothing stored."""

from __future__ import annotations

from omlx_cache.tables import tables_of_rows
from omlx_kernels.layout import Tier


def test_a_row_without_a_sink_page_lists_none():
    tables = tables_of_rows([[], []], [None, 0], [0, 3], [0, 1], 2)
    assert tables["sink_pages"].tolist() == [-1, 0]
    assert tables["splits"].tolist() == [[1, Tier.SINK, 0, 1]]
    assert tables["split_starts"].tolist() == [0, 0, 1]
