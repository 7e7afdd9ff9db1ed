"""Where the Triton kernels run in this process: the interpreter on the CPU, or a CUDA device."""

from __future__ import annotations

import dataclasses

import pytest
import torch

triton = pytest.importorskip("triton", reason="no triton for this platform")

INTERPRETED = bool(triton.knobs.runtime.interpret)
DEVICE = "cpu" if INTERPRETED else "cuda"

needs_device = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(),
    reason="needs TRITON_INTERPRET=1 before triton is first imported, or a CUDA device",
)


def to_device(value):
    """Copy a tensor, or every tensor of a (nested) dataclass, to the kernels' device."""
    if isinstance(value, torch.Tensor):
        return value.to(DEVICE)
    if dataclasses.is_dataclass(value):
        moved = {f.name: to_device(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **moved)
    return value


class Spy:
    """Stands for a kernel and notes its launches and their grids."""

    def __init__(self, kernel, name: str, ran: list[str], grids: list | None = None) -> None:
        self.kernel, self.name, self.ran = kernel, name, ran
        self.grids = [] if grids is None else grids

    def __getitem__(self, grid):
        self.ran.append(self.name)
        self.grids.append(grid)
        return self.kernel[grid]
