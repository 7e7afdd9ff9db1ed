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
