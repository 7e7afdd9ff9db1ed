"""The comparison of pruning's rankings: equal memory, questions that don't touch each other."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import DynamicCache

import omlx_cache
from omlx_cache.compat import cache_name

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "python_tests" / "models")]

import bench_pruning  # noqa: E402 -- lies in bench/
from tiny import random_ids, tiny_model  # noqa: E402

TOPK = {"pruning": "topk", "prune_ratio": 0.3}
IDS = random_ids(1, 1300)[0].tolist()


def likeliest(model, cue: list[int]) -> list[int]:
    """Return a cue, and what the model itself says behind the text and the cue."""
    ids = torch.tensor([IDS + cue])
    told = model.generate(ids, max_new_tokens=bench_pruning.ANSWER, do_sample=False)
    return told[0, len(IDS) :].tolist()


@pytest.fixture(scope="module")
def reading():
    model = tiny_model()
    cues = [IDS[10:26], IDS[400:416], [1, *IDS[700:716]]]
    steps = [IDS[:512], IDS[512:1000], *([token] for token in IDS[1000:1010]), IDS[1010:]]
    return bench_pruning.Reading("text 0", steps, 500, [likeliest(model, cue) for cue in cues])


@pytest.fixture(scope="module")
def stock(reading):
    model = tiny_model()
    return bench_pruning.read(model, reading, DynamicCache(config=model.config))


def measure(reading, stock, seed=0, **setting):
    base = {"block_size": 64, "window_size": None, "prefill_chunk": 512}
    return bench_pruning.measure(tiny_model(), reading, base | setting, seed, stock)


def test_every_question_is_asked_behind_the_reading_alone(reading, stock):
    logits, row = stock
    assert logits.shape[0] == 500
    assert row["told"] == 1  # each answer is the model's own, so no question has seen another
    row = measure(reading, stock, cache_bits=16)
    assert row["told"] == 1
    assert row["kld"] < 1e-6
    assert row["tokens"] == len(IDS)
    assert row["nll"] == pytest.approx(stock[1]["nll"], rel=1e-3)


def test_a_question_in_the_prompt_is_there_before_blocks_go():
    told, prompt, config = IDS[400:448], IDS[1024:1064], {"cache_bits": 16} | TOPK
    steps = [IDS[:512], IDS[512:1024]]
    reading = bench_pruning.Reading("document 0", steps, 0, [told], [prompt])
    row = measure(reading, None, **config)
    base = {"block_size": 64, "window_size": None, "prefill_chunk": 512}
    with torch.no_grad(), omlx_cache.patched(model := tiny_model(), **base | config):
        cache = omlx_cache.PagedCache(model)
        kwargs = {cache_name(type(model).forward): cache}
        model(torch.tensor([IDS[:1024] + prompt]), **kwargs)  # as one prompt
        assert cache.groups[0].rows[0].dropped
        logits = model(torch.tensor([told]), **kwargs).logits[0]
    want = cross_entropy(logits[-bench_pruning.ANSWER - 1 : -1], torch.tensor(told[-32:]))
    assert row["nll"] == pytest.approx(want.item(), rel=1e-5)


def test_all_rankings_keep_equally_much_and_seeds_differ(reading, stock):
    rows = [
        measure(reading, stock, seed, pruning=ranking, prune_ratio=0.3)
        for ranking, seed in (("topk", 0), ("oldest", 0), ("random", 0), ("random", 1))
    ]
    assert {len(row["dropped"]) for row in rows} == {5}
    assert len({row["kld"] for row in rows}) == 4
    assert min(row["kld"] for row in rows) > 1e-6


def test_the_table_has_a_range_for_seeds_alone():
    tuning = runpy.run_path(str(ROOT / "docs" / "render_tuning.py"))
    assert tuning["_spread"]([0.5], ".1%") == "50.0%"
    assert tuning["_spread"]([0.5, 0.7], ".1%") == "60.0% (50.0% to 70.0%)"
    assert set(bench_pruning.rankings(2)) >= {"256, topk", "64, oldest", "64, random 1"}
