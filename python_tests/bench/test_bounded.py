"""The benchmark of a bounded pool measures what it says, on a model that has no time to take."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "python_tests" / "models")]

import bench_bounded  # noqa: E402 -- lies in bench/
from tiny import random_ids, tiny_model  # noqa: E402

from omlx_cache.tools.quality_tasks import text_task  # noqa: E402

TOKENS = 2000


@pytest.fixture(scope="module")
def rows():
    task = text_task(random_ids(1, TOKENS + 20)[0].tolist(), 20, [1])
    return bench_bounded.measure(tiny_model(), task, TOKENS)


def test_the_pool_holds_a_quarter_and_generation_goes_on(rows):
    assert list(rows) == list(bench_bounded.contenders(TOKENS))
    bench_bounded.check(rows)
    blocks = {name: row["device_blocks"] for name, row in rows.items()}
    assert blocks.pop(bench_bounded.UNBOUNDED) > 4 * 8
    assert set(blocks.values()) == {8}
    offloads = [row["cpu_bytes"] > 0 for row in rows.values()]
    assert offloads == [False, True, True, False, False, False]
    seen = {name: row["cached_tokens"] for name, row in rows.items()}
    assert seen["pruning oldest"] < seen[bench_bounded.EXACT] == seen[bench_bounded.UNBOUNDED]


def test_what_loses_nothing_agrees_and_what_loses_something_does_not(rows):
    assert rows[bench_bounded.UNBOUNDED]["kld"] == 0 == rows[bench_bounded.UNBOUNDED]["top1"] - 1
    losers = [row for name, row in rows.items() if name.startswith(("pruning", "cpu_offload, re"))]
    assert rows[bench_bounded.EXACT]["kld"] < 1e-3 < min(row["kld"] for row in losers[2:])


def test_a_red_check_gives_no_number(rows):
    broken = {**rows, bench_bounded.EXACT: rows[bench_bounded.EXACT] | {"top1": 0.5}}
    with pytest.raises(SystemExit, match="must say what no bound says"):
        bench_bounded.check(broken)
    broken = {**rows, "pruning topk": rows["pruning topk"] | {"device_blocks": 99}}
    with pytest.raises(SystemExit, match="must hold its bound of 8 blocks"):
        bench_bounded.check(broken)


def test_the_row_of_several_texts_is_their_mean():
    rows = [{"setting": {"pruning": "topk"}, "kld": k, "recall_hit_rate": None} for k in (0.1, 0.2)]
    want = {"setting": {"pruning": "topk"}, "kld": pytest.approx(0.15), "recall_hit_rate": None}
    assert bench_bounded.mean(rows) == want
