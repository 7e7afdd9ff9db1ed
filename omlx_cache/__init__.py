"""A paged, quantized KV cache for Hugging Face models, in one call.

    >>> import omlx_cache
    >>> model = omlx_cache.patch(model)                         # doctest: +SKIP
    >>> model.generate(**inputs, max_new_tokens=512)            # doctest: +SKIP

Names are loaded on first use, so that importing the package does not import transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omlx_cache.cache import PagedCache
    from omlx_cache.cache_report import CacheReport
    from omlx_cache.calibration import Calibration, calibrate
    from omlx_cache.chat_session import ChatSession
    from omlx_cache.config import CacheConfig
    from omlx_cache.config_errors import ConfigError
    from omlx_cache.patching import flush, patch, patched, report, unpatch
    from omlx_cache.prefetching import prefetch
    from omlx_kernels.errors import OutOfBlocksError

__all__ = [
    "CacheConfig",
    "CacheReport",
    "Calibration",
    "ChatSession",
    "ConfigError",
    "OutOfBlocksError",
    "PagedCache",
    "calibrate",
    "flush",
    "patch",
    "patched",
    "prefetch",
    "report",
    "unpatch",
]

_MODULES = {
    "CacheConfig": "omlx_cache.config",
    "CacheReport": "omlx_cache.cache_report",
    "Calibration": "omlx_cache.calibration",
    "ChatSession": "omlx_cache.chat_session",
    "ConfigError": "omlx_cache.config_errors",
    "OutOfBlocksError": "omlx_kernels.errors",
    "PagedCache": "omlx_cache.cache",
    "calibrate": "omlx_cache.calibration",
    "flush": "omlx_cache.patching",
    "patch": "omlx_cache.patching",
    "patched": "omlx_cache.patching",
    "prefetch": "omlx_cache.prefetching",
    "report": "omlx_cache.patching",
    "unpatch": "omlx_cache.patching",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__
