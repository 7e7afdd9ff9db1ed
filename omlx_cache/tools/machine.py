"""On what a number was measured: machine and versions, as plain data for JSON."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

PACKAGES = ("omlx_cache", "torch", "transformers", "triton", "gptqmodel", "optimum")


def machine() -> dict:
    """Return the platform, PyTorch's threads and the GPU's name (None without one)."""
    return {
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def versions() -> dict[str, str | None]:
    """Return the version of each package that matters here; None where it isn't installed."""
    return {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
