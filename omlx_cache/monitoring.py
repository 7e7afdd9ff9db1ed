"""What caches hold, as gauges for Prometheus; needs the package prometheus-client.

>>> from prometheus_client import REGISTRY, start_http_server              # doctest: +SKIP
>>> from omlx_cache.monitoring import CacheCollector                       # doctest: +SKIP
>>> REGISTRY.register(CacheCollector(chat=model))                          # doctest: +SKIP
>>> start_http_server(9000)                                                # doctest: +SKIP
"""

from __future__ import annotations

import importlib.util
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from omlx_cache.cache import PagedCache
from omlx_cache.cache_report import CacheReport
from omlx_cache.patch_state import state_of
from omlx_cache.patching import report

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily

_GAUGES: dict[str, tuple[str, Callable[[CacheReport], float | None]]] = {
    "peak_bytes": ("The most bytes that were ever allocated at once.", lambda r: r.peak_bytes),
    "unquantized_bytes": (
        "Bytes that the same tokens would take unpaged in the model's dtype.",
        lambda r: r.unquantized_bytes,
    ),
    "active_blocks": ("Blocks in use.", lambda r: r.active_blocks),
    "total_blocks": ("Blocks that there are, or may be.", lambda r: r.total_blocks),
    "block_utilization": (
        "Share of the active blocks' token slots that hold a token, 0 to 1.",
        lambda r: r.block_utilization,
    ),
    "cached_tokens": ("Tokens stored, over all sequences.", lambda r: r.cached_tokens),
    "seen_tokens": ("Tokens that the sequences have seen.", lambda r: r.seen_tokens),
    "reused_tokens": (
        "Tokens seen that an earlier call had left, and that were not computed again.",
        lambda r: r.reused_tokens,
    ),
    "blocks_from_disk": (
        "Blocks that the cache began with and that were read from the disk.",
        lambda r: r.blocks_from_disk,
    ),
    "blocks_read_ahead": (
        "Those of them that were read, or being read, when they were needed.",
        lambda r: r.blocks_read_ahead,
    ),
    "read_ahead_seconds": (
        "What those would have taken to read.",
        lambda r: r.read_ahead_seconds,
    ),
    "offloaded_blocks": ("Blocks in CPU memory.", lambda r: r.offloaded_blocks),
    "offloaded_bytes": ("Bytes that they take there.", lambda r: r.offloaded_bytes),
    "recall_hit_rate": (
        "Share of the recalled blocks that the step's own queries would have chosen, 0 to 1.",
        lambda r: r.recall_hit_rate,
    ),
    "copy_ahead_rate": (
        "Share of the copies of a layer's blocks to the device that began before it ran, 0 to 1.",
        lambda r: r.copy_ahead_rate,
    ),
    "sequences": ("Sequences in the cache.", lambda r: r.num_sequences),
}


class CacheCollector:
    """Gauges of some models' caches, taken when Prometheus asks: ``omlx_cache_bytes{model, tier}``
    and one each for the other fields of `CacheReport`, as ``omlx_cache_<field>{model}``.

    A model has samples from its first call on: they are those of the cache that it used last, see
    `omlx_cache.report`. Asking waits for the step that is running, and for no more. The collector
    keeps no model alive, and one that is gone, or not patched any more, has no samples.

    Args:
        **models: patched models (or `PagedCache`), by the name that their label ``model`` gets.

    Raises:
        ImportError: prometheus-client is not installed.
        ValueError: a model is not patched.
    """

    def __init__(self, **models: Any) -> None:
        if importlib.util.find_spec("prometheus_client") is None:
            raise ImportError(
                "omlx_cache.monitoring: the package prometheus-client must be installed, got none; "
                "pip install 'omlx_cache[prometheus]'"
            )
        for model in models.values():
            if not isinstance(model, PagedCache):
                state_of(model)
        self._models = {name: weakref.ref(model) for name, model in models.items()}

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Name the gauges, without samples."""
        return iter(self._families().values())

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Take a report of each model."""
        families = self._families()
        for name, reference in self._models.items():
            found = _report(reference())
            if found is None:
                continue
            for tier, size in found.bytes_by_tier.items():
                families["bytes"].add_metric([name, tier], size)
            for gauge, (_, value) in _GAUGES.items():
                number = value(found)
                if number is not None:  # nothing to say yet
                    families[gauge].add_metric([name], number)
        return iter(families.values())

    def _families(self) -> dict[str, GaugeMetricFamily]:
        from prometheus_client.core import GaugeMetricFamily

        size = "Bytes of codes, scales and zeros over all layers, free blocks included, by tier."
        found = {"bytes": GaugeMetricFamily("omlx_cache_bytes", size, labels=["model", "tier"])}
        for gauge, (words, _) in _GAUGES.items():
            found[gauge] = GaugeMetricFamily(f"omlx_cache_{gauge}", words, labels=["model"])
        return found


def _report(model: Any) -> CacheReport | None:
    """Return a report; None of a model that is gone, or has used no cache yet."""
    try:
        return None if model is None else report(model)
    except ValueError:
        return None
