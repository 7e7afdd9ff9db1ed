"""Configurations that are legal, drawn, and what the message of one that isn't must hold."""

import contextlib

import pytest
from hypothesis import strategies as st

from omlx_cache.config import CacheConfig, ConfigError

FIELDS = CacheConfig.model_fields
SECTION_OF = {key: field.json_schema_extra["section"] for key, field in FIELDS.items()}
PRECISION = ("cache_bits", "tiers", "target_saving")


@st.composite
def landed(draw):
    """Draw leaf keys, any subset of them, with values that work today."""
    sinks = draw(st.integers(0, 64))
    windows = st.one_of(st.just("auto"), st.none(), st.integers(sinks + 1, 10**6))
    offload = draw(st.booleans())
    pruning = draw(st.sampled_from([None, "oldest", "topk", "random"]))
    values = {
        "block_size": draw(st.integers(1, 64)) * 64,
        "max_gpu_blocks": draw(st.none() | st.integers(1, 10**9)),
        "cpu_offload": offload,
        "max_cpu_blocks": draw(st.none() | st.integers(1, 10**6)) if offload else None,
        "recall": draw(st.sampled_from(["all", "topk"])),
        "recall_blocks": draw(st.integers(1, 10**6)),
        "disk_cache": draw(st.sampled_from([False, True, "/x"])),
        "max_disk_bytes": draw(st.none() | st.integers(1, 10**12)),
        "prefetch": draw(st.booleans()),
        "recent_tokens": draw(st.integers(0, 10**6)),
        "prefill_chunk": draw(st.none() | st.integers(1, 10**6)),
        "prefix_cache": draw(st.booleans()),
        "prefix_cache_blocks": draw(st.none() | st.integers(1, 10**6)),
        "model_bits": draw(st.sampled_from([None, 2, 3, 4, 8, 16, 32])),
        "cache_bits": draw(st.sampled_from([4, 8, 16, {"k": 8, "v": 4}, {"k": 4, "v": 4}])),
        "tiers": draw(st.sampled_from([None, {"k8v4": 6200, "k4v4": None}, {"k8v8": None}])),
        "target_saving": draw(st.sampled_from([None, 0.5, 0.6])),
        "keep_layers": draw(st.sampled_from([None, [0, -1]])),
        "window_size": draw(windows),
        "sink_tokens": sinks,
        "pruning": pruning,
        "prune_ratio": draw(st.floats(0, 0.99)) if pruning else 0.0,
    }
    assert values.keys() == FIELDS.keys()
    pair = {"window_size", "sink_tokens"}  # drawn to fit each other: keep both or none
    kept = draw(st.sets(st.sampled_from(sorted(values))))
    kept = kept | pair if kept & pair else kept
    for key, needed in (("max_cpu_blocks", "cpu_offload"), ("prune_ratio", "pruning")):
        kept = kept | {needed} if key in kept else kept
    if values["disk_cache"]:  # which needs it
        values["prefix_cache"] = True
    kept -= set(PRECISION) - {draw(st.sampled_from(PRECISION))}  # one instead of the others
    return {key: value for key, value in values.items() if key in kept}


def nested(leaf_keys):
    """Sort leaf keys into their sections."""
    out = {}
    for key, value in leaf_keys.items():
        out.setdefault(SECTION_OF[key], {})[key] = value
    return out


@contextlib.contextmanager
def refused(*parts, of=ConfigError):
    """Expect exactly the type `of`, whose message holds every part and nothing of pydantic's."""
    with pytest.raises(of) as info:
        yield info
    text = str(info.value)
    assert info.type is of
    assert [part for part in parts if part not in text] == [], text
    assert "pydantic" not in text
    assert "type=" not in text
