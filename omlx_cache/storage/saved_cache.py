"""A whole `PagedCache` in one file: every row, block table, sink page and block.

The file is a sealed one (`omlx_cache.storage.sealed`). Its description, JSON in the header, says
which rows there are and where their tokens lie; blocks that rows share are stored once, and stay
shared. Its tensors are ``layer.<i>.<tier>.<part>`` [blocks, ...], shaped as the layout of blocks
says, and ``valid`` [rows, columns] where some columns are padding.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from omlx_cache.devices import device_of
from omlx_cache.patch_state import PatchState, state_of
from omlx_cache.sequences import Sequence, StoredBlock
from omlx_cache.storage.atomic import replacing
from omlx_cache.storage.codec import encode
from omlx_cache.storage.fingerprint import differences, format_fingerprint, model_fingerprint
from omlx_cache.storage.sealed import SealedError, SealedReader, SealedWriter
from omlx_cache.storage.tensors import DTYPE_OF, DTYPES, from_raw, to_raw
from omlx_kernels.layout import BLOCK_TIERS, Tier

if TYPE_CHECKING:
    from omlx_cache.cache import PagedCache
    from omlx_cache.layer_group import LayerGroup

KIND = "omlx_cache cache 1"


@dataclass(frozen=True)
class _Contents:
    """What a group stores, renumbered without gaps.

    Attributes:
        places: for each tier, the ids that are in use, in order -> where they are stored.
        filled: tokens in each (tier, physical id): the rest of a block is stored as zeros.
    """

    places: dict[Tier, dict[int, int]]
    filled: dict[tuple[Tier, int], int]


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
    contents = [_contents_of(group) for group in cache.groups]
    valid = cache.valid
    description = {
        "model": model_fingerprint(decoder),
        "format": format_fingerprint(cache),
        "config": cache.config.model_dump(),
        "columns": cache.get_seq_length(),
        "groups": [_describe(g, c) for g, c in zip(cache.groups, contents, strict=True)],
        "layers": [None if layer.pool is None else _shape_of(layer) for layer in cache.layers],
    }
    metadata = {"cache": json.dumps(description), "extra": json.dumps(extra or {})}
    names = [name for name, _, _ in _parts(cache, contents)] + ["valid"] * (valid is not None)
    with replacing(Path(path)) as file:
        writer = SealedWriter(file, KIND, metadata, names)
        for name, source, (tier, own) in _parts(cache, contents):
            tensor = _filled_part(source[list(own.places[tier])], tier, own)
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
        cache = PagedCache.for_patch(state)
        self._check(cache, state)
        with open(self.path, "rb") as file:
            sealed = self._open(file)
            try:
                with cache.alone():
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
            id(group): _restore_rows(group, own)
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
            layer.pool.fit(layer.group.capacity())
            for tier, ids in taken[id(layer.group)].items():
                if not ids:
                    continue
                for part, target in layer.pool.blocks.tier(tier).tensors().items():
                    stored = from_raw(sealed.read(_name(i, tier, part))).to(target.device)
                    target.index_copy_(0, torch.tensor(ids, device=target.device), stored)
        valid = None
        if "valid" in sealed.names:
            valid = from_raw(sealed.read("valid")).numpy()
        cache.restore_columns(self._description["columns"], valid)


def _contents_of(group: LayerGroup) -> _Contents:
    filled: dict[tuple[Tier, int], int] = {}
    size, sinks = group.geometry.block_size, group.geometry.sink_tokens
    for row in group.rows:
        held = [((b.tier, b.index), min(size, row.length - b.start)) for b in row.blocks]
        if row.sink_page is not None:
            held.append(((Tier.SINK, row.sink_page), min(sinks, row.length)))
        for block, tokens in held:
            filled[block] = max(tokens, filled.get(block, 0))
    ids = {tier: sorted(index for t, index in filled if t is tier) for tier in Tier}
    places = {tier: {index: i for i, index in enumerate(own)} for tier, own in ids.items()}
    return _Contents(places, filled)


def _describe(group: LayerGroup, contents: _Contents) -> dict:
    places = contents.places
    rows = [
        {
            "length": row.length,
            "sink_page": None if row.sink_page is None else places[Tier.SINK].get(row.sink_page),
            "blocks": [[b.start, b.tier.name, places[b.tier][b.index]] for b in row.blocks],
        }
        for row in group.rows
    ]
    return {"keep_past": group.keep_past, "rows": rows}


def _restore_rows(group: LayerGroup, described: dict) -> dict[Tier, list[int]]:
    """Take blocks for what the rows hold, once each, and share those that several rows name.

    Returns:
        the ids that were taken of each tier: what is stored at place ``i`` belongs into ``ids[i]``.
    """
    rows = described["rows"]
    blocks = {(Tier[tier], place) for row in rows for _, tier, place in row["blocks"]}
    pages = {row["sink_page"] for row in rows} - {None}
    group.blocks.require(len(blocks))
    ids = {t: group.blocks.allocate(t, sum(tier is t for tier, _ in blocks)) for t in BLOCK_TIERS}
    ids[Tier.SINK] = group.pages.allocate(Tier.SINK, len(pages))
    shared = set()
    for row in rows:
        named = [(start, Tier[tier], place) for start, tier, place in row["blocks"]]
        stored = [StoredBlock(start, tier, ids[tier][place]) for start, tier, place in named]
        page = None if row["sink_page"] is None else ids[Tier.SINK][row["sink_page"]]
        group.rows.append(Sequence(row["length"], page, stored))
        held = [(group.blocks, b.tier, b.index) for b in stored]
        if page is not None:
            held.append((group.pages, Tier.SINK, page))
        for allocator, tier, index in held:
            if (tier, index) in shared:
                allocator.share(tier, index)
            shared.add((tier, index))
    group.keep_past = described["keep_past"]
    return ids


def _parts(
    cache: PagedCache, contents: list[_Contents]
) -> Iterator[tuple[str, torch.Tensor, tuple[Tier, _Contents]]]:
    """Yield the tensors to store: name, all blocks of the pool, and which are in use."""
    by_group = {id(g): c for g, c in zip(cache.groups, contents, strict=True)}
    for i, layer in enumerate(cache.layers):
        if layer.pool is None:
            continue
        own = by_group[id(layer.group)]
        for tier in Tier:
            if own.places[tier]:
                for part, source in layer.pool.blocks.tier(tier).tensors().items():
                    yield _name(i, tier, part), source, (tier, own)


def _filled_part(blocks: torch.Tensor, tier: Tier, own: _Contents) -> torch.Tensor:
    """Put zeros where a block holds no tokens yet: what was in that memory is nobody's business.

    Args:
        blocks: [blocks, heads, tokens, ...], a copy.
    """
    if tier in (Tier.SINK, Tier.HOT):  # a quantized block is always full
        for block, index in zip(blocks, own.places[tier], strict=True):
            block[:, own.filled[tier, index] :] = 0
    return blocks


def _name(layer: int, tier: Tier, part: str) -> str:
    return f"layer.{layer}.{tier.name.lower()}.{part}"


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
