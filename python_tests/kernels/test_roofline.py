"""The bytes of a decode step: counted by hand for a small one, near the floor for long ones."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="no triton for this platform")
sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

roofline = pytest.importorskip("roofline")
from problems import MIXES, MODELS, Shape, Step  # noqa: E402 -- lies in bench/

MHA, GQA = MODELS["LLaMA-2-7B"], MODELS["Llama-3-8B"]


def step(shape: Shape, tokens: int, batch: int, mix: str, **kwargs) -> Step:
    return Step(shape, "bfloat16", (tokens,) * batch, mix, **kwargs)


def test_bytes_of_a_small_step():
    # 4 sinks and two blocks: 64 tokens K8V8, of which per group and head 64 * 64 * 2 code bytes,
    # 64 channels' scale and zero, 64 tokens' scale; then 2 hot tokens.
    small = step(Shape(2, 1, 64), 4 + 64 + 2, 1, "k8v8", block_size=64)
    moved = roofline.traffic(small)
    sinks, cold, hot = 4 * 64 * 2 * 2, 64 * 64 * 2 + 64 * 2 * 2 + 64 * 2, 2 * 64 * 2 * 2
    assert moved.floor == moved.blocks == sinks + cold + hot
    assert moved.out == 2 * 64 * 2
    splits = len(small.tables()["splits"])
    assert moved.q == splits * 2 * 64 * 2
    assert moved.partials == 2 * splits * 2 * 65 * 4


def test_a_window_reads_scales_by_whole_groups():
    part = step(Shape(2, 1, 64), 4 + 64 + 2, 1, "k8v8", block_size=64, window_size=10)
    moved = roofline.traffic(part)
    assert moved.blocks > moved.floor
    whole = roofline.traffic(step(Shape(2, 1, 64), 70, 1, "k8v8", block_size=64))
    assert moved.floor < whole.floor


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("tokens", [1024, 8192, 32768])
@pytest.mark.parametrize("shape", [MHA, GQA], ids=str)
def test_dram_bytes_are_within_three_percent_of_the_floor(shape, tokens, batch, mix):
    assert 0 <= roofline.traffic(step(shape, tokens, batch, mix)).dram_excess <= 0.03


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("tokens", [1024, 8192, 32768])
def test_all_bytes_of_llama_2_are_within_three_percent_of_the_floor(tokens, mix):
    assert roofline.traffic(step(MHA, tokens, 1, mix)).excess <= 0.03


def test_an_extend_step_is_refused():
    with pytest.raises(ValueError, match="query_len must be 1"):
        roofline.traffic(step(MHA, 1024, 1, "hot", query_len=2))
