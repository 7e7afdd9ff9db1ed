"""How the commands fail: one line that says what is wrong and the remedy, and an exit code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import typer
from rich.console import Console

import omlx_cache
from omlx_cache.tools.loading import ModelLoadError
from omlx_cache.tools.prepared import PreparationError


class WrongSettingError(ValueError):
    """A setting, the configuration or the input is wrong; the message says which and the remedy."""


class NotServedError(RuntimeError):
    """The model can't be patched; the message says why."""


EXIT_CODES: dict[type[BaseException], int] = {
    omlx_cache.OutOfBlocksError: 1,
    torch.OutOfMemoryError: 1,
    MemoryError: 1,
    WrongSettingError: 2,
    ModelLoadError: 3,
    NotServedError: 3,
    PreparationError: 4,
}
EXIT_INTERRUPTED = 130

EXIT_WORDS = (
    "Exit codes: 0 done, 1 out of memory or blocks, 2 wrong options, configuration or input, 3 the "
    "model can't be loaded or served, 4 the default model can't be prepared, 130 interrupted."
)


@contextmanager
def exit_codes(errors: Console) -> Iterator[None]:
    """Turn the errors that are not ours into a line on ``errors`` and the exit code of their kind.

    Raises:
        typer.Exit: with the code. What `EXIT_CODES` doesn't name passes through: a fault of ours.
    """
    try:
        yield
    except KeyboardInterrupt:
        errors.print("interrupted")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except tuple(EXIT_CODES) as error:
        text = str(error) or type(error).__name__
        for line in (f"error: {text}", *getattr(error, "__notes__", ())):
            errors.print(line, markup=False, highlight=False, soft_wrap=True)
        code = next(code for kind, code in EXIT_CODES.items() if isinstance(error, kind))
        raise typer.Exit(code) from None


@contextmanager
def setting_errors() -> Iterator[None]:
    """Tell the user's errors from faults of ours: only inside of this are they the user's."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise WrongSettingError(str(error)) from error
    except NotImplementedError as error:
        raise NotServedError(str(error)) from error


@contextmanager
def config_errors() -> Iterator[None]:
    """As `setting_errors`, where no model is asked yet: a key that has not landed is a setting."""
    try:
        yield
    except (ValueError, OSError, NotImplementedError) as error:
        raise WrongSettingError(str(error)) from error
