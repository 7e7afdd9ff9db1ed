"""Tuned tiles: which file is found, what is refused in it, and that launchers use what it says."""

from __future__ import annotations

import copy
import importlib
import json
import re

import pytest
import torch
from strategies import make_case
from tolerance import assert_as_exact_as_plain
from triton_device import needs_device, to_device

from omlx_kernels import ops, tuned
from omlx_kernels.launch import TileConfig
from omlx_kernels.layout import BlockFormat, Tier
from omlx_kernels.tuned_file import KEYS, Tuned, load, parse, row_bucket

GPU, TARGET = "NVIDIA GeForce RTX 3090", ("cuda", 86)
HEADS = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64}
CUDA = torch.device("cuda", 0)
GOOD = {
    "format": 1,
    "gpu": GPU,
    "target": ["cuda", 86],
    "made_with": {"triton": "3.7.1", "torch": "2.13.0", "commit": "a5c413f"},
    "entries": [
        {
            "op": "extend",
            "key": {"block_d": 64, "dtype": "float16", "rows": 64},
            "config": {"block_m": 32, "block_n": 16, "num_warps": 8, "num_stages": 2},
            "measured": {"ms": 0.5, "default_ms": 0.6, "workload": "4 x 8192 tokens"},
        },
        {
            "op": "append",
            "key": {"kv_heads": 8, "block_d": 128},
            "config": {"block_m": 2, "num_warps": 1},
            "measured": {"ms": 0.5, "default_ms": 0.6, "workload": "4096 tokens"},
        },
    ],
}


def changed(where: str, value: object) -> dict:
    """Return the good file with one field replaced (``entries.0.op``), or removed (``...``)."""
    content = copy.deepcopy(GOOD)
    *parents, last = [int(part) if part.isdigit() else part for part in where.split(".")]
    at = content
    for part in parents:
        at = at[part]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return content


@pytest.fixture
def directories(tmp_path, monkeypatch):
    """Make the user's and the package's directory, both empty; forget files read before."""
    user, shipped = tmp_path / "user", tmp_path / "shipped"
    user.mkdir()
    shipped.mkdir()
    monkeypatch.setenv("OMLX_TUNED_DIR", str(user))
    monkeypatch.setattr(tuned, "SHIPPED", shipped)
    monkeypatch.setattr(tuned, "identify", lambda index: (GPU, TARGET))
    tuned._of_device.cache_clear()
    yield user, shipped
    tuned._of_device.cache_clear()


def put(directory, content: dict = GOOD) -> None:
    (directory / tuned.file_name(GPU)).write_text(json.dumps(content))


def test_a_file_gives_its_tiles(tmp_path):
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(GOOD))
    assert load(path) == Tuned(
        GPU,
        TARGET,
        {
            ("extend", 64, "float16", 64): TileConfig(32, 16, 8, 2),
            ("append", 8, 128): TileConfig(2, 0, 1, 1),
        },
    )


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        ("format", 2, "format"),
        ("gpu", "", "gpu"),
        ("target", ["cuda", "86"], "target"),
        ("target", [["cuda"], 86], "target"),
        ("target", ["rocm", "gfx942"], "target"),
        ("made_with.commit", ..., "made_with"),
        ("entries", {}, "entries"),
        ("entries.0.op", "sort", "entries[0].op"),
        ("entries.0.op", [], "entries[0].op"),
        ("entries.0.key.rows", 48, "entries[0].key.rows"),
        ("entries.0.key.rows", True, "entries[0].key.rows"),
        ("entries.0.key.dtype", "int8", "entries[0].key.dtype"),
        ("entries.0.config.block_n", 128, "entries[0].config.block_n"),
        ("entries.0.config.num_warps", "8", "entries[0].config.num_warps"),
        ("entries.0.config.num_stages", ..., "no 'num_stages'"),
        ("entries.0.config.max_registers", 999, "entries[0].config.max_registers"),
        ("entries.1.config.num_stages", 1, "unknown 'num_stages'"),
        ("entries.1.config.block_m", 3, "entries[1].config.block_m"),
        ("entries.0.measured.ms", float("nan"), "entries[0].measured.ms"),
        ("entries.1", GOOD["entries"][0], "a second time"),
        ("remark", "", "unknown 'remark'"),
    ],
)
def test_a_wrong_file_is_refused_by_name_and_field(tmp_path, where, value, message):
    path = tmp_path / "gpu.json"
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        parse(changed(where, value), path)
    assert str(path) in str(caught.value)
    assert "autotune" in str(caught.value)


def test_a_file_that_is_no_json_is_refused(tmp_path):
    path = tmp_path / "gpu.json"
    path.write_text("{")
    with pytest.raises(ValueError, match="JSON"):
        load(path)


def test_lookup_reads_the_users_file_before_the_packages(directories):
    user, shipped = directories
    key = ("extend", CUDA, 64, "float16", 64)
    assert tuned.lookup(*key) is None  # no file

    tuned._of_device.cache_clear()
    put(shipped)
    assert tuned.lookup(*key) == TileConfig(32, 16, 8, 2)
    assert tuned.lookup("decode", CUDA, 64, "float16", 4) is None  # not in it
    assert tuned.lookup("extend", torch.device("cpu"), 64, "float16", 64) is None

    tuned._of_device.cache_clear()
    put(user, changed("entries.0.config.num_warps", 4))
    assert tuned.lookup(*key) == TileConfig(32, 16, 4, 2)


def test_rows_share_the_entry_of_their_bucket(directories):
    put(directories[0])
    found = {rows: tuned.lookup("extend", CUDA, 64, "float16", rows) for rows in (32, 33, 64, 65)}
    assert found == {32: None, 33: TileConfig(32, 16, 8, 2), 64: TileConfig(32, 16, 8, 2), 65: None}
    assert row_bucket(10**6) == 512


@pytest.mark.parametrize(
    ("where", "value"), [("gpu", "NVIDIA GeForce RTX 4090"), ("target", ["cuda", 89])]
)
def test_another_gpus_file_is_refused(directories, where, value):
    put(directories[0], changed(where, value))
    with pytest.raises(ValueError, match=f"{where} must be .*like the device"):
        tuned.lookup("extend", CUDA, 64, "float16", 64)


def test_files_that_ship_are_right():
    for path in tuned.SHIPPED.glob("*.json"):
        assert path.name == tuned.file_name(load(path).gpu)
    assert (tuned.SHIPPED / "README.md").is_file()


def no_default(*args: object, **kwargs: object) -> TileConfig:
    raise AssertionError("the default was asked for")


@needs_device
@pytest.mark.parametrize("op", KEYS)
def test_launchers_use_a_tuned_tile(op, monkeypatch):
    keys = {"append": (2, 64), "convert": (64,), "decode": (64, "float16", 2)}
    keys["extend"] = (64, "float16", 32)
    tiles = {"append": TileConfig(1, 0, 2, 1), "convert": TileConfig(0, 64, 2, 1)}
    tile = tiles.get(op, TileConfig(32, 16, 2, 1))
    module = {"append": "append_kv", "convert": "convert_blocks"}.get(op, op)
    module = importlib.import_module(f"omlx_kernels.triton.{module}")
    monkeypatch.setattr(module, f"{op}_config", no_default)
    with (
        ops.use_implementation("triton"),
        tuned.using(Tuned("any", TARGET, {(op, *keys[op]): tile})),
    ):
        if op in ("append", "convert"):
            write(op)
        else:
            new = 1 if op == "decode" else 9  # 18 rows: the bucket of 32
            case = make_case([90], [new], **HEADS, dtype=torch.float16)
            there = to_device(case)
            kwargs = {name: to_device(x) for name, x in case.attention_kwargs().items()}
            got = ops.paged_attention(there.q, there.blocks, there.meta, **kwargs)
            assert_as_exact_as_plain(got, case, **case.attention_kwargs())
    with ops.use_implementation("triton"), pytest.raises(AssertionError, match="default"):
        write(op) if op in ("append", "convert") else ops.paged_attention(
            there.q, there.blocks, there.meta, **kwargs
        )


def write(op: str) -> None:
    """Call the op that writes blocks, on 64 tokens of 2 heads."""
    fmt = BlockFormat(64, 4, 2, 64, torch.float16)
    hot, cold = (to_device(fmt.allocate(tier, 1, "cpu")) for tier in (Tier.HOT, Tier.K8V8))
    if op == "append":
        k, v = to_device(torch.randn(2, 64, 2, 64).half())
        ops.append_kv(k, v, hot, to_device(torch.arange(64)))
        assert torch.equal(hot.k[0].transpose(0, 1), k)
        return
    hot.k.fill_(1.0)
    hot.v.fill_(1.0)
    ids = to_device(torch.zeros(1, dtype=torch.int32))
    ops.convert_blocks(hot, cold, Tier.HOT, Tier.K8V8, ids, ids)
    assert (cold.v == 127).all()
