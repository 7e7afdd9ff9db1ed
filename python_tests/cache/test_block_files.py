"""Blocks on disk: found again, never wrong, never lost once acknowledged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from stored_blocks import MODEL, block, key, leftovers, same, the_file, warnings

from omlx_cache.storage import block_files
from omlx_cache.storage.block_files import BlockFiles
from omlx_cache.storage.codec import RawTensor
from omlx_cache.storage.locks import locked
from omlx_cache.storage.sealed import SealedReader, SealedWriter

RANDOM = np.random.default_rng(0)
HELPER = Path(__file__).with_name("killed_writers.py")
ROOT = Path(__file__).parents[2]


def test_a_block_is_found_by_its_key_in_the_next_process_too(tmp_path):
    tensors = block() | {
        "empty": RawTensor("F16", (0, 4), b""),
        "mask": RawTensor("BOOL", (3,), b"\1\0\1"),
        'a "name" äöü': RawTensor("I64", (2,), bytes(16)),
    }
    assert BlockFiles(tmp_path / "new" / "directory", MODEL).put(key(1), tensors, {"tier": "hot"})
    files = BlockFiles(tmp_path / "new" / "directory", MODEL)
    found = files.get(key(1))
    assert same(found, tensors)
    assert found.metadata == {"tier": "hot"}
    assert key(1) in files
    assert key(2) not in files
    assert files.get(key(2)) is None
    files.discard(key(1))
    files.discard(key(1))
    assert files.get(key(1)) is None


def test_another_models_blocks_are_not_found(tmp_path):
    BlockFiles(tmp_path, MODEL).put(key(1), block())
    other = BlockFiles(tmp_path, b"another model")
    assert other.get(key(1)) is None
    assert other.put(key(1), block(1))
    assert same(BlockFiles(tmp_path, MODEL).get(key(1)), block())
    assert same(other.get(key(1)), block(1))


def test_any_reader_of_safetensors_can_open_a_block(tmp_path):
    tensors = {"k": RawTensor("U8", (2, 3), b"abcdef"), "s": RawTensor("F16", (64,), bytes(128))}
    BlockFiles(tmp_path, MODEL).put(key(1), tensors)
    opened = load_file(the_file(tmp_path))
    assert opened["k"].tobytes() == b"abcdef"
    assert opened["k"].shape == (2, 3)
    assert opened["s"].dtype == np.uint8  # compressed


def test_a_block_is_acknowledged_only_when_it_and_its_name_are_on_the_disk(tmp_path, monkeypatch):
    files, steps = BlockFiles(tmp_path, MODEL), []

    def note(name):
        call = getattr(os, name)

        def noted(target, *args, **kwargs):
            is_file = isinstance(target, int) and os.path.isfile(f"/proc/self/fd/{target}")
            steps.append(name + (" file" if is_file else " directory" if name == "fsync" else ""))
            return call(target, *args, **kwargs)

        monkeypatch.setattr(os, name, noted)

    for name in ("fsync", "replace", "utime"):
        note(name)
    assert files.put(key(1), block())
    assert steps == ["fsync file", "utime file", "replace", "fsync directory"]


@pytest.fixture
def fast_directory(tmp_path):
    """A directory in memory, where there is one: what is killed there takes milliseconds."""
    memory = Path("/dev/shm")
    if not (memory.is_dir() and os.access(memory, os.W_OK)):
        yield tmp_path
        return
    directory = memory / f"omlx-test-{os.getpid()}"
    directory.mkdir()
    yield directory
    shutil.rmtree(directory)


def run_helper(*args: str) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HELPER), *args]
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def finish(process: subprocess.Popen) -> str:
    out, problems = process.communicate()
    assert process.returncode == 0, problems
    return out


def test_killed_writers_lose_nothing_and_leave_nothing(fast_directory):
    """At each step of a writer's life, and at random moments, with a bound and without."""
    totals = json.loads(finish(run_helper("kill", str(fast_directory), "30")))
    assert totals["killed_at_steps"] >= 200
    assert totals["killed_at_random"] == 60
    assert totals["found"] >= 500


def test_two_processes_may_write_the_same_blocks(fast_directory):
    bound = 3 * 3700
    writers = [run_helper("write", str(fast_directory), "30", str(bound)) for _ in range(2)]
    watcher = BlockFiles(fast_directory, MODEL, bound)
    while any(writer.poll() is None for writer in writers):
        with locked(fast_directory):
            assert watcher.num_bytes() <= bound
        time.sleep(0.01)
    for writer in writers:
        finish(writer)
    assert not leftovers(fast_directory)
    assert not list(fast_directory.glob("*.damaged"))
    assert list(fast_directory.glob("*.safetensors"))


def test_every_flipped_bit_is_noticed(tmp_path, caplog):
    files = BlockFiles(tmp_path, MODEL)
    files.put(key(1), block(num_bytes=200))
    path = the_file(tmp_path)
    whole = path.read_bytes()
    aside = Path(f"{path}.damaged")
    for i in range(len(whole)):
        damaged = bytearray(whole)
        damaged[i] ^= 1 << RANDOM.integers(8)
        path.write_bytes(damaged)
        assert files.get(key(1)) is None, f"byte {i} of {len(whole)}"
        assert aside.read_bytes() == damaged, "it must be set aside"
        assert not path.exists()
    assert len(warnings(caplog)) == len(whole)
    path.write_bytes(whole)
    assert same(files.get(key(1)), block(num_bytes=200))


def test_truncated_and_longer_files_are_noticed(tmp_path):
    files = BlockFiles(tmp_path, MODEL)
    files.put(key(1), block())
    path = the_file(tmp_path)
    whole = path.read_bytes()
    for length in [*range(0, len(whole), 23), len(whole) - 1]:
        path.write_bytes(whole[:length])
        assert files.get(key(1)) is None, f"{length} of {len(whole)} bytes"
    for more in (b"\0", whole):
        path.write_bytes(whole + more)
        assert files.get(key(1)) is None


def test_foreign_files_are_set_aside_with_the_reason(tmp_path, caplog):
    files = BlockFiles(tmp_path, MODEL)
    files.put(key(1), block())
    mine = the_file(tmp_path)
    BlockFiles(tmp_path / "other", b"another model").put(key(1), block())
    shutil.copy(the_file(tmp_path / "other"), mine)
    assert files.get(key(1)) is None
    BlockFiles(tmp_path / "same", MODEL).put(key(2), block())
    shutil.copy(the_file(tmp_path / "same"), mine)
    assert files.get(key(1)) is None
    save_file({"k": np.zeros(4)}, mine)
    assert files.get(key(1)) is None
    with open(mine, "wb") as file:
        SealedWriter(file, "omlx_cache block 2", {}, []).finish()
    assert files.get(key(1)) is None
    reasons = ("fingerprint", "the key", "no file of omlx_cache", "'omlx_cache block 2'")
    for message, reason in zip(warnings(caplog), reasons, strict=True):
        assert reason in message
    assert files.put(key(1), block(1))
    assert same(files.get(key(1)), block(1))


def test_a_new_file_is_not_set_aside_for_the_damaged_one_before_it(tmp_path, monkeypatch):
    files = BlockFiles(tmp_path, MODEL)
    files.put(key(1), block())
    path = the_file(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])

    def replaced_meanwhile(file, kind):
        monkeypatch.setattr(block_files, "SealedReader", SealedReader)
        assert BlockFiles(tmp_path, MODEL).put(key(1), block())
        return SealedReader(file, kind)

    monkeypatch.setattr(block_files, "SealedReader", replaced_meanwhile)
    assert files.get(key(1)) is None
    assert same(files.get(key(1)), block())
