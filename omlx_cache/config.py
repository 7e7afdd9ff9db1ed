"""Configuration: a YAML file, dict or keywords in, a checked and frozen `CacheConfig` out.

Each key belongs to one section, in YAML and in nested dicts:

    kv_cache:      block_size, max_gpu_blocks, cpu_offload, disk_cache, recent_tokens, prefill_chunk
                   later: prefix_cache, max_cpu_blocks, recall, max_disk_bytes
    quantization:  model_bits, cache_bits
                   later: tiers, target_saving, keep_layers
    attention:     window_size, sink_tokens, pruning
                   later: prune_ratio

Keywords are the leaf keys alone: `CacheConfig(window_size=1024)`. A file or dict may write leaf
keys without their section too. What is not understood is an error, and so is what has not landed
yet (`config_pending.NOT_LANDED`): nothing is ignored.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from omlx_cache.config_errors import ConfigError, Given, wrong_line
from omlx_cache.config_pending import (
    NOT_LANDED,
    is_landed,
    not_landed_error,
    not_landed_line,
    today,
)
from omlx_cache.config_source import SECTIONS, collect, from_file, from_keywords
from omlx_cache.config_types import Bits, Directory, KVBits, Positive, WeightBits, key


class CacheConfig(BaseModel):
    """Say how the cache stores and attends; frozen, hashable, and valid once it exists.

    Args:
        **leaf_keys: any of the fields, by keyword.

    Raises:
        ConfigError: (a ValueError) unknown keys, wrong values, contradictions; all in one message.
        NotImplementedError: keys or values that have not landed yet; all in one message.

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

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", protected_namespaces=())

    block_size: int = key(
        "kv_cache",
        256,
        "a multiple of 64 from 64 to 4096",
        "Tokens in one block: the unit of allocation, precision conversion and release. Small "
        "blocks leave less room unused at the end of a sequence, large blocks need less "
        "bookkeeping. Start from 256.",
        multiple_of=64,
        ge=64,
        le=4096,
    )
    max_gpu_blocks: Positive | None = key(
        "kv_cache",
        None,
        "an integer of at least 1, or null (no bound)",
        "The most blocks that the pool on the model's device may hold at once: over all sequences, "
        "counted once for each group of layers that share a block table, whatever a block's "
        "precision. The step that would need more raises OutOfBlocksError and leaves the cache as "
        "it was; nothing is dropped or moved yet. A long sequence needs at least "
        "window_size / block_size blocks, rounded up, and one for the sinks. null: the pool grows "
        "as needed.",
    )
    cpu_offload: bool = key(
        "kv_cache",
        False,
        "true or false",
        "Whether blocks move to CPU memory when the pool is full. Only false has landed.",
    )
    disk_cache: bool | Directory = key(
        "kv_cache",
        False,
        "true, false or the path of a directory",
        "Whether, or in which directory, blocks are kept on disk. Best left off where latency "
        "matters. Only false has landed.",
    )
    recent_tokens: int = key(
        "kv_cache",
        128,
        "an integer of at least 0",
        "How many of a sequence's newest tokens stay in the model's own dtype. A finished block is "
        "converted to cache_bits once all of it is older; with 0, as soon as it is finished.",
        ge=0,
    )
    prefill_chunk: Positive | None = key(
        "kv_cache",
        512,
        "an integer of at least 1, or null (the whole prompt at once)",
        "Prompt tokens processed at a time. A chunk sees the history as it is stored, and itself "
        "unquantized; smaller chunks lower the memory peak of a long prompt.",
    )
    model_bits: WeightBits | None = key(
        "quantization",
        None,
        "2, 3, 4, 8, 16 or 32, or null (not checked)",
        "Bits of the model's weights, only as a check: patching a model that has others raises "
        "ConfigError. null: not checked.",
    )
    cache_bits: Bits | KVBits = key(
        "quantization",
        8,
        "4, 8 or 16, or {k: …, v: …} of these",
        "Bits of the K and V numbers older than recent_tokens. 8: quantized, K per channel in "
        "groups of 64 tokens, V per token. 16: never quantized, all in the model's own dtype (also "
        "where that is float32). 4, and K and V chosen apart, have not landed yet.",
    )
    window_size: Literal["auto"] | Positive | None = key(
        "attention",
        "auto",
        "an integer of at least 1, auto, or null (no window)",
        "How many of the newest tokens a query sees, itself included, besides the sink tokens; "
        "more than sink_tokens. Blocks that no later query can see are freed. auto: the length the "
        "model was trained for, or a layer's own window where it has one. null: no window but a "
        "layer's own.",
    )
    sink_tokens: int = key(
        "attention",
        4,
        "an integer from 0 to 64",
        "How many of a sequence's first tokens every query goes on seeing, in the model's own "
        "dtype, once the window has left them behind. Without any, text falls apart there.",
        ge=0,
        le=64,
    )
    pruning: Literal["oldest", "topk", "random"] = key(
        "attention",
        "oldest",
        "oldest, topk or random",
        "Which block is worth least when max_gpu_blocks is reached. Only oldest has landed, and "
        "only as a name: no block is dropped yet, a full pool raises OutOfBlocksError.",
    )

    def __init__(self, **leaf_keys: Any):
        self._fill(*from_keywords(leaf_keys, _SECTION_OF))

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> CacheConfig:
        """Read a YAML file; messages name its lines.

        Raises:
            ConfigError, NotImplementedError: as the class; also no text, no YAML or no keys.
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
                file with a value that has not landed works once that value is overridden.

        Example:
            >>> CacheConfig.resolve({"attention": {"pruning": "topk"}}, pruning="oldest").pruning
            'oldest'
        """
        if config is None:
            given, problems = {}, []
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

    @classmethod
    def _build(cls, given: dict[str, Given], problems: list[str]) -> CacheConfig:
        config = cls.__new__(cls)
        config._fill(given, problems)
        return config

    def _fill(self, given: dict[str, Given], problems: list[str]) -> None:
        """Validate into self, or raise one error that holds every problem."""
        bad: list[str] = []
        try:
            super().__init__(**{k: g.value for k, g in given.items() if k in _FIELDS})
        except ValidationError as error:  # a union reports once for each of its branches
            bad = list(dict.fromkeys(str(e["loc"][0]) for e in error.errors(include_url=False)))
        wrong = [wrong_line(given[k], _FIELDS[k], today(k)) for k in bad]
        wrong += _contradictions(given, bad)
        early = {k: g for k, g in given.items() if k not in bad and not is_landed(k, g.value)}
        if problems or wrong:
            more = [not_landed_line(k, g) for k, g in early.items()]
            raise ConfigError(*problems, *wrong, *more)
        if early:
            raise not_landed_error(early)


_FIELDS = CacheConfig.model_fields
_SECTION_OF = {k: f.json_schema_extra["section"] for k, f in _FIELDS.items()}
_SECTION_OF |= {k: row.section for k, row in NOT_LANDED.items() if row.section}


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


def _contradictions(given: Mapping[str, Given], bad: Collection[str]) -> list[str]:
    """Return a line for each pair of legal values that exclude each other."""
    if "window_size" in bad or "sink_tokens" in bad:
        return []
    window, sinks = (
        given.get(k, Given(_FIELDS[k].default, k)) for k in ("window_size", "sink_tokens")
    )
    if not isinstance(window.value, int) or window.value > sinks.value:
        return []
    of_sinks = sinks.place if "sink_tokens" in given else " (the default)"
    line = (
        f"attention.window_size must be more than attention.sink_tokens, got {window.value}"
        f"{window.place} and {sinks.value}{of_sinks}; set window_size to at least "
        f"{sinks.value + 1}, or sink_tokens to at most {window.value - 1}"
    )
    return [line]
