"""CacheConfig: what is accepted, what is refused, and whether the message says how to mend it."""

import contextlib
import copy
import pathlib
import pickle
import re
import textwrap

import pytest
import yaml
from hypothesis import example, given, reject
from hypothesis import strategies as st

from omlx_cache import config_fields
from omlx_cache.config import SECTIONS, CacheConfig, ConfigError, check_model_bits

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
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


@pytest.fixture
def write(tmp_path):
    """Write text or bytes to a file, whose path has a short name."""

    def write(content, name="c.yaml"):
        path = tmp_path / name
        raw = content if isinstance(content, bytes) else textwrap.dedent(content).encode()
        path.write_bytes(raw)
        return path

    return write


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


# ---------------------------------------------------------------- what is accepted


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


# ---------------------------------------------------------------- wrong values

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


# ---------------------------------------------------------------- contradictions


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


# ---------------------------------------------------------------- keys


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


# ---------------------------------------------------------------- keys beside each other


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


# ---------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("", ["is empty", "defaults"]),
        ("# nothing\n", ["is empty"]),
        ("---\n...\n", ["is empty"]),
        (
            "- block_size\n",
            ["must be a mapping of sections (kv_cache, ", "got ['block_size'] (list)"],
        ),
        ("block_size 512\n", ["must be a mapping", "`key: value`"]),
        (
            "kv_cache:\n\tblock_size: 512\n",
            [":2:1: not valid YAML", "indent with spaces, not tabs"],
        ),
        ("kv_cache:\n  a: 1\n b: 2\n", [":3:2: not valid YAML"]),
        ("block_size: [512\n", ["not valid YAML"]),
        ("a: b: c\n", [":1:5: not valid YAML: mapping values are not allowed here"]),
        ("a: 1\n---\nb: 2\n", [":2:1: not valid YAML", "another document"]),
        ("a: !!python/name:os.system x\n", [":1:4: not valid YAML"]),
        ("a: 2024-13-45\n", ["not valid YAML: month must be in 1..12"]),
        ("a: !!int x\n", ["not valid YAML"]),
        ("? [1]\n: 2\n", ["unhashable"]),
        ("[" * 5000, ["not valid YAML"]),
        (b"\x80\x02}q\x00.", ["is not UTF-8 text (byte 0 is 0x80); give a YAML file"]),
        (b"PK\x03\x04 binary", ["not valid YAML", "#x0003"]),
        ("block_size: 256\n".encode("utf-16"), ["is not UTF-8 text"]),
        (b"# " + b"x" * (1 << 20), ["over 1 MiB"]),
        (
            "kv_cache:\n  block_size: 512\n  block_size: 512\nkv_cache: {}\n",
            [
                ":3: block_size is written twice, first on line 2; keep one",
                ":4: kv_cache is written twice, first on line 1; keep one",
            ],
        ),
        ("cache_bits: {k: 8,\n  k: 8}\n", [":2: k is written twice, first on line 1"]),
    ],
    ids=lambda v: repr(v)[:30],
)
def test_unreadable_files(write, content, parts):
    path = write(content)
    with refused(str(path), *parts):
        CacheConfig.from_yaml(path)


@given(st.text() | st.binary(max_size=40))
@example("a: &a [*a]")
@example("&a kv_cache: *a")
@example("kv_cache: &a {block_size: *a}")
@example("tiers: &a {k: *a}")
@example("=: 1")
def test_any_file_is_refused_clearly(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    raw = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
    path.write_bytes(raw)
    with pytest.raises(ConfigError, match="CacheConfig: "):
        CacheConfig.from_yaml(path)


def test_missing_files_say_what_is_near(write, tmp_path):
    path = write("block_size: 64\n", "chat.yaml")
    with refused(
        f"{tmp_path}/chta.yaml does not exist; did you mean {path}?", of=FileNotFoundError
    ):
        CacheConfig.from_yaml(tmp_path / "chta.yaml")
    with refused(f"does not exist; looked in {tmp_path}", of=FileNotFoundError):
        CacheConfig.resolve(str(tmp_path / "zzzzzz"))
    with refused(f"there is no folder {tmp_path}/nowhere", of=FileNotFoundError):
        CacheConfig.resolve(tmp_path / "nowhere" / "chat.yaml")
    with refused(str(tmp_path), "can't be read", "give the path of a", of=IsADirectoryError):
        CacheConfig.from_yaml(tmp_path)


def test_what_is_no_configuration():
    with refused("config must be a CacheConfig, a dict or the path of a YAML file, got int"):
        CacheConfig.resolve(5)
    with refused("config must be", "got list"):
        CacheConfig.resolve([("block_size", 512)])
    with refused("from_dict needs a dict, got str"):
        CacheConfig.from_dict("configs/chat.yaml")
    with refused("the path of a YAML file is needed", "from_dict(yaml.safe_load(text))"):
        CacheConfig.resolve(CacheConfig().to_yaml())
    with refused("the path of a YAML file is needed, got ''"):
        CacheConfig.resolve("")
    with refused("the path of a YAML file is needed, got b'x' (bytes)"):
        CacheConfig.from_yaml(b"x")


# ---------------------------------------------------------------- the object, the model's bits


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
