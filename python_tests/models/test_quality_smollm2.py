"""The quality tool's needles on a real model: it finds them, and a window loses them."""

from __future__ import annotations

import pytest

from omlx_cache.tools.loading import load_model
from omlx_cache.tools.quality_contenders import from_setting
from omlx_cache.tools.quality_run import Results, measure_all
from omlx_cache.tools.quality_tasks import text_task
from omlx_cache.tools.texts import token_ids


@pytest.mark.real_model
def test_needles_are_found_with_8_bits_and_lost_behind_a_window(smollm2_path, smollm2_tokenizer):
    model = load_model(smollm2_path, device="cpu")
    blank = smollm2_tokenizer("\n\n", add_special_tokens=False)["input_ids"]
    task = text_task(token_ids("quality", smollm2_tokenizer, 768), 300, blank)
    settings = ["cache_bits=8", "window_size=128 recent_tokens=64 block_size=64"]
    results = Results({})
    measure_all(model, [task], [from_setting(text) for text in settings], results)
    stock, eight, window = results.data["results"].values()
    assert stock["needle"] > 0.6
    assert eight["needle"] == pytest.approx(stock["needle"], abs=0.02)
    assert eight["kld"] < 0.001
    assert window["needle"] < 0.8 * stock["needle"]
    assert window["kld"] > 100 * eight["kld"]
