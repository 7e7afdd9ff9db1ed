"""The directory of the blocks: its bound, who leaves it first, and other processes that write."""

from __future__ import annotations

import os
import time

import pytest
from stored_blocks import MODEL, block, key, same, the_file, warnings

from omlx_cache.storage import locks
from omlx_cache.storage.block_files import BlockFiles
from omlx_cache.storage.locks import locked


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
