"""BlockFiles on a disk that fails: one warning, and nothing that was there is lost."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
from pathlib import Path

import pytest
from stored_blocks import MODEL, block, fails, key, leftovers, same, warnings

from omlx_cache.storage import block_files
from omlx_cache.storage.block_files import BlockFiles
from omlx_cache.storage.sealed import SealedReader, SealedWriter


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
