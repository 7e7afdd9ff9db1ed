"""Configuration: a YAML file, dict or keywords in, a checked and frozen `CacheConfig` out.

Each key belongs to one section, in YAML and in nested dicts; `config_fields` declares them.
Keywords are the leaf keys alone: `CacheConfig(window_size=1024)`. A file or dict may write leaf
keys without their section too. What is not understood is an error: nothing is ignored.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

import yaml
from pydantic import ValidationError

from omlx_cache.config_errors import ConfigError, Given, wrong_line
from omlx_cache.config_fields import ConfigFields
from omlx_cache.config_source import SECTIONS, collect, from_file, from_keywords
from omlx_cache.config_types import section_of


class CacheConfig(ConfigFields):
    """Say how the cache stores and attends; frozen, hashable, and valid once it exists.

    Args:
        **leaf_keys: any of the fields, by keyword.

    Raises:
        ConfigError: (a ValueError) unknown keys, wrong values, contradictions; all in one message.

    Example:
        >>> config = CacheConfig(window_size=1024, cache_bits=16)
        >>> config.block_size, config.window_size, config.recent_tokens
        (256, 1024, 128)
        >>> CacheConfig.from_dict({"attention": {"window_size": 1024}, "cache_bits": 16}) == config
        True
        >>> CacheConfig(blocksize=512)  # doctest: +IGNORE_EXCEPTION_DETAIL
        Traceback (most recent call last):
        ConfigError: CacheConfig: unknown key blocksize; did you mean kv_cache.block_size?
    """

    def __init__(self, **leaf_keys: Any):
        self._fill(*from_keywords(leaf_keys, _SECTION_OF))

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> CacheConfig:
        """Read a YAML file; messages name its lines.

        Raises:
            ConfigError: as the class; also no text, no YAML or no keys.
            OSError: the file can't be read (FileNotFoundError names the nearest file).
        """
        return cls._build(*from_file(path, _SECTION_OF))

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> CacheConfig:
        """Read sections, leaf keys, or a mixture; a key given twice must have one value."""
        if not isinstance(d, Mapping):
            raise ConfigError(f"from_dict needs a dict, got {type(d).__name__}")
        return cls._build(*collect(d, _SECTION_OF))

    @classmethod
    def resolve(
        cls,
        config: CacheConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
        **overrides: Any,
    ) -> CacheConfig:
        """Make one configuration of the arguments of `patch(model, config, **overrides)`.

        Args:
            config: None (the defaults), a CacheConfig, a dict (see `from_dict`) or a YAML file.
            **overrides: leaf keys, which replace those of `config` *before* they are checked: so a
                file with a wrong value works once that value is overridden.

        Example:
            >>> CacheConfig.resolve({"attention": {"pruning": "topk"}}, pruning=None).pruning
        """
        if config is None:
            given: dict[str, Given] = {}
            problems: list[str] = []
        elif isinstance(config, CacheConfig):
            known = {k: getattr(config, k) for k in config.model_fields_set}
            given, problems = from_keywords(known, _SECTION_OF)
        elif isinstance(config, Mapping):
            given, problems = collect(config, _SECTION_OF)
        elif isinstance(config, (str, os.PathLike)):
            given, problems = from_file(config, _SECTION_OF)
        else:
            raise ConfigError(
                "config must be a CacheConfig, a dict or the path of a YAML file, "
                f"got {type(config).__name__}"
            )
        over, more = from_keywords(overrides, _SECTION_OF)
        if any(over[k].value is not None for k in _PRECISION if k in over):
            for other in _PRECISION:  # ways to say one thing: the override says it now
                if other not in over:
                    given.pop(other, None)
        return cls._build({**given, **over}, problems + more)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return every key in its section, as in the YAML file; `model_dump()` is the flat form."""
        values = self.model_dump()
        return {s: {k: v for k, v in values.items() if _SECTION_OF[k] == s} for s in SECTIONS}

    def to_yaml(self) -> str:
        """Return the text of a YAML file that `from_yaml` reads back as an equal configuration."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)

    def model_copy(
        self, *, update: Mapping[str, Any] | None = None, deep: bool = False
    ) -> CacheConfig:
        """Return a copy with changes, checked (pydantic's own does not check)."""
        return type(self).resolve(self, **(update or {}))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"CacheConfig is frozen; for another {name} make a new one with "
            f"CacheConfig.resolve(config, {name}=…)"
        )

    def __delattr__(self, name: str) -> None:
        setattr(self, name, None)  # raises

    def __hash__(self) -> int:
        return hash(self.to_yaml())

    @classmethod
    def _build(cls, given: dict[str, Given], problems: list[str]) -> CacheConfig:
        config = cls.__new__(cls)
        config._fill(given, problems)
        return config

    def _fill(self, given: dict[str, Given], problems: list[str]) -> None:
        """Validate into self, or raise one error that holds every problem."""
        is_implied = "disk_cache" in given and given["disk_cache"].value is not False
        is_implied = is_implied and "prefix_cache" not in given
        if is_implied:
            given = {**given, "prefix_cache": Given(True, "kv_cache.prefix_cache")}
        bad: list[str] = []
        try:
            super().__init__(**{k: g.value for k, g in given.items() if k in _FIELDS})
        except ValidationError as error:  # a union reports once for each of its branches
            bad = list(dict.fromkeys(str(e["loc"][0]) for e in error.errors(include_url=False)))
        wrong = [wrong_line(given[k], _FIELDS[k]) for k in bad]
        wrong += _contradictions(given, bad)
        if problems or wrong:
            raise ConfigError(*problems, *wrong)
        if is_implied:
            self.model_fields_set.discard("prefix_cache")  # it leaves with what implies it


_FIELDS = CacheConfig.model_fields
_PRECISION = ("cache_bits", "tiers", "target_saving")
_SECTION_OF = {k: section_of(f) for k, f in _FIELDS.items()}


def check_model_bits(config: CacheConfig, actual_bits: int | None) -> None:
    """Compare `model_bits` with the model's weights.

    Args:
        config: with model_bits None, every model passes.
        actual_bits: of the quantized weights, or of the dtype where they aren't quantized; None
            for an unquantized model whose dtype is not known, which 16 and 32 both fit.

    Raises:
        ConfigError: they differ.
    """
    wanted = config.model_bits
    if wanted in (None, actual_bits) or (actual_bits is None and wanted in (16, 32)):
        return
    if actual_bits is None:
        found, use = "is not quantized", "16 (32 for float32)"
    else:
        found, use = f"has {actual_bits}-bit weights", str(actual_bits)
    raise ConfigError(
        f"quantization.model_bits is {wanted}, but the model {found}; "
        f"set model_bits to {use}, or delete the key"
    )


def _said(given: Mapping[str, Given], key: str) -> bool:
    """Whether a key has another value than its default."""
    return key in given and given[key].value != _FIELDS[key].default


def _needless(given: Mapping[str, Given], key: str, other: str, use: Any) -> list[str]:
    """Return a line when a key is given that means nothing without another one."""
    if not _said(given, key) or _said(given, other):
        return []
    return [
        f"{given[key].path}{given[key].place} means nothing without {other}; set {other} to "
        f"{use!r}, or delete {key}"
    ]


def _contradictions(given: Mapping[str, Given], bad: Collection[str]) -> list[str]:
    """Return a line for each pair of legal values that exclude each other."""
    lines = []
    # to_yaml writes the defaults beside the one that is meant
    said = [given[k] for k in _PRECISION if k in given and given[k].value != _FIELDS[k].default]
    if len(said) > 1:
        which = " and ".join(f"{g.path}{g.place}" for g in said)
        lines.append(
            f"{which} exclude each other: each says how older tokens are stored; delete all but one"
        )
    disk, prefix = given.get("disk_cache"), given.get("prefix_cache")
    are_legal = not {"disk_cache", "prefix_cache"} & set(bad)
    if are_legal and disk and prefix and disk.value is not False and not prefix.value:
        lines.append(
            f"{disk.path}{disk.place} keeps on disk what prefix_cache keeps, and needs it; "
            f"delete {prefix.path}: {prefix.shown()}{prefix.place}, or make it true"
        )
    right = {key: value for key, value in given.items() if key not in bad}
    lines += _needless(right, "prune_ratio", "pruning", "topk")
    lines += _needless(right, "max_cpu_blocks", "cpu_offload", True)
    window, sinks = (
        given.get(k, Given(_FIELDS[k].default, k)) for k in ("window_size", "sink_tokens")
    )
    if {"window_size", "sink_tokens"} & set(bad) or not isinstance(window.value, int):
        return lines
    if window.value <= sinks.value:
        of_sinks = sinks.place if "sink_tokens" in given else " (the default)"
        lines.append(
            f"attention.window_size must be more than attention.sink_tokens, got {window.value}"
            f"{window.place} and {sinks.value}{of_sinks}; set window_size to at least "
            f"{sinks.value + 1}, or sink_tokens to at most {window.value - 1}"
        )
    return lines
