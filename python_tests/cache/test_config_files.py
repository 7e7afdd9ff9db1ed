"""CacheConfig: a file that is missing, or is no configuration, is refused with the place."""

import pytest
from configurations import refused
from hypothesis import example, given
from hypothesis import strategies as st

from omlx_cache.config import CacheConfig, ConfigError


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
