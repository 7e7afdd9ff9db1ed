"""A paged, quantized KV cache for Hugging Face models, in one call.

>>> import omlx_cache                                       # doctest: +SKIP
>>> omlx_cache.patch(model)                                 # doctest: +SKIP
>>> model.generate(**inputs, max_new_tokens=512)            # doctest: +SKIP
"""

from omlx_cache.cache import PagedCache
from omlx_cache.config import CacheConfig
from omlx_cache.patching import patch, patched, report, unpatch
from omlx_cache.report import CacheReport
from omlx_kernels.errors import OutOfBlocksError

__all__ = [
    "CacheConfig",
    "CacheReport",
    "OutOfBlocksError",
    "PagedCache",
    "patch",
    "patched",
    "report",
    "unpatch",
]
