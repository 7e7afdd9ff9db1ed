"""CacheConfig: keys that are unknown, misplaced or given twice are refused by name."""

import pickle

import pytest
from configurations import SECTION_OF, refused

from omlx_cache.config import SECTIONS, CacheConfig


@pytest.mark.parametrize(
    ("typo", "right"),
    [
        ("blocksize", "kv_cache.block_size"),
        ("blockSize", "kv_cache.block_size"),
        ("block-size", "kv_cache.block_size"),
        ("max_blocks", "kv_cache.max_gpu_blocks"),
        ("window", "attention.window_size"),
        ("sink_token", "attention.sink_tokens"),
        ("cachebits", "quantization.cache_bits"),
        ("prunning", "attention.pruning"),
        ("target_savings", "quantization.target_saving"),
    ],
)
def test_unknown_keys_get_the_nearest(typo, right):
    with refused(f"unknown key {typo}; did you mean {right}?"):
        CacheConfig(**{typo: 1})
    with refused(f"unknown key {typo}; did you mean {right}?"):
        CacheConfig.resolve(None, **{typo: 1})
    section = right.split(".")[0]
    with refused(f"unknown key {section}.{typo}; did you mean {right}?"):
        CacheConfig.from_dict({section: {typo: 1}})


def test_unknown_keys_without_a_near_one_list_the_known():
    with refused("unknown key zzz; known keys: block_size, ", "pruning"):
        CacheConfig(zzz=1)
    with refused("unknown key attention.zzz; known keys: window_size, sink_tokens, pruning"):
        CacheConfig.from_dict({"attention": {"zzz": 1}})


def test_sections_are_told_from_keys():
    with refused("unknown section kv_cach; did you mean kv_cache?"):
        CacheConfig.from_dict({"kv_cach": {"block_size": 512}})
    with refused("kv_cache is a section, not a keyword", "from_dict"):
        CacheConfig(kv_cache={"block_size": 512})
    with refused("kv_cache is a section, not a keyword"):
        CacheConfig.resolve({}, kv_cache={"block_size": 512})
    with refused("kv_cache is a section and must hold keys (block_size, ", "got 5 (int)"):
        CacheConfig.from_dict({"kv_cache": 5})
    with refused("unknown key kv_cache.block_size; nest it, kv_cache: {block_size: …}"):
        CacheConfig.from_dict({"kv_cache.block_size": 512})


@pytest.mark.parametrize("key", sorted(SECTION_OF))
def test_a_key_in_a_wrong_section_is_sent_home(key, write):
    home = SECTION_OF[key]
    for section in set(SECTIONS) - {home}:
        with refused(f"{section}.{key} is in the wrong section; move it to {home}.{key}"):
            CacheConfig.from_dict({section: {key: 1}})
        path = write(f"{section}:\n  {key}: 1\n")
        with refused(
            f"{section}.{key} ({path}:2) is in the wrong section; move it to {home}.{key}"
        ):
            CacheConfig.from_yaml(path)


def test_one_key_in_two_places_must_agree(write):
    both = {"kv_cache": {"block_size": 512}, "block_size": 256}
    with refused("kv_cache.block_size is given twice with different values, 512 and 256; keep one"):
        CacheConfig.from_dict(both)
    path = write("block_size: 256\nkv_cache:\n  block_size: 512\n")
    with refused(f"different values, 256 ({path}:1) and 512 ({path}:3)"):
        CacheConfig.from_yaml(path)
    with refused("different values, True and 1"):  # equal in Python, not the same answer
        CacheConfig.from_dict({"kv_cache": {"cpu_offload": True}, "cpu_offload": 1})


def test_keys_that_are_no_text(write):
    with refused("a key must be text, got 1 (int)", "a key must be text, got None (NoneType)"):
        CacheConfig.from_dict({1: 2, "kv_cache": {None: 3}})
    path = write("on: 1\n")  # YAML 1.1 reads it as true
    with refused(f"a key must be text, got true (bool) ({path}:1)"):
        CacheConfig.from_yaml(path)


def test_several_errors_come_together_one_a_line():
    with refused(
        "CacheConfig: 5 errors\n",
        "\n  - unknown key foo;",
        "\n  - kv_cache.block_size must be",
        "\n  - quantization.cache_bits must be",
        "\n  - attention.window_size must be more than",
        "\n  - attention.prune_ratio means nothing without pruning",
    ) as info:
        CacheConfig(foo=1, block_size=100, cache_bits=5, window_size=3, prune_ratio=0.6)
    assert len(info.value.args) == 5
    assert isinstance(info.value, ValueError)
    assert str(pickle.loads(pickle.dumps(info.value))) == str(info.value)
