"""The analyzer's numbers equal those computed from the tensors, and by hand where hands suffice."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "models"))
from tiny import random_ids, tiny_model

import omlx_cache
from omlx_cache.compat import cache_name
from omlx_cache.observer import SINKS
from omlx_cache.tools.analysis import Plan, analyze, reference_of
from omlx_cache.tools.attention_mass import MassTable
from omlx_cache.tools.memory import bytes_at_16_bits, step_memory, tier_memory
from omlx_cache.tools.progress import silent
from omlx_cache.tools.reading import kld_by_layer, read, read_unpatched
from omlx_cache.tools.recommendation import Candidate, Measured, candidates, choose
from omlx_cache.tools.schedule import PROBE_TOKENS, pieces

TOKENS, BLOCK, DECODE = 500, 64, 5
CONFIG = omlx_cache.CacheConfig(block_size=BLOCK, prefill_chunk=128, recent_tokens=64)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return random_ids(1, TOKENS)


@pytest.fixture(scope="module")
def data(model, ids) -> dict:
    return analyze(model, ids, Plan(CONFIG, decode=DECODE, scored=100), silent)


@pytest.fixture(scope="module")
def stored(model, ids):
    """A cache of the same configuration that has read the same text, in one call."""
    with torch.no_grad(), omlx_cache.patched(model, CONFIG):
        cache = omlx_cache.PagedCache(model)
        model(ids, **{cache_name(type(model).forward): cache})
    return cache


@pytest.fixture(scope="module")
def weights(model, ids) -> list[torch.Tensor]:
    """Attention weights of the stock model, by layer: [heads, queries, keys]."""
    with torch.no_grad():
        found = [w[0] for w in model(ids, output_attentions=True).attentions]
    assert len(found) == model.config.num_hidden_layers
    return found


def tensors_of(cache):
    """Yield (tier, part, tensor) of everything that the cache has allocated for blocks."""
    for layer in cache.layers:
        for tier in ("sink", "hot", "k8v8", "k8v4", "k4v4"):
            blocks = getattr(layer.pool.blocks, tier)
            for part in ("k", "v", "k_scale", "k_zero", "v_scale", "v_zero"):
                if getattr(blocks, part) is not None:
                    yield tier, part, getattr(blocks, part)


def test_bytes_are_those_of_the_tensors(data, stored):
    want: dict[str, dict[str, int]] = {}
    for tier, part, tensor in tensors_of(stored):
        kinds = want.setdefault(tier, {"values": 0, "scales": 0})
        kinds["values" if part in "kv" else "scales"] += tensor.untyped_storage().nbytes()
    assert data["memory"]["tiers"] == want
    assert want["k8v8"]["scales"] > 0
    total = sum(sum(kinds.values()) for kinds in want.values())
    assert data["memory"]["steady"] == total == data["report"]["total_bytes"]
    assert data["memory"]["prefill_peak"] >= max(
        sum(v for k, v in m.items() if k != "tokens") for m in data["memory"]["over_time"][:-DECODE]
    )
    # 3 layers, K and V, 2 heads of 16 float32
    assert data["memory"]["unquantized"] == TOKENS * 3 * 2 * 2 * 16 * 4


def test_bytes_by_hand(data):
    # 4 sinks + 496 = 7.75 blocks of 64; those whole and older than 64 are quantized: 6.
    per_block = BLOCK * 2 * 16  # elements of K in a layer: 2 heads of 16
    codes = 3 * 6 * 2 * per_block
    k_scales = 3 * 6 * (BLOCK // 64) * 2 * 16 * 2 * 2  # scale and zero, float16
    v_scales = 3 * 6 * 2 * BLOCK * 2
    assert data["memory"]["tiers"]["k8v8"] == {"values": codes, "scales": k_scales + v_scales}
    assert data["memory"]["tiers"]["hot"]["values"] == 3 * 2 * 2 * per_block * 4


def test_at_16_bits_only_values_shrink(stored):
    tiers = tier_memory(stored)
    want = sum(
        (t.values // 2 if name in ("sink", "hot") else t.values) + t.scales
        for name, t in tiers.items()
    )
    assert bytes_at_16_bits(stored) == want


def test_utilization(data):
    assert data["report"]["active_blocks"] == 8
    assert data["report"]["block_utilization"] == pytest.approx((TOKENS - 4) / (8 * BLOCK))


def test_mass_is_the_mean_of_the_stock_models_weights(data, weights):
    attention = data["attention"]
    assert attention["starts"] == [SINKS, *range(4, TOKENS, BLOCK)]
    assert sum(attention["tokens"]) == TOKENS
    for layer, of_layer in enumerate(weights):
        newest = of_layer[:, -DECODE:].mean((0, 1))
        bounds = [0, *range(4, TOKENS, BLOCK), TOKENS]
        want = [newest[a:b].sum().item() for a, b in pairwise(bounds)]
        assert attention["mass"][layer] == pytest.approx(want, abs=1e-5)
        assert sum(attention["mass"][layer]) == pytest.approx(1, abs=1e-5)
        assert attention["kept_by_sinks"][layer] == pytest.approx(want[0], abs=1e-5)
        # of the newest 256: blocks from 260 on lie wholly inside
        kept = want[0] + newest[260:].sum().item()
        assert attention["kept_by_newest"][256][layer] == pytest.approx(kept, abs=1e-5)
        top = want[0] + sum(sorted(want[1:])[-2:])
        assert attention["kept_by_top"][2][layer] == pytest.approx(top, abs=1e-5)


def test_sparsity_of_the_unquantized_cache(model, ids, weights):
    cut = pieces(TOKENS, 128, DECODE)
    table = read(model, ids, reference_of(CONFIG), cut, 10, inside=True).mass
    bounds = [0, *range(4, TOKENS, BLOCK), TOKENS]
    for layer, of_layer in enumerate(weights):
        newest = of_layer[:, -DECODE:].mean((0, 1)).tolist()
        spans = [(sum(newest[a:b]), b - a) for a, b in pairwise(bounds)]
        left, tokens = 0.0, 0
        for mass, size in sorted(spans, key=lambda span: span[0] / span[1]):
            left += mass
            if left >= 0.4:
                break
            tokens += size
        assert tokens
        assert table.sparsity(0.4)[layer] == pytest.approx(tokens / TOKENS)


def test_sparsity_by_hand():
    table = MassTable(
        [SINKS, 4, 68, 132],
        np.array([4, 64, 64, 32]),
        np.array([[0.5, 0.02, 0.04, 0.44]]),
        np.ones((1, 4), bool),
    )
    assert table.length == 164
    assert table.sparsity(0.05).tolist() == [64 / 164]
    assert table.sparsity(0.07).tolist() == [128 / 164]
    assert table.sparsity(0.01).tolist() == [0.0]
    # The half block weighs less than the second, but more for its size.
    half = replace(table, mass=np.array([[0.5, 0.43, 0.04, 0.03]]))
    assert half.sparsity(0.05).tolist() == [64 / 164]
    assert table.kept_by_newest(96).tolist() == pytest.approx([0.5 + 0.04 + 0.44])
    assert table.kept_by_newest(95).tolist() == pytest.approx([0.5 + 0.44])


def test_quality_is_that_of_the_logits(data, model, ids):
    kwargs = {"logits_to_keep": 100}
    with torch.no_grad():
        p = model(ids, **kwargs).logits[0].double().log_softmax(-1)
        with omlx_cache.patched(model, CONFIG):
            q = model(ids, **kwargs).logits[0].double().log_softmax(-1)
    # The pieces differ, so each sees a little more or less of itself unquantized.
    kld = (p.exp() * (p - q)).sum(-1).mean().item()
    assert data["quality"]["kld"] == pytest.approx(kld, rel=0.5)
    assert 0 < data["quality"]["kld"] < 0.05


def test_rounding_is_what_the_models_own_attention_differs_by(data, ids):
    assert data["quality"]["rounding"] is None, "float32 rounds too little to tell"
    model = tiny_model().bfloat16()
    found = analyze(model, ids, Plan(CONFIG, decode=DECODE, scored=100, try_changes=False), silent)
    with torch.no_grad():
        q = model(ids, logits_to_keep=100).logits[0].double().log_softmax(-1)
        with omlx_cache.patched(model, reference_of(CONFIG)):
            p = model(ids, logits_to_keep=100).logits[0].double().log_softmax(-1)
    kld = (p.exp() * (p - q)).sum(-1).mean().item()
    assert found["quality"]["rounding"]["kld"] == pytest.approx(kld, rel=0.5)
    assert 0 < kld < found["quality"]["kld"] * 2


def test_the_models_own_cache_is_read_in_pieces(model, ids):
    with torch.no_grad():
        want = model(ids, logits_to_keep=100).logits[0]
    found = read_unpatched(model, ids, pieces(TOKENS, 128, DECODE), 100)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


def test_the_last_layers_kld_is_that_of_the_logits(model, ids):
    cut = pieces(TOKENS, 128, DECODE)
    reference = read(model, ids, reference_of(CONFIG), cut, DECODE, inside=True)
    own = read(model, ids, CONFIG.model_copy(update={"cache_bits": 4}), cut, DECODE, inside=True)
    p, q = reference.logits.log_softmax(-1), own.logits.log_softmax(-1)
    by_layer = kld_by_layer(model, reference.hidden, own.hidden)
    assert len(by_layer) == model.config.num_hidden_layers
    assert by_layer[-1] == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item(), rel=1e-3)


def test_planning_a_step_for_its_tables_changes_nothing(stored, model):
    before = stored.report(), [list(row.blocks) for row in stored.groups[0].rows]
    memory = step_memory(stored, 4)
    assert (stored.report(), [list(row.blocks) for row in stored.groups[0].rows]) == before
    blocks = 8  # tables: block ids and starts, ...
    splits = 3  # sinks, hot, 8-bit
    int32 = 2 * blocks + 5 + 1 + 1 + 2 + 4 * splits + 2  # bounds, page, length, queries, splits
    assert memory.tables == 4 * int32 + 8  # and one slot, int64
    assert memory.workspace == splits * 4 * (16 + 1) * 4


@pytest.mark.parametrize(("tokens", "chunk", "decode"), [(64, 512, 8), (700, 64, 1), (9, None, 2)])
def test_pieces_cover_the_text_once(tokens, chunk, decode):
    cut = pieces(tokens, chunk, decode)
    assert [p.first for p in cut] == [0, *(p.last for p in cut[:-1])]
    assert cut[-1].last == tokens
    assert [p.kind for p in cut[-decode:]] == ["decode"] * decode
    assert all(p.kind == "probe" for p in cut[-decode - PROBE_TOKENS : -decode])
    assert max(p.last - p.first for p in cut) <= (chunk or tokens)


def test_the_recommended_yaml_gives_what_was_measured(data, model, ids, tmp_path):
    found = data["recommendation"]
    assert found["tried"][0]["change"] == "cache_bits: {k: 8, v: 4}"
    path = tmp_path / "recommended.yaml"
    path.write_text(found["yaml"])
    config = omlx_cache.CacheConfig.from_yaml(path)
    got = read(model, ids, config, pieces(TOKENS, 128, DECODE), 100)
    expected = data["memory"]["steady"]
    if found["chosen"] is not None:
        expected = found["tried"][found["chosen"]]["num_bytes"]
        assert expected < data["memory"]["steady"]
    assert got.report.total_bytes == expected


FLAT = MassTable(
    [SINKS, *range(4, 4 + 640, 64)],
    np.array([4] + [64] * 10),
    np.array([[0.5] + [0.0] * 8 + [0.05, 0.45]]),
    np.ones((1, 11), bool),
)


def changes(measured: Measured, utilization: float = 1.0, **config) -> list[dict]:
    config = omlx_cache.CacheConfig(**({"block_size": 64} | config))
    return [dict(c.change) for c in candidates(config, measured, FLAT, utilization, 0.01)]


def test_candidates():
    good, bad = Measured(100, 0.001, 1.0), Measured(100, 0.2, 0.8)
    assert changes(good) == [
        {"cache_bits": {"k": 8, "v": 4}},
        {"tiers": {"k8v4": 1024, "k4v4": None}},
        {"window_size": 64},
    ]
    assert changes(good, cache_bits=4) == [{"window_size": 64}]
    assert {"block_size": 64} in changes(good, 0.3, block_size=128)
    assert changes(bad) == [{"cache_bits": 16}]
    assert changes(bad, window_size=128)[0] == {"window_size": 256}
    assert changes(bad, window_size=128, sink_tokens=0)[0] == {"sink_tokens": 4}


def test_choice():
    def chosen(now, *others):
        return choose(now, [(Candidate({}, ""), m) for m in others], 0.01)

    good, small, bad = Measured(100, 0.001, 1), Measured(50, 0.009, 1), Measured(20, 0.2, 0.5)
    assert chosen(good) is None
    assert chosen(good, small, bad) == 0
    assert chosen(small, good) is None
    assert chosen(bad, good, small) == 1
    assert chosen(Measured(10, 0.5, 0.1), bad) == 0
