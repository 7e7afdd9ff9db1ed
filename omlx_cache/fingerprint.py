"""Tell whether a model would still compute the keys and values that it has computed before."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import chain

import torch
from torch import nn


def fingerprint(decoder: nn.Module) -> Hashable:
    """Return what changes when a module's weights, adapters or precision do.

    It looks at no weight: a tensor is known by its identity and by PyTorch's count of the writes to
    it, an adapter by its name and scale. A write that PyTorch doesn't count (to ``weight.data``) is
    not seen.
    """
    tensors = chain(decoder.parameters(), decoder.buffers())
    weights = tuple((id(t), t.device, t.dtype, _writes(t)) for t in tensors)
    adapters = tuple(
        (
            tuple(module.active_adapters),
            bool(module.disable_adapters),
            tuple(module.merged_adapters),
            tuple(getattr(module, "scaling", {}).items()),
        )
        for module in decoder.modules()
        if hasattr(module, "merged_adapters") and hasattr(module, "active_adapters")
    )
    device = next((device for _, device, *_ in weights), torch.device("cpu")).type
    autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    return weights, adapters, autocast


def _writes(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
