"""Compile the native kernels into one shared library with g++ or clang++; no torch needed.

The library holds the portable kernels, and for x86-64 also those for AVX2 and AVX-512 VNNI; a
cross-compiler in ``CXX`` builds for its own target.

``python -m omlx_kernels.native.build`` builds next to the package, or into the user's cache
directory where the package is read-only; arguments are added to the compiler's. ``setup.py`` uses
`setup_arguments`, loaded by path so that an isolated build needs no torch::

    native = runpy.run_path("omlx_kernels/native/build.py")
    setup(..., **native["setup_arguments"]())
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
LIBRARY = "libomlx_native.so"
PATH_VARIABLE = "OMLX_NATIVE_LIBRARY"
"""Environment variable that names the library to build and to load, e.g. one with sanitizers."""

# No fast-math and no contraction: infinities are meant, and codes must equal the quantizers'.
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wall"]
SHARED = [
    *("append_kv.cpp", "convert_blocks.cpp", "copy_blocks.cpp", "extend.cpp"),
    *("paged_attention.cpp", "isa.cpp", "pool.cpp"),
]
X86_ISAS = {
    "avx2": ["-DOMLX_AVX2", "-mavx2", "-mfma", "-mf16c"],
    "avx512": [
        "-DOMLX_AVX512",
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"),
        *("-mavx2", "-mfma", "-mf16c"),
    ],
}


class BuildError(RuntimeError):
    """There is no compiler, or it failed; the message says what it said."""


def source_hash() -> str:
    """Return a digest of the sources; a library built from other sources is never loaded."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def cache_directory() -> Path:
    """Return where a library goes when the package's own directory is read-only."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "omlx_cache" / "native" / source_hash()


def candidates() -> list[Path]:
    """Return the files that may be the library, the preferred one first."""
    if forced := os.environ.get(PATH_VARIABLE):
        return [Path(forced)]
    here = Path(__file__).parent
    return [here / LIBRARY, *sorted(here.glob("_native*.so")), cache_directory() / LIBRARY]


def find_compiler() -> str:
    """Return the C++ compiler: ``$CXX``, g++ or clang++.

    Raises:
        BuildError: when there is none.
    """
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and shutil.which(name.split()[0]):
            return name
    raise BuildError("no C++ compiler: install g++ or clang++, or set CXX")


def compile_library(target: Path, extra_flags: list[str] | None = None) -> Path:
    """Compile the sources into ``target``, replacing it in one step.

    Args:
        target: the shared library to write; its directory is made.
        extra_flags: appended to the flags of every step, e.g. ``["-fsanitize=address"]``.

    Raises:
        BuildError: when there is no compiler or it fails.
    """
    name = find_compiler().split()
    compiler = [*name, *FLAGS, f'-DOMLX_SOURCE_HASH="{source_hash()}"']
    extra = extra_flags or []
    isas: dict[str, list[str]] = {"portable": []}
    # What the compiler makes code for, not what it runs on: it may be a cross-compiler.
    if _run([*name, "-dumpmachine"]).startswith(("x86_64", "amd64")):
        isas |= X86_ISAS
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:
        steps: list[tuple[str, Path, list[str]]] = [(name, SOURCES / name, []) for name in SHARED]
        steps += [(isa, SOURCES / "kernels.cpp", flags) for isa, flags in isas.items()]

        def compile_one(step: tuple[str, Path, list[str]]) -> str:
            name, source, flags = step
            output = f"{directory}/{name}.o"
            _run([*compiler, *flags, *extra, "-c", str(source), "-o", output])
            return output

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_one, steps))
        linked = f"{directory}/{LIBRARY}"
        _run([*compiler, *extra, "-shared", "-pthread", *objects, "-o", linked])
        os.replace(linked, target)
    return target


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if done.returncode:
        raise BuildError(f"{' '.join(command)} failed:\n{done.stderr.strip()}")
    return done.stdout


def setup_arguments() -> dict:
    """Return the ``ext_modules`` and ``cmdclass`` of ``setup()``: an optional extension."""
    from setuptools import Extension
    from setuptools.command.build_ext import build_ext
    from setuptools.errors import CompileError

    class BuildNative(build_ext):
        def build_extension(self, ext: Extension) -> None:
            try:
                compile_library(Path(self.get_ext_fullpath(ext.name)).absolute())
            except BuildError as error:
                # Optional: setuptools reports it and goes on without the library.
                raise CompileError(f"native CPU kernels: {error}") from error

    extension = Extension("omlx_kernels.native._native", sources=[], optional=True)
    return {"ext_modules": [extension], "cmdclass": {"build_ext": BuildNative}}


def main() -> int:
    """Build for this machine and say where the library went."""
    here = Path(__file__).parent
    directory = here if os.access(here, os.W_OK) else cache_directory()
    target = Path(os.environ.get(PATH_VARIABLE) or directory / LIBRARY)
    try:
        print(f"built {compile_library(target, sys.argv[1:])}")
    except BuildError as error:
        print(f"omlx_kernels.native.build: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
