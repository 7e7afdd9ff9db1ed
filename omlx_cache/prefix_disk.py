"""The second level behind the prefix store: what a model has read, on disk.

What the store keeps is also written to a directory, one file a block and layer group (a sink page
counts as a block), in the precision that it has. There it outlives the process, and the bounds on
what is kept in memory. `omlx_cache.prefix_writing` says when a block is written;
`omlx_cache.prefix_loading`, which ones are read back.

**Names.** A file is found by the hash of all tokens up to the block's last, chained block by block
(`PrefixNode.digest`), the layer group, and the fingerprint of everything else that keys and values
depend on: weights, adapters, rotary embedding, dtypes, and the cache's format. No tokenizer: ids
are ids, whatever made them. A block is found whole or not at all: a text that leaves it in the
middle computes its tokens again, unlike in memory, where a hot block can be cut.

**What is promised.** When `PrefixWriter.flush` (or `omlx_cache.flush`) has returned True,
everything that was kept at that moment is on the disk, and the next process finds it, until
``max_disk_bytes`` evicts what was unused for longest. Without it: what a process has queued is
written before it ends, unless it is killed; then what has no file yet is computed again. Nothing
that was read is trusted before its checksums are, and a full or read-only disk is one warning
(`BlockFiles`); as long as it can't be written to, one block a call is tried.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs
import torch
from torch import nn

from omlx_cache.block_arena import BlockArena, Held
from omlx_cache.block_pool import LayerPool, MemoryMeter
from omlx_cache.devices import device_of
from omlx_cache.prefix_tree import PrefixNode
from omlx_cache.prefix_writing import PrefixWriter, key_of
from omlx_cache.storage.block_files import BlockFiles, FoundBlock
from omlx_cache.storage.block_tensors import raw_to_block
from omlx_cache.storage.fingerprint import block_fingerprint
from omlx_cache.storage.read_ahead import ReadAhead
from omlx_cache.storage.tensors import DTYPE_OF
from omlx_kernels.layout import BlockFormat, Tier

if TYPE_CHECKING:
    from omlx_cache.cache import PagedCache
    from omlx_cache.inspection import ModelSpec

logger = logging.getLogger(__name__)

READ_AHEAD_BYTES = 512 * 2**20
"""The most that blocks may hold which were read before they were asked for."""


def directory_of(setting: bool | str) -> Path:
    """Return the directory that ``disk_cache`` names; True is the user's cache directory."""
    if isinstance(setting, str):
        return Path(setting).expanduser()
    return platformdirs.user_cache_path("omlx_cache", appauthor=False) / "blocks"


def check_storable(model: nn.Module) -> None:
    """Check that blocks of a model mean the same in every process that finds them.

    Raises:
        NotImplementedError: with the reason, when they don't.
    """
    if (getattr(model, "tp_size", None) or 1) > 1:
        raise NotImplementedError(
            f"omlx_cache.patch: disk_cache can't be used with this {type(model).__name__}: it is "
            f"split over {model.tp_size} processes (tensor parallel), each of which would find "
            f"blocks of its own, and not all the same; delete the key"
        )


@dataclass(frozen=True)
class Reads:
    """What was read from the disk.

    Attributes:
        blocks: how many blocks.
        ahead: how many files were read, or being read, when they were needed.
        seconds_saved: what those would have taken.
    """

    blocks: int = 0
    ahead: int = 0
    seconds_saved: float = 0.0

    def since(self, before: Reads) -> Reads:
        """Return what was read since ``before``."""
        return Reads(
            self.blocks - before.blocks,
            self.ahead - before.ahead,
            self.seconds_saved - before.seconds_saved,
        )


class PrefixDisk:
    """The blocks of one prefix store in a directory; see the module.

    Methods are called under the store's lock.

    Args:
        files: where they are.
        devices: of each layer of the model.
        meter: told of the pools that are made for what is read.
        reads_ahead: whether a thread reads the next blocks while one is put in its place.

    Attributes:
        writer: writes them.
        num_read: blocks that were read from the disk so far.
        ahead: reads them; None: each when it is needed.
    """

    def __init__(
        self,
        files: BlockFiles,
        devices: Sequence[torch.device],
        meter: MemoryMeter,
        *,
        reads_ahead: bool = True,
    ) -> None:
        self._files, self._devices, self._meter = files, devices, meter
        self.ahead = ReadAhead(files.get, _num_bytes, READ_AHEAD_BYTES) if reads_ahead else None
        self.writer = PrefixWriter(files)
        self.num_read = 0

    @classmethod
    def open(cls, cache: PagedCache, spec: ModelSpec, meter: MemoryMeter) -> PrefixDisk:
        """Open the directory that a cache's configuration names, for the blocks of its model.

        A directory that can't be written to is a warning.
        """
        setting = cache.config.disk_cache
        directory = directory_of(setting)
        if setting is True:
            with suppress(OSError):  # what was said in chats is nobody else's business
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        fingerprint = block_fingerprint(cache, spec.decoder)
        files = BlockFiles(directory, fingerprint, cache.config.max_disk_bytes)
        devices = [device_of(site.module) for site in spec.sites]
        return cls(files, devices, meter, reads_ahead=cache.config.prefetch)

    @property
    def reads(self) -> Reads:
        """What was read so far."""
        if self.ahead is None:
            return Reads(self.num_read)
        return Reads(self.num_read, self.ahead.hits, self.ahead.seconds_saved)

    def peek(self, digest: bytes, group: int) -> dict[str, str] | None:
        """Return the metadata of a block on the disk, once it is written; None: there is none."""
        key = key_of(digest, group)
        metadata = self._files.peek(key)
        if metadata is None and self.writer.knows(key):
            self.writer.drain()
            metadata = self._files.peek(key)
            if metadata is None:
                self.writer.forget(key)  # evicted, or set aside
        return metadata

    def forget(self, digest: bytes, group: int) -> None:
        """Believe no more that a block is on the disk: it is written when it is kept again."""
        self.writer.forget(key_of(digest, group))

    def expect(self, places: Iterable[tuple[bytes, int]]) -> None:
        """Begin to read blocks, named by their digests and the numbers of their layer groups."""
        if self.ahead is not None:
            self.ahead.expect([key_of(*place) for place in places])

    def _get(self, key: bytes, tier: Tier) -> FoundBlock | None:
        """Return what is under a key; what was read ahead only if it is of the tier."""
        found = None if self.ahead is None else self.ahead.take(key)
        if found is not None and found.metadata.get("tier") == tier.name:
            return found
        return self._files.get(key)

    def read(self, node: PrefixNode, group: int, place: Held) -> bool:
        """Read the block of a node into a free block, for which the pools have room.

        Returns:
            Whether it is whole and what was asked for.
        """
        key = key_of(node.digest, group)
        found = self._get(key, place.block.tier)
        if found is None:
            self.writer.forget(key)
            return False
        block = place.block
        if found.metadata.get("tier") != block.tier.name:  # another process has just replaced it
            return False
        try:
            raw_to_block(found.tensors, place.pools, block.tier, block.index, len(node.tokens))
        except ValueError as error:
            logger.warning(
                "disk cache: a block in %s is not used: %s", self._files.directory, error
            )
            return False
        self.writer.note(key, block.tier)
        self.num_read += 1
        return True

    def make_pools(
        self, arena: BlockArena, metadata: dict[str, str], size: int, sinks: int
    ) -> None:
        """Give an arena, in which no layer has run yet, the pools that a block was written from."""
        if not arena.pools:
            for i, heads, dim, dtype in json.loads(metadata["layers"]):
                block_format = BlockFormat(size, sinks, heads, dim, DTYPE_OF[dtype])
                arena.pools[i] = LayerPool(block_format, self._devices[i], self._meter)
        if arena.host is not None:
            for i, pool in arena.pools.items():
                arena.host.pool(i, pool)


def _num_bytes(found: FoundBlock) -> int:
    return sum(memoryview(tensor.data).nbytes for tensor in found.tensors.values())
