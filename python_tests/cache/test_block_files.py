"""Blocks on disk: found again, never wrong, never lost once acknowledged, whatever happens."""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from omlx_cache.storage import block_files, locks
from omlx_cache.storage.block_files import BlockFiles
from omlx_cache.storage.codec import RawTensor
from omlx_cache.storage.locks import locked
from omlx_cache.storage.sealed import SealedReader, SealedWriter

MODEL = b"fingerprint of a model"
RANDOM = np.random.default_rng(0)
HELPER = Path(__file__).with_name("killed_writers.py")
ROOT = Path(__file__).parents[2]


def block(seed: int = 0, num_bytes: int = 600) -> dict[str, RawTensor]:
    """Return tensors of which one can be compressed and the other can't."""
    noise = np.random.default_rng(seed).bytes(num_bytes)
    return {
        "k": RawTensor("U8", (1, num_bytes), noise),
        "v": RawTensor("BF16", (2, 150), noise[:100] * 6),
    }


def same(found, tensors: dict[str, RawTensor]) -> bool:
    """Whether `BlockFiles.get` found exactly these tensors."""
    assert found is not None
    return {n: (t.dtype, t.shape, bytes(t.data)) for n, t in found.tensors.items()} == {
        n: (t.dtype, t.shape, bytes(t.data)) for n, t in tensors.items()
    }


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def the_file(directory: Path) -> Path:
    (path,) = directory.glob("*.safetensors")
    return path


def warnings(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def leftovers(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.name.endswith(".tmp")]


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


def fails(code: int):
    def call(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    return call


def no_disk_left(monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", fails(errno.ENOSPC), raising=False)


def no_disk_left_in_the_middle(monkeypatch):
    monkeypatch.setattr(SealedWriter, "finish", fails(errno.ENOSPC))


def no_name_left(monkeypatch):
    monkeypatch.setattr(os, "replace", fails(errno.EDQUOT))


def io_error_at_the_end(monkeypatch):
    monkeypatch.setattr(os, "fsync", fails(errno.EIO))


def not_writable(code: int):
    """Return what the kernel does to someone who isn't root; the tests may run as root."""
    real = os.open

    def call(path, flags, *args, **kwargs):
        if flags & (os.O_CREAT | os.O_RDWR | os.O_WRONLY):
            raise OSError(code, os.strerror(code), str(path))
        return real(path, flags, *args, **kwargs)

    return call


def permission_denied(monkeypatch):
    monkeypatch.setattr(os, "open", not_writable(errno.EACCES))


def read_only_disk(monkeypatch):
    monkeypatch.setattr(os, "open", not_writable(errno.EROFS))
    monkeypatch.setattr(os, "utime", fails(errno.EROFS))
    monkeypatch.setattr(Path, "mkdir", fails(errno.EROFS))


FAILURES = (
    no_disk_left,
    no_disk_left_in_the_middle,
    no_name_left,
    io_error_at_the_end,
    permission_denied,
    read_only_disk,
)


@pytest.mark.parametrize("failure", FAILURES, ids=lambda f: f.__name__)
def test_what_cannot_be_written_is_one_warning_and_loses_nothing(
    tmp_path, monkeypatch, caplog, failure
):
    files = BlockFiles(tmp_path, MODEL, max_bytes=10_000)
    assert files.put(key(1), block(1))
    assert files.put(key(2), block(2))
    with monkeypatch.context() as patch:
        failure(patch)
        for number in (1, 3, 4, 5):  # 1 would be replaced
            assert not files.put(key(number), block(9))
        assert len(warnings(caplog)) == 1
        assert "can't write" in warnings(caplog)[0]
        assert str(tmp_path) in warnings(caplog)[0]
        assert same(files.get(key(1)), block(1))
        assert same(files.get(key(2)), block(2))
        assert same(BlockFiles(tmp_path, MODEL).get(key(1)), block(1))
    assert not leftovers(tmp_path)
    assert files.put(key(3), block(3))  # there is room again


@pytest.mark.parametrize("code", [None, errno.EOPNOTSUPP])
def test_a_disk_that_cannot_set_space_aside_is_written_to(tmp_path, monkeypatch, code):
    if code is None:
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    else:
        monkeypatch.setattr(os, "posix_fallocate", fails(code), raising=False)
    files = BlockFiles(tmp_path, MODEL)
    assert files.put(key(1), block())
    assert same(files.get(key(1)), block())


def test_a_file_size_limit_of_the_system_is_a_full_disk(tmp_path, caplog):
    files = BlockFiles(tmp_path, MODEL)
    assert files.put(key(1), block(1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        assert not files.put(key(2), block(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(warnings(caplog)) == 1
    assert not leftovers(tmp_path)
    assert same(files.get(key(1)), block(1))


def test_a_full_disk_that_is_one(tmp_path, caplog):
    mounted = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if shutil.which("mount") is None or subprocess.run(mounted, capture_output=True).returncode:
        pytest.skip("this user may not mount a small disk")
    try:
        files = BlockFiles(tmp_path, MODEL)
        stored = [n for n in range(40) if files.put(key(n), block(n, 5000))]
        assert 1 <= len(stored) < 40
        assert len(warnings(caplog)) == 1
        assert all(same(files.get(key(n)), block(n, 5000)) for n in stored)
        files.discard(key(stored[0]))
        assert files.put(key(50), block(50, 5000))
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_unreadable_blocks_are_misses(tmp_path, monkeypatch, caplog):
    files = BlockFiles(tmp_path, MODEL)
    files.put(key(1), block())
    with monkeypatch.context() as patch:
        patch.setattr(block_files, "open", fails(errno.EACCES), raising=False)
        assert files.get(key(1)) is None
        assert files.get(key(1)) is None
    assert len(warnings(caplog)) == 1
    with monkeypatch.context() as patch:
        patch.setattr(SealedReader, "read", fails(errno.EIO))
        assert files.get(key(1)) is None
    assert same(files.get(key(1)), block()), "an error of the disk says nothing about the file"


def test_a_directory_that_is_deleted_comes_back(tmp_path):
    files = BlockFiles(tmp_path / "blocks", MODEL)
    files.put(key(1), block())
    shutil.rmtree(tmp_path / "blocks")
    assert files.get(key(1)) is None
    assert files.num_bytes() == 0
    assert files.put(key(1), block())
    assert same(files.get(key(1)), block())


def test_the_block_unused_for_longest_is_evicted(tmp_path):
    BlockFiles(tmp_path, MODEL).put(key(0), block(0))
    size = the_file(tmp_path).stat().st_size
    (tmp_path / "somebody's.safetensors").write_bytes(bytes(10 * size))  # none of our business
    files = BlockFiles(tmp_path, MODEL, max_bytes=3 * size + size // 2)
    for number in (1, 2):
        assert files.put(key(number), block(number))
    assert files.get(key(0)) is not None  # used last now
    assert files.put(key(3), block(3))
    kept = [number for number in range(4) if key(number) in files]
    assert kept == [0, 2, 3]
    again = BlockFiles(tmp_path, MODEL, max_bytes=3 * size + size // 2)  # knows the order
    assert again.get(key(2)) is not None
    assert again.put(key(4), block(4))
    assert [number for number in range(5) if key(number) in again] == [2, 3, 4]
    assert again.num_bytes() <= again.max_bytes
    assert (tmp_path / "somebody's.safetensors").exists()


def test_no_clock_decides_what_is_evicted(tmp_path, monkeypatch):
    size = 0
    files = BlockFiles(tmp_path, MODEL, max_bytes=10**6)
    for number, now in enumerate((4e9, 1e9, 0.0, 2e9)):  # a clock that jumps
        monkeypatch.setattr(time, "time", lambda now=now: now)
        monkeypatch.setattr(time, "time_ns", lambda now=now: int(now * 1e9))
        assert files.put(key(number), block(number))
        size = max(size, files.num_bytes() // (number + 1))
    first = files._path(key(0))
    os.utime(first, ns=(2**62, 2**62))  # dated to the year 2116 by something else: the oldest
    os.utime(files._path(key(1)))  # and one to now: the newest
    files = BlockFiles(tmp_path, MODEL, max_bytes=4 * size + 100)
    assert files.put(key(4), block(4))
    assert [n for n in range(5) if key(n) in files] == [1, 2, 3, 4]
    assert files.get(key(2)) is not None
    assert files.put(key(5), block(5))
    assert files.put(key(6), block(6))
    assert [n for n in range(7) if key(n) in files] == [2, 4, 5, 6]


def test_a_block_larger_than_the_bound_evicts_nothing(tmp_path, caplog):
    files = BlockFiles(tmp_path, MODEL, max_bytes=8000)
    assert files.put(key(1), block(1))
    assert not files.put(key(2), block(2, 20_000))
    assert same(files.get(key(1)), block(1))
    assert "larger than max_bytes=8000" in warnings(caplog)[0]
    with pytest.raises(ValueError, match="max_bytes must be positive, got 0"):
        BlockFiles(tmp_path, MODEL, max_bytes=0)


def test_what_was_set_aside_is_evicted_first(tmp_path):
    files = BlockFiles(tmp_path, MODEL)
    files.put(key(1), block(1))
    size = the_file(tmp_path).stat().st_size
    files.put(key(2), block(2))
    files._path(key(2)).write_bytes(bytes(size))
    assert files.get(key(2)) is None
    files = BlockFiles(tmp_path, MODEL, max_bytes=2 * size + 50)
    assert files.put(key(3), block(3))
    assert same(files.get(key(1)), block(1))
    assert not list(tmp_path.glob("*.damaged"))


def test_unfinished_files_stay_while_their_writer_lives(tmp_path):
    tmp = tmp_path / "block-x.1.2.tmp"
    with open(tmp, "wb") as file:
        assert locks.try_lock(file.fileno())
        os.utime(tmp, (0, 0))  # very old, says the clock
        BlockFiles(tmp_path, MODEL)
        assert tmp.exists()
    BlockFiles(tmp_path, MODEL)
    assert not tmp.exists()


def test_what_others_are_writing_counts(tmp_path):
    files = BlockFiles(tmp_path, MODEL)
    files.put(key(1), block(1))
    size = the_file(tmp_path).stat().st_size
    files = BlockFiles(tmp_path, MODEL, max_bytes=3 * size + 50)
    with open(tmp_path / "block-x.1.2.tmp", "wb") as other:
        assert locks.try_lock(other.fileno())
        other.truncate(size)
        assert files.put(key(2), block(2))
        assert key(1) in files
        assert files.put(key(3), block(3))
        assert key(1) not in files
        other.truncate(3 * size)
        assert not files.put(key(4), block(4))
        assert same(files.get(key(2)), block(2)), "nothing goes for what can't come"
    assert files.put(key(4), block(4))


def test_a_writer_that_hangs_does_not_hang_the_others(tmp_path, monkeypatch, caplog):
    files = BlockFiles(tmp_path, MODEL)
    files.put(key(1), block())
    monkeypatch.setattr(locks, "LOCK_SECONDS", 0.02)
    with locked(tmp_path):
        assert not files.put(key(2), block())
        assert same(files.get(key(1)), block())
    assert len(warnings(caplog)) == 1
    assert files.put(key(2), block())


def test_a_deleted_lock_file_lets_nobody_in_twice(tmp_path, monkeypatch):
    BlockFiles(tmp_path, MODEL)
    real, stolen = locks.try_lock, []

    def try_lock(descriptor):
        if not stolen:
            (tmp_path / locks.LOCK_NAME).unlink()
            stolen.append(descriptor)
        return real(descriptor)

    monkeypatch.setattr(locks, "try_lock", try_lock)
    monkeypatch.setattr(locks, "LOCK_SECONDS", 0.02)
    with locked(tmp_path), pytest.raises(TimeoutError), locked(tmp_path):
        pass
