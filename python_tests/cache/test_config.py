"""CacheConfig: every form of a configuration gives the same one, and it stays as it is."""

import copy
import pathlib
import pickle
import re

import pytest
import yaml
from configurations import FIELDS, PRECISION, SECTION_OF, landed, nested
from hypothesis import given, reject

from omlx_cache import config_fields
from omlx_cache.config import SECTIONS, CacheConfig, ConfigError

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


@given(landed())
def test_every_form_gives_the_same_configuration(tmp_path_factory, leaf_keys):
    config = CacheConfig(**leaf_keys)
    path = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8")
    assert CacheConfig.from_yaml(path) == config
    assert CacheConfig.from_dict(config.to_dict()) == config
    assert CacheConfig.from_dict(nested(leaf_keys)) == config
    assert CacheConfig.from_dict(leaf_keys) == config
    assert CacheConfig.from_dict(nested(leaf_keys) | leaf_keys) == config  # mixed, and they agree
    assert CacheConfig.resolve(config) == CacheConfig.resolve(**leaf_keys) == config
    assert CacheConfig.resolve(path) == CacheConfig.resolve(str(path)) == config
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    assert hash(CacheConfig(**leaf_keys)) == hash(config)
    assert all(getattr(config, key) == value for key, value in leaf_keys.items())


@given(landed(), landed())
def test_overrides_replace_and_leave_the_rest(base, over):
    if {**base, **over}.get("window_size") not in (None, "auto"):
        over = {**over, "window_size": 100, "sink_tokens": 0}
    if any(key in over for key in PRECISION):  # one setting with three names
        base = {key: value for key, value in base.items() if key not in PRECISION}
    try:
        CacheConfig(**{**base, **over})
    except ConfigError:  # each is legal; together they exclude each other
        reject()
    for source in (base, nested(base), CacheConfig(**base)):
        assert CacheConfig.resolve(source, **over) == CacheConfig(**{**base, **over})


def test_the_yaml_form_holds_every_key_in_its_section():
    sections = yaml.safe_load(CacheConfig().to_yaml())
    assert list(sections) == list(SECTIONS)
    assert {k: s for s, keys in sections.items() for k in keys} == SECTION_OF


def test_defaults():
    assert CacheConfig().model_dump() == {
        "block_size": 256,
        "max_gpu_blocks": None,
        "cpu_offload": False,
        "max_cpu_blocks": None,
        "recall": "all",
        "recall_blocks": 16,
        "disk_cache": False,
        "max_disk_bytes": 10**10,
        "prefetch": True,
        "recent_tokens": 128,
        "prefill_chunk": 512,
        "prefix_cache": False,
        "prefix_cache_blocks": 64,
        "model_bits": None,
        "cache_bits": 8,
        "tiers": None,
        "target_saving": None,
        "keep_layers": "auto",
        "window_size": "auto",
        "sink_tokens": 4,
        "pruning": None,
        "prune_ratio": 0.0,
    }
    assert CacheConfig.resolve() == CacheConfig.from_dict({}) == CacheConfig()


def test_a_section_without_keys_is_empty(write):
    path = write("""
        kv_cache:
          # block_size: 512
        attention:
          window_size: 2048
        """)
    assert CacheConfig.from_yaml(path) == CacheConfig(window_size=2048)


def test_yaml_merges_and_a_byte_order_mark_are_read(write):
    path = write(b"\xef\xbb\xbfkv_cache: &a {block_size: 512}\n")
    assert CacheConfig.from_yaml(path) == CacheConfig(block_size=512)
    path = write("kv_cache:\n  <<: {block_size: 512, recent_tokens: 1}\n  recent_tokens: 2\n")
    assert CacheConfig.from_yaml(path) == CacheConfig(block_size=512, recent_tokens=2)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_file(path):
    CacheConfig.from_yaml(path)


def test_the_default_file_is_the_defaults_in_full():
    text = (CONFIGS / "default.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(text) == CacheConfig().to_dict()
    assert CacheConfig.from_yaml(CONFIGS / "default.yaml") == CacheConfig()


def test_the_article_file_is_the_articles():
    assert yaml.safe_load((CONFIGS / "article.yaml").read_text(encoding="utf-8")) == {
        "kv_cache": {
            "block_size": 512,
            "max_gpu_blocks": 16,
            "cpu_offload": True,
            "disk_cache": False,
        },
        "quantization": {"model_bits": 4, "cache_bits": 8},
        "attention": {"window_size": 2048, "pruning": "topk"},
    }


def test_every_field_can_be_documented():
    for key, field in FIELDS.items():
        assert len(field.description) > 60, key
        assert field.json_schema_extra["section"] in SECTIONS
        assert key in config_fields.__doc__


def test_a_configuration_stays_as_it_is():
    config = CacheConfig(window_size=1024)
    remedy = re.escape("CacheConfig.resolve(config, block_size=…)")
    with pytest.raises(AttributeError, match=remedy):
        config.block_size = 512
    with pytest.raises(AttributeError, match=remedy):
        del config.block_size
    assert config.model_copy(update={"block_size": 512}) == CacheConfig.resolve(
        config, block_size=512
    )
    assert config == CacheConfig(window_size=1024)
    tiers = {"k8v8": 64, "k4v4": None}
    assert hash(CacheConfig(tiers=tiers)) == hash(CacheConfig(tiers=dict(tiers)))
