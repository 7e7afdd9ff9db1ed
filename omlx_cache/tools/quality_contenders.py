"""What is compared: configurations of omlx_cache, and what transformers itself has to offer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from transformers import DynamicCache, QuantizedCache
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer

import omlx_cache
from omlx_cache.compat import cache_name
from omlx_cache.tools.errors import WrongSettingError
from omlx_cache.tools.memory import bytes_at_16_bits

CHUNK = 512

DEFAULT_SETTINGS = {
    "16 bits": "cache_bits=16",
    "8 bits (default)": "cache_bits=8",
    "K 8, V 4 bits": "cache_bits={k: 8, v: 4}",
    "6200 tokens K 8, V 4; then 4 bits": "tiers={k8v4: 6200, k4v4: null}",
    "1024 tokens K 8, V 4; then 4 bits": "tiers={k8v4: 1024, k4v4: null}",
    "4 bits": "cache_bits=4",
    "8 bits, window 1024": "window_size=1024",
    "8 bits, window 1024, no sinks": "window_size=1024 sink_tokens=0",
}


@dataclass
class Session:
    """A cache that is being filled.

    Attributes:
        feed: runs the model on [1, columns] ids; returns the logits [kept, vocabulary] of the
            columns whose numbers it is given.
        num_bytes: what the cache holds now, as it would in a 16-bit model.
        chunk: columns to feed at a time; None is all.
    """

    feed: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    num_bytes: Callable[[], int]
    chunk: int | None = CHUNK


@dataclass(frozen=True)
class Contender:
    """One row of the result.

    Attributes:
        name: of the row.
        setting: what identifies it, as plain data: the whole configuration, or the peer's.
        is_peer: whether it is transformers' own.
        open: a context manager around a model that gives a `Session`.
    """

    name: str
    setting: dict
    is_peer: bool
    open: Callable


def reference() -> Contender:
    """Return the stock model with the cache that it comes with."""
    return _stock("unquantized", {"peer": "DynamicCache"}, lambda c: DynamicCache(config=c), None)


def peers(window: int) -> list[Contender]:
    """Return transformers' own ways to save memory: fp8, and a sliding window (without sinks)."""

    def sliding(config) -> Cache:
        layers = config.get_text_config(decoder=True).num_hidden_layers
        return Cache(layers=[DynamicSlidingWindowLayer(window) for _ in range(layers)])

    def fp8(config) -> Cache:
        return QuantizedCache("fp8", config=config)

    return [
        _stock("transformers, fp8", {"peer": "QuantizedCache fp8"}, fp8, None),
        _stock(f"transformers, window {window}", {"peer": f"window {window}"}, sliding, window),
    ]


def from_setting(text: str, name: str | None = None) -> Contender:
    """Return the contender of a YAML file, or of ``key=value key=value``.

    Raises:
        WrongSettingError: the file or a value is wrong; ConfigError's own words.
    """
    is_inline = _is_inline(text)
    if not is_inline and not (text and Path(text).exists()):
        raise WrongSettingError(
            f"a setting must be a YAML file or key=value, got {text!r}, which is no file; write "
            f"configs/chat.yaml or cache_bits=4"
        )
    try:
        if is_inline:
            config = omlx_cache.CacheConfig(**_inline(text))
        else:
            config = omlx_cache.CacheConfig.from_yaml(Path(text))
    except (ValueError, OSError, NotImplementedError) as error:
        raise WrongSettingError(f"{text}: {error}" if is_inline else str(error)) from error
    return Contender(name or text, config.to_dict(), False, _opener(config))


def _is_inline(text: str) -> bool:
    return re.match(r"\s*\w+\s*=", text) is not None


def _inline(text: str) -> dict:
    """Read ``window_size=1024, cache_bits={k: 8, v: 4}``; the values are YAML."""
    pairs = re.split(r"[\s,;]+(?=\w+\s*=)", text.strip())
    found = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key.strip() in found:
            raise WrongSettingError(f"{text}: {key.strip()} is given twice; keep one")
        try:
            found[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise WrongSettingError(
                f"{text}: the value of {key.strip()} must be YAML, got {value.strip()!r}; write "
                f"e.g. cache_bits=4 or 'cache_bits={{k: 8, v: 4}}'"
            ) from None
    return found


def _opener(config: omlx_cache.CacheConfig) -> Callable:
    @contextmanager
    def open_paged(model) -> Iterator[Session]:
        with omlx_cache.patched(model, config):
            cache = omlx_cache.PagedCache(model)

            def feed(ids: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
                return _forward(model, cache, ids, kept)

            yield Session(feed, lambda: bytes_at_16_bits(cache), config.prefill_chunk)

    return open_paged


def _stock(name: str, setting: dict, make: Callable, window: int | None) -> Contender:
    @contextmanager
    def open_stock(model) -> Iterator[Session]:
        cache, past = make(model.config), 0

        def feed(ids: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
            nonlocal past
            more = {} if window is None else _window_arguments(model, past, ids, window)
            past += ids.shape[1]
            return _forward(model, cache, ids, kept, **more)

        yield Session(feed, lambda: _stock_bytes(cache))

    return Contender(name, setting, True, open_stock)


def _forward(model, cache, ids: torch.Tensor, kept: torch.Tensor, **more) -> torch.Tensor:
    last = torch.full((1,), ids.shape[1] - 1, device=ids.device)  # some column must be asked for
    output = model(
        ids,
        logits_to_keep=kept if kept.numel() else last,
        **{cache_name(type(model).forward): cache},
        **more,
    )
    return output.logits[0, : kept.numel()].float()


def _window_arguments(model, past: int, ids: torch.Tensor, window: int) -> dict:
    """Return the mask and positions with which any stock model attends to ``window`` tokens.

    Query ``i`` sees the keys ``i - window + 1 .. i``, of which the cache holds those before the
    first query.
    """
    columns = ids.shape[1]
    first = max(0, past - window + 1)
    queries = torch.arange(past, past + columns, device=ids.device)[:, None]
    keys = torch.arange(first, past + columns, device=ids.device)
    hidden = (keys > queries) | (keys <= queries - window)
    mask = torch.zeros(hidden.shape, dtype=model.dtype, device=ids.device)
    mask.masked_fill_(hidden, torch.finfo(model.dtype).min)
    return {"attention_mask": mask[None, None], "position_ids": queries.T}


def _stock_bytes(cache: Cache) -> int:
    """Return the bytes of the tensors that a stock cache holds, float32 counted as 16 bits."""
    found = _tensors([vars(layer) for layer in cache.layers])
    unique = {
        t.untyped_storage().data_ptr(): t for t in found if t.numel() and t.is_floating_point()
    }
    return sum(t.numel() * min(t.element_size(), 2) for t in unique.values())


def _tensors(value) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def contenders(settings: Sequence[str], with_peers: bool) -> list[Contender]:
    """Return what is asked for (nothing: the default settings), then the peers.

    The peer with a window has that of the first configuration that has one, else 1024.

    Raises:
        WrongSettingError: a setting is wrong or comes twice.
    """
    named = {text: text for text in settings} if settings else DEFAULT_SETTINGS
    if len(set(settings)) < len(settings):
        twice = next(text for text in settings if list(settings).count(text) > 1)
        raise WrongSettingError(f"{twice} is given twice; keep one")
    found = [from_setting(text, name) for name, text in named.items()]
    if with_peers:
        windows = [c.setting["attention"]["window_size"] for c in found]
        found += peers(next((w for w in windows if isinstance(w, int)), 1024))
    return found
