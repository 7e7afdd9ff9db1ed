"""The text that a tool is given: a file, standard input, or text that ships with Python."""

from __future__ import annotations

import sys
from pathlib import Path

from omlx_cache.tools.errors import WrongSettingError
from omlx_cache.tools.texts import part_text

MAX_BYTES = 64 << 20


def read_text(path: Path | None) -> tuple[str, str]:
    """Return a text and what to call it.

    Args:
        path: a file of UTF-8 text; ``-`` is standard input; None is Python's language reference.

    Raises:
        WrongSettingError: the file can't be read, is no text, holds none, or is far too long.
    """
    if path is None:
        return part_text("quality"), "Python's language reference"
    name = "standard input" if str(path) == "-" else str(path)
    try:
        if str(path) == "-":
            data = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            with path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
    except IsADirectoryError:
        raise WrongSettingError(f"{name} is a directory; give a file of plain text") from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise WrongSettingError(f"{name} can't be read ({reason}); give a text file") from error
    if len(data) > MAX_BYTES:
        raise WrongSettingError(
            f"{name} must be at most {MAX_BYTES >> 20} MiB, got more; give a part of it"
        )
    if b"\0" in data:
        raise WrongSettingError(f"{name} is not text (it holds zero bytes); give a text file")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise WrongSettingError(
            f"{name} must be UTF-8 text, got the byte 0x{data[error.start]:02x} at offset "
            f"{error.start}; convert it, e.g. iconv -f latin1 -t utf-8"
        ) from error
    if not text.strip():
        raise WrongSettingError(f"{name} is empty; give a file with at least a page of text")
    return text, name


def tokenize(text: str, name: str, tokenizer, wanted: int | None, least: int) -> list[int]:
    """Return the first ``wanted`` tokens of a text (None: all), without special tokens.

    Raises:
        WrongSettingError: the text has fewer than ``least`` tokens.
    """
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < least:
        raise WrongSettingError(
            f"{name} must have at least {least} tokens, got {len(ids)}; give a longer text"
        )
    return ids if wanted is None else ids[:wanted]
