"""What a call of a patched model asks for that only transformers' own attention can serve.

Who names another cache (``cache_implementation="static"``, a `DynamicCache` of the caller's), or
passes a custom mask, gets that: the call runs as on the unpatched model, and a warning says so,
once for each reason (`omlx_cache.config_switch`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from omlx_cache.cache import PagedCache
from omlx_cache.compat import Cache

_OWN = (None, "dynamic", "dynamic_full", "hybrid")
"""Values of ``cache_implementation`` that mean the default cache, which `patch` replaces.

transformers reads "hybrid", which checkpoints of Gemma 2 carry, as the default, too.
"""


def is_stock_cache(*objects: Any) -> bool:
    """Whether one of ``objects`` is a cache of transformers' own, or of a third party."""
    return any(isinstance(x, Cache) and not isinstance(x, PagedCache) for x in objects)


def asks_for_stock_cache(wanted: str | None, caches: Iterable[Any]) -> str | None:
    """Return what a call of ``generate`` asks for that isn't the paged cache; None: nothing.

    Args:
        wanted: its ``cache_implementation``.
        caches: what it was given as caches.
    """
    for cache in caches:
        if is_stock_cache(cache):
            return f"a {type(cache).__name__} as the cache"
    return None if wanted in _OWN else f"cache_implementation={wanted!r}"


def asks_for_stock_forward(cache: Any, kwargs: Mapping[str, Any]) -> str | None:
    """Return what a call of the decoder asks for that a paged cache can't serve; None: nothing.

    Args:
        cache: what it was given as its cache, or None.
        kwargs: its other arguments.
    """
    if cache is not None:
        return asks_for_stock_cache(None, [cache])
    mask = kwargs.get("attention_mask")
    if mask is not None and not (isinstance(mask, torch.Tensor) and mask.dim() == 2):
        return "a custom attention_mask"
    if mask is None and _is_packed(kwargs.get("position_ids")):
        return "a row of several texts (position_ids that start again)"
    return None


def _is_packed(positions: torch.Tensor | None) -> bool:
    """Whether position ids, [rows, columns], tell several texts in one row apart."""
    if positions is None or positions.dim() != 2 or positions.shape[1] < 2:
        return False
    return bool((positions.diff(dim=-1) <= 0).any())
