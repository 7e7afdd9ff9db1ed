"""CacheConfig: a wrong value is refused, and the message names its key and how to mend it."""

import contextlib

import pytest
from configurations import FIELDS, SECTION_OF, refused
from hypothesis import given
from hypothesis import strategies as st

from omlx_cache.config import CacheConfig, ConfigError

WRONG = [
    ("block_size", 100, "multiple of 64 from 64 to 4096, got 100 (int); the nearest is 128"),
    ("block_size", 0, "the nearest is 64"),
    ("block_size", 10**30, "the nearest is 4096"),
    ("block_size", True, "got True (bool)"),
    ("block_size", "512", "got '512' (str); write 512, without quotes"),
    ("block_size", "512 tokens", "; write 512"),
    ("block_size", "512k", "got '512k' (str)"),
    ("block_size", 512.0, "got 512.0 (float); write 512"),
    ("block_size", 512.5, "got 512.5 (float)"),
    ("block_size", float("nan"), "got nan (float)"),
    ("block_size", None, "got None; give a value, or delete the key for the default, 256"),
    ("block_size", [512], "got [512] (list)"),
    ("max_gpu_blocks", 0, "an integer of at least 1, or None (no bound), got 0 (int)"),
    ("max_gpu_blocks", "unlimited", "write None"),
    ("max_gpu_blocks", True, "got True (bool)"),
    ("cpu_offload", 1, "must be True or False, got 1 (int); write True"),
    ("cpu_offload", "no", "write False"),
    ("cpu_offload", "maybe", "got 'maybe' (str)"),
    ("cpu_offload", None, "default, False"),
    ("disk_cache", "", "the path of a directory"),
    ("disk_cache", 0, "write False"),
    ("max_disk_bytes", 0, "an integer of at least 1, or None (no bound)"),
    ("max_disk_bytes", "10 GB", "got '10 GB' (str)"),
    ("recent_tokens", -1, "an integer of at least 0, got -1 (int)"),
    ("recent_tokens", None, "default, 128"),
    ("prefill_chunk", 0, "or None (the whole prompt at once)"),
    ("prefix_cache", 1, "must be True or False, got 1 (int); write True"),
    ("prefix_cache_blocks", 0, "an integer of at least 1, or None (no bound)"),
    ("model_bits", 5, "2, 3, 4, 8, 16 or 32, or None (not checked), got 5 (int)"),
    ("model_bits", "4-bit", "got '4-bit' (str); write 4"),
    ("model_bits", 4.0, "got 4.0 (float); write 4"),
    ("cache_bits", 5, "4, 8 or 16, or {k: 8, v: 4}, got 5 (int)"),
    ("cache_bits", 8.0, "write 8"),
    ("cache_bits", {"k": 8}, "{k: 8, v: 4}"),
    ("cache_bits", {"k": 8, "v": 5}, "{k: 8, v: 4}"),
    ("cache_bits", {"k": 8, "w": 4}, "{k: 8, v: 4}"),
    ("cache_bits", {"k": 4, "v": 8}, "{k: 8, v: 4}"),  # keys are what 4 bits hurt
    ("tiers", [], "a mapping of k8v8, k8v4, k4v4 (in this order) to tokens"),
    ("tiers", {}, "the last to None (the rest), got {} (dict)"),
    ("tiers", {"k8v8": 1024}, "the last to None"),
    ("tiers", {"k4v4": 64, "k8v4": None}, "in this order"),
    ("tiers", {"k8v8": None, "k4v4": None}, "the last to None"),
    ("tiers", {"k8v8": 0, "k4v4": None}, "the last to None"),
    ("tiers", {"hot": 64, "k4v4": None}, "a mapping of k8v8, k8v4, k4v4"),
    ("window_size", 0, "an integer of at least 1, auto, or None (no window), got 0 (int)"),
    ("window_size", "none", "write None, without quotes"),
    ("window_size", "Auto", "did you mean auto?"),
    ("window_size", "1_024", "write 1024"),
    ("window_size", -5, "got -5 (int)"),
    ("sink_tokens", 65, "an integer from 0 to 64, got 65 (int)"),
    ("sink_tokens", -1, "got -1 (int)"),
    ("pruning", "top-k", "oldest, topk, random or None, got"),
    ("pruning", "top-k", "did you mean topk?"),
    ("pruning", "lru", "got 'lru' (str)"),
    ("pruning", False, "got False (bool)"),
    ("prune_ratio", 1.0, "from 0 up to, but not including, 1, got 1.0 (float)"),
    ("prune_ratio", -0.1, "got -0.1 (float)"),
    ("max_cpu_blocks", 0, "an integer of at least 1, or None (no bound), got 0 (int)"),
    ("recall", "some", "all or topk, got 'some' (str)"),
    ("recall_blocks", 0, "an integer of at least 1, got 0 (int)"),
]


@pytest.mark.parametrize(("key", "value", "part"), WRONG, ids=lambda v: str(v)[:20])
def test_wrong_values(key, value, part):
    path = f"CacheConfig: {SECTION_OF[key]}.{key} must be "
    for make in (CacheConfig, CacheConfig.resolve):
        with refused(path, part) as info:
            make(**{key: value})
        assert "\n" not in str(info.value)
    with refused(path, part):
        CacheConfig.from_dict({SECTION_OF[key]: {key: value}})


@given(key=st.sampled_from(sorted(FIELDS)), value=st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5,
))  # fmt: skip
def test_any_value_is_taken_or_refused_by_name(key, value):
    with contextlib.suppress(ConfigError):
        taken = getattr(CacheConfig(**{key: value}), key)
        assert taken == value
        assert type(taken) is type(value)
        return
    with pytest.raises(ConfigError) as info:
        CacheConfig(**{key: value})
    text = str(info.value)
    assert f"{SECTION_OF[key]}.{key}" in text
    assert "\n" not in text
    assert len(text) < 500


def test_a_broken_repr_does_not_hide_the_error():
    class Odd:
        def __repr__(self):
            raise RuntimeError

    with refused("kv_cache.block_size must be", "got <", "(Odd)"):
        CacheConfig(block_size=Odd())


def test_yaml_speaks_yaml_and_gives_lines(write):
    path = write("""
        kv_cache:
          cpu_offload: "true"
          block_size:
        window_size: "null"
        """)
    with refused(
        "3 errors",
        f"cpu_offload must be true or false, got 'true' (str) ({path}:3); "
        "write true, without quotes",
        f"block_size must be a multiple of 64 from 64 to 4096, got null ({path}:4); give a value",
        "window_size must be an integer of at least 1, auto, or null (no window), got 'null' (str)"
        f" ({path}:5); write null, without quotes",
    ):
        CacheConfig.from_yaml(path)
