"""What was measured of quality at 8192 tokens, and far past it, meets the bars."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[2] / "bench" / "results"


@pytest.mark.parametrize(
    ("setting", "saved", "perplexity", "kld", "top1"),
    [
        ("cache_bits=8", 0.43, 0.0005, 0.0003, 0.995),
        ("tiers={k8v4: 6200, k4v4: null}", 0.60, 0.002, 0.0005, 0.99),
        ("target_saving=0.6", 0.60, 0.002, 0.0005, 0.99),
        ("block_size=128 target_saving=0.6", 0.60, 0.002, 0.0005, 0.99),
        ("tiers={k8v4: 1024, k4v4: null}", 0.68, 0.005, 0.005, 0.98),
    ],
)
def test_bars_at_8192_tokens(setting, saved, perplexity, kld, top1):
    data = json.loads((RESULTS / "quality_8192.json").read_text(encoding="utf-8"))
    assert data["setup"]["tokens"] == 8192
    row = data["results"][setting]
    assert row["saved"] >= saved
    assert row["perplexity_ratio"] <= perplexity
    assert row["kld"] <= kld
    assert row["top1"] >= top1


def test_a_window_stays_fluent_past_four_times_the_trained_length():
    data = json.loads((RESULTS / "long_chat.json").read_text(encoding="utf-8"))
    rows, trained = data["results"], data["setup"]["trained"]
    inside = rows["stock, inside the trained length"]["perplexity"]
    for name in ("default (window 8192)", "window 1024"):
        assert rows[name]["tokens"] - data["setup"]["scored"] >= 4 * trained
        assert rows[name]["perplexity"] <= 1.1 * inside
    for name in ("stock", "window 1024 without sinks"):
        assert rows[name]["perplexity"] > 1.5 * inside
