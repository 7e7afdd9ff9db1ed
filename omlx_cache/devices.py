"""Where a model computes."""

from __future__ import annotations

import torch
from torch import nn


def device_of(module: nn.Module) -> torch.device:
    """Return the device on which an attention module computes its keys."""
    hook = getattr(module, "_hf_hook", None)  # of accelerate; the weights may be elsewhere
    device = getattr(hook, "execution_device", None)
    if device is not None:
        return torch.device(device)
    return next(iter([*module.parameters(), *module.buffers()])).device
