"""What is prepared is whole or absent, made once, and shared by processes."""

import multiprocessing
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from omlx_cache.tools import prepared as prepared_module
from omlx_cache.tools.prepared import PreparationError, cache_dir, prepared

NAME = "thing"


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep prepared things in a directory of this test."""
    monkeypatch.setenv("OMLX_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def build(scratch: Path) -> Path:
    """Make a directory with one file."""
    done = scratch / "done"
    done.mkdir()
    (done / "file").write_text("whole")
    return done


def leftovers(root: Path) -> list[str]:
    return [path.name for path in root.iterdir() if path.name not in (NAME, f"{NAME}.lock")]


def test_is_built_once(root: Path):
    calls = []

    def counted(scratch: Path) -> Path:
        calls.append(scratch)
        return build(scratch)

    first, second = prepared(NAME, counted), prepared(NAME, counted)
    assert first == second == root / NAME
    assert (first / "file").read_text() == "whole"
    assert len(calls) == 1
    assert leftovers(root) == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_build_leaves_nothing(root: Path, error: type[BaseException]):
    def broken(scratch: Path) -> Path:
        build(scratch)
        raise error("in the middle")

    with pytest.raises(error):
        prepared(NAME, broken)
    assert not (root / NAME).exists()
    assert leftovers(root) == []
    assert prepared(NAME, build).is_dir()


def test_what_a_killed_build_left_is_removed(root: Path):
    abandoned = root / f"{NAME}.tmp-1"
    abandoned.mkdir(parents=True)
    (abandoned / "half").write_text("half")
    prepared(NAME, build)
    assert leftovers(root) == []


def _build_slowly(log: Path) -> None:
    def build_and_log(scratch: Path) -> Path:
        with log.open("a") as lines:
            lines.write(f"{os.getpid()}\n")
        time.sleep(1.0)
        return build(scratch)

    assert (prepared(NAME, build_and_log) / "file").read_text() == "whole"


def test_two_processes_build_once(root: Path, tmp_path: Path):
    context = multiprocessing.get_context("fork")
    log = tmp_path / "builds"
    workers = [context.Process(target=_build_slowly, args=(log,)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert len(log.read_text().split()) == 1
    assert leftovers(root) == []


def test_a_waiting_process_says_so(root: Path):
    from filelock import FileLock

    root.mkdir(parents=True)
    other = FileLock(root / f"{NAME}.lock")
    other.acquire()
    heard = []

    def release_when_told(step: str, done: int = 0, total: int | None = None) -> None:
        heard.append(step)
        other.release()

    prepared(NAME, build, release_when_told)
    assert heard == [f"waiting for another process that is preparing {NAME}"]


def test_too_little_space_is_refused_before_building(monkeypatch):
    little = SimpleNamespace(free=5 * 2**20)
    monkeypatch.setattr(prepared_module.shutil, "disk_usage", lambda path: little)
    with pytest.raises(PreparationError, match=r"needs 7 MiB of free space, has 5 MiB"):
        prepared(NAME, lambda scratch: pytest.fail("was built"), needed_bytes=7 * 2**20)


def test_an_unusable_cache_directory_is_named(tmp_path: Path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OMLX_CACHE_DIR", str(tmp_path / "file" / "below"))
    with pytest.raises(PreparationError, match="OMLX_CACHE_DIR"):
        prepared(NAME, build)


def test_the_cache_directory_is_the_users_choice_or_the_platforms(root: Path, monkeypatch):
    assert cache_dir() == root
    monkeypatch.setenv("OMLX_CACHE_DIR", "")
    assert cache_dir().name == "omlx_cache"
    monkeypatch.setenv("OMLX_CACHE_DIR", "~/here")
    assert cache_dir() == Path.home() / "here"
