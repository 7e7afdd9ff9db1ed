"""Tell whether a model would still compute the keys and values that it has computed before."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import nn


class _Identity:
    """Equal to itself while its tensor lives: an id alone could be that of a later tensor."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = weakref.ref(tensor)

    def __eq__(self, other: object) -> bool:
        tensor = self._tensor()
        return tensor is not None and isinstance(other, _Identity) and tensor is other._tensor()


def fingerprint(decoder: nn.Module) -> tuple:
    """Return what changes when a module's weights, adapters or precision do.

    It looks at no weight: a tensor is known by its identity and by PyTorch's count of the writes to
    it, an adapter by its name and scale. A write that PyTorch doesn't count (to ``weight.data``,
    or to a tensor made in inference mode) is not seen.
    """
    tensors = chain(decoder.parameters(), decoder.buffers())
    weights = tuple((_Identity(t), t.device, t.dtype, _writes(t)) for t in tensors)
    modules: Iterable[Any] = decoder.modules()  # adapters have attributes of their own
    adapters = tuple(
        (
            tuple(module.active_adapters),
            bool(module.disable_adapters),
            tuple(module.merged_adapters),
            tuple(getattr(module, "scaling", {}).items()),
        )
        for module in modules
        if hasattr(module, "merged_adapters") and hasattr(module, "active_adapters")
    )
    return weights, adapters, autocast_dtype(decoder)


def autocast_dtype(decoder: nn.Module) -> torch.dtype | None:
    """Return the dtype that autocast makes a module compute in here and now; None without it."""
    tensor = next(chain(decoder.parameters(), decoder.buffers()), None)
    device = "cpu" if tensor is None else tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _writes(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
