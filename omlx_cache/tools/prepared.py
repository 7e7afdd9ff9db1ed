"""Things made once and kept in the user's cache directory: whole or absent, never twice."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import platformdirs
from filelock import FileLock, Timeout

from omlx_cache.tools.progress import Progress, silent

CACHE_DIR_VARIABLE = "OMLX_CACHE_DIR"


class PreparationError(RuntimeError):
    """Something that a tool needs could not be made; the message says the remedy."""


def cache_dir() -> Path:
    """Return the directory that prepared things are kept in; it need not exist yet.

    ``OMLX_CACHE_DIR`` where it is set and not empty, else the platform's cache directory of the
    user.
    """
    chosen = os.environ.get(CACHE_DIR_VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    return platformdirs.user_cache_path("omlx_cache", appauthor=False)


def prepared(
    name: str,
    build: Callable[[Path], Path],
    progress: Progress = silent,
    needed_bytes: int = 0,
) -> Path:
    """Return ``cache_dir()/name``, building it first if it is not there.

    ``build`` works in a scratch directory on the same file system; only what it returns is kept,
    renamed in one step when it is complete. An interrupted build therefore leaves nothing under the
    final name, its scratch directory is removed at once or, after a kill, by the next build. Two
    processes that want the same thing build it once: the second waits for the first.

    Args:
        name: the directory's name below ``cache_dir()``.
        build: takes the scratch directory, returns the finished directory inside it.
        progress: told when this process has to wait for another one.
        needed_bytes: free space the build needs.

    Returns:
        The finished directory.

    Raises:
        PreparationError: the cache directory can't be written to, or has less than ``needed_bytes``
            free.

    Mutates: the cache directory.
    """
    final = cache_dir() / name
    if final.is_dir():
        return final
    root = final.parent
    _check_writable(root)
    lock = FileLock(root / f"{name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress(f"waiting for another process that is preparing {name}")
        lock.acquire()
    try:
        if final.is_dir():
            return final
        for abandoned in root.glob(f"{name}.tmp-*"):
            shutil.rmtree(abandoned, ignore_errors=True)
        _check_space(root, needed_bytes)
        scratch = root / f"{name}.tmp-{os.getpid()}"
        scratch.mkdir()
        try:
            os.replace(build(scratch), final)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    finally:
        lock.release()
    return final


def _check_writable(root: Path) -> None:
    remedy = f"set {CACHE_DIR_VARIABLE} to a directory that you can write to"
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PreparationError(
            f"cache directory {root} can't be made ({error}); {remedy}"
        ) from error
    if not os.access(root, os.W_OK | os.X_OK):
        raise PreparationError(f"cache directory {root} is not writable; {remedy}")


def _check_space(root: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(root).free
    if free < needed_bytes:
        raise PreparationError(
            f"cache directory {root} needs {needed_bytes / 2**20:.0f} MiB of free space, has "
            f"{free / 2**20:.0f} MiB; make room, or set {CACHE_DIR_VARIABLE} to a directory with "
            f"more"
        )
