"""Which setting to change next: candidates from what was measured, chosen by what they measure.

Nothing is recommended on a rule's word alone: each candidate reads the same text, and the one that
saves most within the bound on the KL divergence is recommended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml

import omlx_cache
from omlx_cache.tools.attention_mass import MassTable

ENOUGH_MASS = 0.95
SPARE_UTILIZATION = 0.6
_COLDER: tuple[dict[str, Any], ...] = (
    {"cache_bits": 16},
    {"cache_bits": 8},
    {"cache_bits": {"k": 8, "v": 4}},
    {"tiers": {"k8v4": 1024, "k4v4": None}},
    {"cache_bits": 4},
)


@dataclass(frozen=True)
class Candidate:
    """A change that may pay.

    Attributes:
        change: keys and values to set.
        why: what in the measurement suggests it.
        goes_on: whether it goes further where the candidate before it has gone: not worth a try
            where that one was too far already.
    """

    change: Mapping[str, Any]
    why: str
    goes_on: bool = False

    def apply(self, config: omlx_cache.CacheConfig) -> omlx_cache.CacheConfig:
        """Return the configuration with the change."""
        return omlx_cache.CacheConfig.resolve(config, **self.change)


@dataclass(frozen=True)
class Measured:
    """What a configuration measured.

    Attributes:
        num_bytes: that the blocks hold at the end of the text.
        kld, top1: against the unquantized cache.
    """

    num_bytes: int
    kld: float
    top1: float


def candidates(
    config: omlx_cache.CacheConfig,
    measured: Measured,
    mass: MassTable,
    utilization: float,
    max_kld: float,
) -> list[Candidate]:
    """Return changes to try: few, for each reads the text again.

    Args:
        config: as it is.
        measured: of ``config``.
        mass: attention over an unquantized cache that holds all tokens.
        utilization: share of the slots of the active blocks that hold a token.
        max_kld: KL divergence that is acceptable.
    """
    window = config.window_size if isinstance(config.window_size, int) else None
    short = window if window is not None and window < mass.length else None
    if measured.kld > max_kld:
        why = f"KL {measured.kld:.2g} is above the bound of {max_kld:g}"
        found = []
        if short and not config.sink_tokens:
            found.append(Candidate({"sink_tokens": 4}, why + ", and a window without sinks is why"))
        elif short:
            found.append(Candidate({"window_size": 2 * short}, why + "; the window is short"))
        return found + _precision(config, -1, why + "; more bits round less")
    found = _precision(config, 1, f"KL {measured.kld:.2g} leaves room below the bound")
    found += [replace(c, goes_on=True) for c in _precision(config, 2, "the same, one step further")]
    better = _window(config, mass, window)
    if better is not None:
        kept = mass.kept_by_newest(better).mean()
        why = f"its blocks and the sinks get {kept:.1%} of the attention"
        found.append(Candidate({"window_size": better}, why))
    if utilization < SPARE_UTILIZATION and config.block_size > 64:
        smaller = max(64, config.block_size // 128 * 64)
        why = f"the blocks are {utilization:.0%} full"
        found.append(Candidate({"block_size": smaller}, why))
    return found


def choose(
    config: Measured, tried: Sequence[tuple[Candidate, Measured]], max_kld: float
) -> int | None:
    """Return which candidate to recommend; None: keep the configuration.

    Within the bound the one with the fewest bytes wins, if they are fewer than now. Where the
    configuration itself is outside of it, any candidate within it beats it, or else the most
    precise one.
    """
    good = [i for i, (_, m) in enumerate(tried) if m.kld <= max_kld]
    if config.kld <= max_kld:
        good = [i for i in good if tried[i][1].num_bytes < config.num_bytes]
    elif not good:
        better = [i for i, (_, m) in enumerate(tried) if m.kld < config.kld]
        return min(better, key=lambda i: tried[i][1].kld, default=None)
    return min(good, key=lambda i: tried[i][1].num_bytes, default=None)


def yaml_of(config: omlx_cache.CacheConfig) -> str:
    """Return a YAML file's text with the keys that differ from the defaults.

    >>> print(yaml_of(omlx_cache.CacheConfig(window_size=1024)), end="")
    attention:
      window_size: 1024
    """
    defaults = omlx_cache.CacheConfig().to_dict()
    changed = {
        section: {k: v for k, v in keys.items() if v != defaults[section][k]}
        for section, keys in config.to_dict().items()
    }
    changed = {section: keys for section, keys in changed.items() if keys}
    if not changed:
        return "quantization:\n  cache_bits: 8  # the default, as every other key\n"
    return yaml.safe_dump(changed, sort_keys=False)


def spelled(change: Mapping[str, Any]) -> str:
    """Return a change as it stands in YAML.

    >>> spelled({"cache_bits": {"k": 8, "v": 4}, "window_size": None})
    'cache_bits: {k: 8, v: 4}, window_size: null'
    """
    return ", ".join(f"{key}: {_scalar(value)}" for key, value in change.items())


def _scalar(value: Any) -> str:
    dumped = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1000)
    return dumped.removesuffix("\n...\n").strip()


def _precision(config: omlx_cache.CacheConfig, step: int, why: str) -> list[Candidate]:
    """Return the way to store that is colder (step 1, 2) or warmer (-1), if there is one."""
    if config.tiers is not None:
        now: int | None = 3 if "k4v4" in config.tiers else 2
    else:
        now = next(
            (
                i
                for i, change in enumerate(_COLDER)
                if change.get("cache_bits") == config.cache_bits
            ),
            None,
        )
    following = None if now is None else now + step
    if following is None or not 0 <= following < len(_COLDER):
        return []
    return [Candidate(_COLDER[following], why)]


def _window(config: omlx_cache.CacheConfig, mass: MassTable, now: int | None) -> int | None:
    """Return the shortest window, a power of two of blocks, that keeps enough of the attention."""
    bound = mass.length if now is None else min(now, mass.length)
    window = config.block_size
    while window <= bound // 2:
        if mass.kept_by_newest(window).mean() >= ENOUGH_MASS:
            return window
        window *= 2
    return None
