"""Load a model and its tokenizer from a directory or hub id, GPTQ or not, quietly."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

NOISY_LOGGERS = ("torchao", "torch.utils._pytree")


class ModelLoadError(RuntimeError):
    """A model or tokenizer could not be loaded; the message says why and the remedy."""


def load_model(path: str | Path, dtype=None, device=None):
    """Load a causal language model for inference.

    Args:
        path: a local directory, or a model id of the Hugging Face hub.
        dtype: a ``torch.dtype`` or its name; None keeps what the checkpoint says.
        device: a ``torch.device`` or its name; None takes the GPU if there is one, else the CPU.

    Returns:
        The model in evaluation mode on ``device``.

    Raises:
        ValueError: there is no such device.
        ModelLoadError: there is no such model, it can't be loaded, or a GPTQ model lacks its
            libraries.

    Mutates: sets ``GPTQMODEL_CPU_WORKERS`` where it is not set, before gptqmodel can be imported.
    """
    path = _checked(path)
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", gptqmodel_cpu_workers())
    device = checked_device(device)
    with quiet(), _load_errors(path):
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(path)
        options = {"dtype": "auto" if dtype is None else dtype}
        if _is_gptq(config):
            _require_gptq(path)
            options["device_map"] = device
        model = AutoModelForCausalLM.from_pretrained(path, **options)
        return model.eval() if _is_gptq(config) else model.eval().to(device)


def load_tokenizer(path: str | Path):
    """Load the tokenizer of a local directory or hub id.

    Raises:
        ModelLoadError: there is none, or it can't be loaded.
    """
    path = _checked(path)
    with quiet(), _load_errors(path):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(path)


def checked_device(name=None) -> str:
    """Return the name of a device that can be used; for None the GPU if there is one, else the CPU.

    Args:
        name: a ``torch.device``, its name, or None.

    Raises:
        ValueError: there is no such device.

    Example:
        >>> checked_device("cpu")
        'cpu'
    """
    import torch

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"device must be one that PyTorch has here, got {str(name)!r} ({reason}); try 'cpu'"
        ) from error
    return str(name)


def gptqmodel_cpu_workers() -> str:
    """Return gptqmodel's number of CPU workers: the user's choice, else at least two.

    Its own default on a machine of one or two cores is one worker, which its thread pool then
    refuses.
    """
    return os.environ.get("GPTQMODEL_CPU_WORKERS") or str(
        max(2, min(12, ((os.cpu_count() or 1) + 1) // 2))
    )


@contextlib.contextmanager
def hushed() -> Iterator[None]:
    """Leave out the libraries' progress bars and warnings, but not their errors."""
    from transformers.utils import logging as transformers_logging

    had_bars = transformers_logging.is_progress_bar_enabled()
    verbosity = transformers_logging.get_verbosity()
    levels = {name: logging.getLogger(name).level for name in NOISY_LOGGERS}
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hold back also what libraries print (gptqmodel's banner and log), unless there is an error.

    An exception passes through, with the last of the held-back lines as its note.
    """
    held = io.StringIO()
    try:
        with hushed(), contextlib.redirect_stdout(held), contextlib.redirect_stderr(held):
            yield
    except BaseException as error:
        lines = [line.rstrip() for line in held.getvalue().splitlines() if line.strip()]
        if lines:
            error.add_note("printed before the error:\n" + "\n".join(lines[-10:]))
        raise


def _checked(path: str | Path) -> str:
    """Tell a mistyped directory from a hub id before the hub is asked for it."""
    text = str(path)
    looks_local = (
        isinstance(path, Path) or text.startswith((".", "~", os.sep)) or text.count("/") > 1
    )
    directory = Path(text).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise ModelLoadError(
                f"{directory} has no config.json; give a directory made by save_pretrained"
            )
        return str(directory)
    if looks_local or directory.exists():
        raise ModelLoadError(
            f"{directory} is not a directory; give a directory made by save_pretrained, or a hub id"
        )
    return text


@contextlib.contextmanager
def _load_errors(path: str) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise ModelLoadError(
            f"{path} can't be loaded: its weights are damaged (SafetensorError: {error}); download "
            f"it again"
        ) from error
    except (OSError, ValueError, ImportError) as error:
        raise ModelLoadError(f"{path} can't be loaded: {type(error).__name__}: {error}") from error


def _is_gptq(config) -> bool:
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return False
    method = (
        quantization.get("quant_method")
        if isinstance(quantization, dict)
        else quantization.quant_method
    )
    return str(getattr(method, "value", method)).lower() == "gptq"


def _require_gptq(path: str) -> None:
    missing = [name for name in ("gptqmodel", "optimum") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelLoadError(
            f"{path} is a GPTQ model and needs {' and '.join(missing)}, not installed; pip install "
            f"'omlx_cache[gptq]'"
        )
