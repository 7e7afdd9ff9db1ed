"""Find, load and configure the compiled library; say once what is missing without it."""

from __future__ import annotations

import ctypes
import os
import warnings
from functools import lru_cache
from pathlib import Path

import torch

ISA_VARIABLE = "OMLX_NATIVE_ISA"
"""Environment variable that forces an instruction set: avx512, avx2 or portable."""

_FUNCTIONS = (
    *("omlx_append_kv", "omlx_convert_blocks", "omlx_copy_blocks"),
    *("omlx_paged_attention", "omlx_gather", "omlx_merge"),
)


class NotBuiltError(RuntimeError):
    """No library that fits these sources was found."""


@lru_cache(maxsize=1)
def load() -> ctypes.CDLL:
    """Load the library, once.

    Raises:
        NotBuiltError: when there is none, or only one built from other sources.
        ValueError: when ``OMLX_NATIVE_ISA`` names something else than an instruction set that the
            library has and this processor runs.
    """
    # Not above: `python -m omlx_kernels.native.build` would find itself imported already.
    from omlx_kernels.native import build

    wanted = build.source_hash()
    reasons = []
    for path in build.candidates():
        if not path.exists():
            continue
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            reasons.append(f"{path}: {error}")
            continue
        library.omlx_source_hash.restype = ctypes.c_char_p
        if library.omlx_source_hash().decode() == wanted:
            return _configure(library)
        reasons.append(f"{path} was built from other sources")
    raise NotBuiltError("; ".join(reasons) or "the library was not built")


def _configure(library: ctypes.CDLL) -> ctypes.CDLL:
    for name in _FUNCTIONS:
        getattr(library, name).argtypes = [ctypes.c_char_p]
    library.omlx_error.restype = library.omlx_isa.restype = ctypes.c_char_p
    library.omlx_choose_isa.argtypes = [ctypes.c_char_p]
    library.omlx_share_openmp.argtypes = [ctypes.c_void_p]
    library.omlx_share_openmp(torch_openmp())
    _choose(library, os.environ.get(ISA_VARIABLE, ""))
    return library


def torch_openmp() -> int | None:
    """Return the address of ``GOMP_parallel`` in the OpenMP that torch runs on, if it has one.

    Between two parallel regions torch's threads spin for a while. Threads of our own would fight
    them for the cores, for milliseconds; torch's own team starts at once.
    """
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        function = ctypes.CDLL(str(path)).GOMP_parallel  # found among what libtorch_cpu links to
    except (OSError, AttributeError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value


def _choose(library: ctypes.CDLL, name: str) -> None:
    if library.omlx_choose_isa(name.encode()):
        raise ValueError(library.omlx_error().decode())


@lru_cache(maxsize=1)
def available() -> bool:
    """Return whether the library loads; the first failure says what is slower and what to do."""
    try:
        load()
    except NotBuiltError as error:
        warnings.warn(
            f"omlx_kernels: the native CPU kernels are not available ({error}). Attention on the "
            f"CPU falls back to plain torch, several times slower at long contexts. To build them "
            f"(seconds; needs g++ or clang++): python -m omlx_kernels.native.build",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


def isa() -> str:
    """Return the instruction set in use: ``"avx512"``, ``"avx2"`` or ``"portable"``."""
    return load().omlx_isa().decode()


def choose_isa(name: str = "") -> None:
    """Switch the process to an instruction set; the default is the best one.

    Raises:
        ValueError: when the library lacks it or this processor can't run it.
    """
    _choose(load(), name)


def call(function: str, arguments: bytes) -> None:
    """Call a function of the C ABI with its packed arguments.

    Raises:
        ValueError: when it refuses them; nothing was written.
    """
    library = load()
    if getattr(library, function)(arguments):
        raise ValueError(library.omlx_error().decode())
