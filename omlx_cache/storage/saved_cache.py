"""A whole `PagedCache` in one file: every row, block table, sink page and block.

The file is a sealed one (`omlx_cache.storage.sealed`). Its description, JSON in the header, says
which rows there are and where their tokens lie; blocks that rows share are stored once, and stay
shared. Its tensors are ``layer.<i>.<place>.<tier>.<part>`` [blocks, ...], shaped as the layout of
blocks says, where the place is ``device`` or ``cpu``, and ``valid`` [rows, columns] where some
columns are padding.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from omlx_cache.devices import device_of
from omlx_cache.patch_state import PatchState, state_of
from omlx_cache.storage.atomic import replacing
from omlx_cache.storage.codec import encode
from omlx_cache.storage.fingerprint import differences, format_fingerprint, model_fingerprint
from omlx_cache.storage.saved_rows import (
    CPU,
    DEVICE,
    Contents,
    Space,
    contents_of,
    describe_rows,
    restore_rows,
)
from omlx_cache.storage.sealed import SealedError, SealedReader, SealedWriter
from omlx_cache.storage.tensors import DTYPE_OF, DTYPES, from_raw, to_raw
from omlx_kernels.layout import Tier

if TYPE_CHECKING:
    from omlx_cache.cache import PagedCache

KIND = "omlx_cache cache 2"


def save_cache(
    cache: PagedCache,
    path: str | os.PathLike[str],
    decoder: nn.Module,
    *,
    extra: Mapping[str, Any] | None = None,
    compress: bool = True,
) -> None:
    """Write a cache into a file, which replaces one of that name in one go.

    Args:
        cache: between two steps.
        path: of the file; its directory must be there.
        decoder: the one that the cache was filled by.
        extra: what else to keep, as JSON can: `SavedCache.extra` gives it back.
        compress: whether to compress what gets smaller by it (lossless).

    Raises:
        OSError: the file can't be written; one of that name is as it was.
        TypeError: ``extra`` holds something that JSON can't.
    """
    contents = [contents_of(group) for group in cache.groups]
    valid = cache.valid
    description = {
        "model": model_fingerprint(decoder),
        "format": format_fingerprint(cache),
        "config": cache.config.model_dump(),
        "columns": cache.get_seq_length(),
        "groups": [describe_rows(g, c) for g, c in zip(cache.groups, contents, strict=True)],
        "layers": [None if layer.pool is None else _shape_of(layer) for layer in cache.layers],
    }
    metadata = {"cache": json.dumps(description), "extra": json.dumps(extra or {})}
    names = [name for name, _, _ in _parts(cache, contents)] + ["valid"] * (valid is not None)
    with replacing(Path(path)) as file:
        writer = SealedWriter(file, KIND, metadata, names)
        for name, source, (space, own) in _parts(cache, contents):
            tensor = _filled_part(source[list(own.places[space])], space, own)
            writer.add(name, encode(to_raw(tensor), compress))
        if valid is not None:
            writer.add("valid", encode(to_raw(torch.from_numpy(valid)), compress))
        writer.finish()


class SavedCache:
    """A file that `save_cache` wrote, opened and checked.

    Args:
        path: of the file.
        caller: whom the messages of errors name.

    Attributes:
        extra: what was kept beside the cache.

    Raises:
        OSError: the file can't be read.
        ValueError: it is damaged, or another one; the message says which.
    """

    def __init__(self, path: str | os.PathLike[str], *, caller: str = "PagedCache.load") -> None:
        self.path, self._caller = Path(path), caller
        with open(self.path, "rb") as file:
            metadata = self._open(file).metadata
        self._description = json.loads(metadata["cache"])
        self.extra: dict[str, Any] = json.loads(metadata["extra"])

    def restore(self, model: nn.Module) -> PagedCache:
        """Build the cache for a patched model, on its devices.

        Raises:
            OSError: the file can't be read.
            ValueError: the cache is another model's, or stored in another format than the model
                is patched for, or the file is damaged; the message says which.
            OutOfBlocksError: it has more blocks than ``max_gpu_blocks``.
        """
        from omlx_cache.cache import PagedCache  # which imports this module

        state = state_of(model)
        cache = PagedCache.for_patch(state, callers=True)
        self._check(cache, state)
        with open(self.path, "rb") as file:
            sealed = self._open(file)
            try:
                with cache.steps.alone():
                    self._fill(cache, state, sealed)
            except BaseException as error:
                cache.reset()
                if isinstance(error, SealedError):
                    raise self._damaged(error) from error
                raise
        return cache

    def changed_keys(self, cache: PagedCache) -> str:
        """Return the keys, with their values, that the saved configuration has otherwise."""
        return _changed(self._description["config"], cache)

    def _open(self, file) -> SealedReader:
        try:
            return SealedReader(file, KIND)
        except SealedError as error:
            raise self._damaged(error) from error

    def _damaged(self, error: SealedError) -> ValueError:
        return ValueError(
            f"{self._caller}: {self.path} must be a whole file that was saved, got one that can't "
            f"be used: {error}; use another copy, or begin anew"
        )

    def _check(self, cache: PagedCache, state: PatchState) -> None:
        stored, present = self._description["model"], model_fingerprint(state.spec.decoder)
        other = differences(stored, present)
        if other:
            values = [f"{n} {stored.get(n)} and {present.get(n)}" for n in other if n == "dtype"]
            raise ValueError(
                f"{self._caller}: {self.path} must be a cache of this model, got one whose "
                f"{', '.join(other)} differ{'s' if len(other) == 1 else ''}"
                f"{' (' + values[0] + ')' if values else ''}; load the model that it was saved with"
            )
        stored, present = self._description["format"], format_fingerprint(cache)
        other = differences(stored, present)
        if other:
            both = "; ".join(f"{n}: {stored.get(n)} and {present.get(n)}" for n in other)
            raise ValueError(
                f"{self._caller}: {self.path} must be stored as the model is patched, got other "
                f"{both}; patch(model, ...) with the configuration that it was saved with: "
                f"{self.changed_keys(cache)}"
            )

    def _fill(self, cache: PagedCache, state: PatchState, sealed: SealedReader) -> None:
        described = self._description["groups"]
        taken = {
            id(group): restore_rows(group, own)
            for group, own in zip(cache.groups, described, strict=True)
        }
        layers = zip(cache.layers, self._description["layers"], state.spec.sites, strict=True)
        for i, (layer, shape, site) in enumerate(layers):
            if shape is None:
                continue
            states = torch.empty(
                (0, shape["num_kv_heads"], 0, shape["head_dim"]),
                dtype=DTYPE_OF[shape["dtype"]],
                device=device_of(site.module),
            )
            if layer.pool is None:
                layer.lazy_initialization(states, states)
            arena = layer.group.arena
            layer.pool.fit(arena.capacity())
            pools = {DEVICE: layer.pool, CPU: layer.pool}
            if arena.host is not None:
                arena.host.pool(layer.index, layer.pool)
                pools[CPU] = arena.host.fitted(layer.index)
            for (place, tier), ids in taken[id(layer.group)].items():
                if not ids:
                    continue
                for part, target in pools[place].blocks.tier(tier).tensors().items():
                    name = _name(i, (place, tier), part)
                    stored = from_raw(sealed.read(name)).to(target.device)
                    target.index_copy_(0, torch.tensor(ids, device=target.device), stored)
                if place == CPU and arena.host is not None:
                    arena.host.note_bounds(layer.index, tier, ids)
        valid = None
        if "valid" in sealed.names:
            valid = from_raw(sealed.read("valid")).numpy()
        cache.rows.restore(self._description["columns"], valid)


def _parts(
    cache: PagedCache, contents: list[Contents]
) -> Iterator[tuple[str, torch.Tensor, tuple[Space, Contents]]]:
    """Yield the tensors to store: name, all blocks of the pool, and which are in use."""
    by_group = {id(g): c for g, c in zip(cache.groups, contents, strict=True)}
    for i, layer in enumerate(cache.layers):
        if layer.pool is None:
            continue
        own, host = by_group[id(layer.group)], layer.group.arena.host
        pools = {DEVICE: layer.pool} | ({} if host is None else {CPU: host.pools.get(i)})
        for (place, tier), used in own.places.items():
            if used:
                for part, source in pools[place].blocks.tier(tier).tensors().items():
                    yield _name(i, (place, tier), part), source, ((place, tier), own)


def _filled_part(blocks: torch.Tensor, space: Space, own: Contents) -> torch.Tensor:
    """Put zeros where a block holds no tokens yet: what was in that memory is nobody's business.

    Args:
        blocks: [blocks, heads, tokens, ...], a copy.
    """
    if space[1] in (Tier.SINK, Tier.HOT):  # a quantized block is always full
        for block, index in zip(blocks, own.places[space], strict=True):
            block[:, own.filled[space, index] :] = 0
    return blocks


def _name(layer: int, space: Space, part: str) -> str:
    place, tier = space
    return f"layer.{layer}.{place}.{tier.name.lower()}.{part}"


def _shape_of(layer) -> dict:
    block_format = layer.pool.format
    return {
        "num_kv_heads": block_format.num_kv_heads,
        "head_dim": block_format.head_dim,
        "dtype": DTYPES[block_format.dtype],
    }


def _changed(saved: dict, cache: PagedCache) -> str:
    """Return the keys of a configuration that differ from the cache's, as arguments of patch."""
    present = cache.config.model_dump()
    return ", ".join(f"{k}={v!r}" for k, v in saved.items() if present.get(k) != v) or "the same"
