"""The instruction sets of the native kernels that this machine runs, and how a test picks one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from omlx_kernels.native import library


def _runs(name: str) -> bool:
    try:
        library.choose_isa(name)
    except ValueError:
        return False
    return True


ISAS = [name for name in ("portable", "avx2", "avx512") if library.available() and _runs(name)]
if ISAS:
    library.choose_isa()


@contextmanager
def forced_isa(name: str) -> Iterator[None]:
    """Run the body on one instruction set, then go back to the best one."""
    library.choose_isa(name)
    try:
        assert library.isa() == name
        yield
    finally:
        library.choose_isa()
