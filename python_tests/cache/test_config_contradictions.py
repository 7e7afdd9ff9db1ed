"""CacheConfig: values that are legal alone and exclude each other, or the model, are refused."""

import pathlib

import pytest
from configurations import refused

from omlx_cache.config import CacheConfig, check_model_bits


@pytest.mark.parametrize(("window", "sinks"), [(1, 1), (4, 4), (3, 4), (64, 64), (1, 64)])
def test_a_window_must_be_more_than_the_sinks(window, sinks):
    with refused(
        f"attention.window_size must be more than attention.sink_tokens, got {window} and {sinks}",
        f"window_size to at least {sinks + 1}, or sink_tokens to at most {window - 1}",
    ):
        CacheConfig(window_size=window, sink_tokens=sinks)
    CacheConfig(window_size=sinks + 1, sink_tokens=sinks)
    CacheConfig(window_size=window, sink_tokens=window - 1)


def test_a_contradiction_with_a_default_says_so_and_overrides_can_make_one(write):
    with refused("got 3 and 4 (the default)"):
        CacheConfig(window_size=3)
    path = write("attention:\n  window_size: 16\n")
    with refused(f"got 16 ({path}:2) and 64; set"):
        CacheConfig.resolve(path, sink_tokens=64)
    assert CacheConfig.resolve(path, sink_tokens=64, window_size=None).window_size is None


def test_a_disk_cache_turns_the_prefix_cache_on_and_can_not_do_without(write):
    config = CacheConfig(disk_cache=True)
    assert config.prefix_cache is True
    assert config == CacheConfig.resolve({"kv_cache": {"disk_cache": True}})
    assert CacheConfig.resolve(CacheConfig(), disk_cache=pathlib.Path("x")).disk_cache == "x"
    path = write("kv_cache:\n  disk_cache: true\n  prefix_cache: false\n")
    with refused(f"kv_cache.disk_cache ({path}:2)", f"delete kv_cache.prefix_cache: false ({path}"):
        CacheConfig.from_yaml(path)
    with refused("delete kv_cache.prefix_cache: False, or make it true"):
        config.model_copy(update={"prefix_cache": False})
    assert config.model_copy(update={"disk_cache": False}) == CacheConfig()


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ({"prune_ratio": 0.3}, "prune_ratio means nothing without pruning; set pruning to 'topk'"),
        ({"max_cpu_blocks": 3}, "max_cpu_blocks means nothing without cpu_offload"),
    ],
    ids=str,
)
def test_keys_that_do_not_fit_each_other(keys, part):
    with refused(part):
        CacheConfig(**keys)


def test_cache_bits_beside_tiers_is_a_contradiction(write):
    path = write("cache_bits: 4\ntiers: {k8v4: 100, k4v4: null}\n")
    with refused(
        f"quantization.cache_bits ({path}:1) and quantization.tiers ({path}:2) exclude each other",
        "delete all but one",
    ):
        CacheConfig.from_yaml(path)
    assert CacheConfig.resolve(path, tiers=None).cache_bits == 4


@pytest.mark.parametrize(
    ("wanted", "actual"), [(None, 4), (None, None), (4, 4), (16, None), (32, None), (16, 16)]
)
def test_model_bits_that_fit(wanted, actual):
    check_model_bits(CacheConfig(model_bits=wanted), actual)


@pytest.mark.parametrize(
    ("wanted", "actual", "part"),
    [
        (4, 8, "is 4, but the model has 8-bit weights; set model_bits to 8, or delete the key"),
        (16, 4, "is 16, but the model has 4-bit weights; set model_bits to 4"),
        (16, 32, "has 32-bit weights"),
        (4, None, "is 4, but the model is not quantized; set model_bits to 16 (32 for float32)"),
    ],
)
def test_model_bits_that_contradict(wanted, actual, part):
    with refused("quantization.model_bits", part):
        check_model_bits(CacheConfig(model_bits=wanted), actual)
