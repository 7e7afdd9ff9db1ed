"""Write a tool's files: whole or not at all, and with the reason where that can't be."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from omlx_cache.tools.errors import WrongSettingError


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` write to a file beside ``path`` (same suffix), and rename it when complete.

    Raises:
        WrongSettingError: the file can't be written, or the disk is full.
    """
    scratch = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        write(scratch)
        os.replace(scratch, path)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise WrongSettingError(
            f"{path} can't be written ({reason}); make room, or name a file in another directory"
        ) from error
    finally:
        scratch.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text; see `write_whole`."""
    write_whole(path, lambda scratch: scratch.write_text(text, encoding="utf-8"))
