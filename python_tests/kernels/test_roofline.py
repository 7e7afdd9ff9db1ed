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


# 82 multiprocessors and 6 MiB, 108 and 40, 132 and 50: RTX 3090, A100, H100.
GPUS = [roofline.Device(82), roofline.Device(108, 40 * 2**20), roofline.Device(132, 50 * 2**20)]


@pytest.mark.parametrize("window", [None, 1000])
@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: str(gpu.num_sms))
def test_every_row_of_the_table_moves_the_floor_plus_three_percent_at_most(gpu, window):
    rows = (roofline.SHAPES, roofline.TOKENS, roofline.BATCHES, MIXES, window)
    found = list(roofline.steps(*rows, num_sms=gpu.num_sms))
    assert len(found) == 2 * 4 * 3 * len(MIXES)
    for each in found:
        moved = roofline.traffic(each, gpu)
        assert 0 <= moved.moved <= roofline.BAR, each
        assert moved.moved <= moved.worst <= moved.asked
        if window is None and each.lengths[0] >= 8192:
            assert moved.worst <= roofline.BAR, each


def test_the_bar_can_be_missed():
    # 64 query heads on one kv head: queries and outputs alone are more than 3 %.
    assert roofline.traffic(step(Shape(64, 1, 128), 1024, 1, "k4v4")).moved > roofline.BAR


def test_partials_of_early_waves_leave_a_small_cache():
    many = step(GQA, 8192, 8, "k8v8")
    programs = len(many.tables()["splits"]) * 8
    waves = -(-programs // (2 * 82))
    small, large = (roofline.traffic(many, roofline.Device(82, size)) for size in (1, 2**40))
    assert small.evicted == small.partials * (waves - 1) / waves
    assert large.evicted == 0


def test_tiles_of_query_heads_read_blocks_again_but_not_from_dram():
    wide = roofline.traffic(step(Shape(64, 1, 128), 8192, 1, "k8v8"))
    assert wide.again == 3 * wide.blocks  # 16 heads a tile
    narrow = roofline.traffic(step(GQA, 8192, 1, "k8v8"))
    assert narrow.again == 0


def test_an_extend_step_is_refused():
    with pytest.raises(ValueError, match="query_len must be 1"):
        roofline.traffic(step(MHA, 1024, 1, "hot", query_len=2))
