"""The second level behind the prefix store: what a model has read, on disk.

What the store keeps is also written to a directory, one file a block and layer group (a sink page
counts as a block), in the precision that it has. There it outlives the process, and the bounds on
what is kept in memory. `omlx_cache.prefix_loading` reads it back.

**Names.** A file is found by the hash of all tokens up to the block's last, chained block by block
(`PrefixNode.digest`), the layer group, and the fingerprint of everything else that keys and values
depend on: weights, adapters, rotary embedding, dtypes, and the cache's format. No tokenizer: ids
are ids, whatever made them. A block is found whole or not at all: a text that leaves it in the
middle computes its tokens again, unlike in memory, where a hot block can be cut.

**Writes.** Under the store's lock a block is copied out of the pools, and no more; a thread of its
own compresses, seals and writes it. What waits for it is bounded (`BACKLOG_BYTES`): a block for
which there is no room is not waited for but offered again by the next call that keeps it, and by
`flush`. During a prompt, a block that is to get colder soon isn't written yet. A block that has got
colder since it was written replaces its file, so that a text that is read back takes the memory
that it took. A last, partial block is a file of its tokens alone; it is removed when a longer one
is on the disk, and a later call has gone on from there.

**What is promised.** When `flush` (or `omlx_cache.flush`) has returned True, everything that was
kept at that moment is on the disk, and the next process finds it, until ``max_disk_bytes`` evicts
what was unused for longest. Without it: what a process has queued is written before it ends, unless
it is killed; then what has no file yet is computed again. Nothing that was read is trusted before
its checksums are, and a full or read-only disk is one warning (`BlockFiles`); as long as it can't
be written to, one block a call is tried.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs
import torch
from torch import nn

from omlx_cache.block_arena import BlockArena, Held
from omlx_cache.block_pool import LayerPool, MemoryMeter
from omlx_cache.devices import device_of
from omlx_cache.prefix_tree import PrefixNode
from omlx_cache.storage.background import BackgroundJobs
from omlx_cache.storage.block_files import BlockFiles, FoundBlock
from omlx_cache.storage.block_tensors import CopiedBlock, copy_block, raw_to_block
from omlx_cache.storage.fingerprint import block_fingerprint
from omlx_cache.storage.read_ahead import ReadAhead
from omlx_cache.storage.tensors import DTYPE_OF, DTYPES
from omlx_kernels.layout import BlockFormat, Tier

if TYPE_CHECKING:
    from omlx_cache.cache import PagedCache
    from omlx_cache.inspection import ModelSpec

logger = logging.getLogger(__name__)

BACKLOG_BYTES = 512 * 2**20
"""The most that copies of blocks may hold while they wait to be written; one block always may."""

READ_AHEAD_BYTES = 512 * 2**20
"""The most that blocks may hold which were read before they were asked for."""

_MAX_KNOWN = 2**17  # blocks of which to remember that they are on the disk: some tens of MB


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


class PrefixDisk:
    """The blocks of one prefix store in a directory; see the module.

    Methods are called under the store's lock.

    Args:
        files: where they are.
        devices: of each layer of the model.
        meter: told of the pools that are made for what is read.
        reads_ahead: whether a thread reads the next blocks while one is put in its place.

    Attributes:
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
        self._jobs = BackgroundJobs(BACKLOG_BYTES)
        self._known: dict[bytes, Tier] = {}  # files that are there, or on their way
        # digest of a block -> (number of a call, digest) of the partial blocks that it continues
        self._superseded: dict[bytes, tuple[tuple[int, bytes], ...]] = {}
        self._calls = 0
        self._is_failing = False
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

    def offer(
        self, node: PrefixNode, group: int, arena: BlockArena, *, may_age: bool = False
    ) -> bool:
        """Write the block that an arena keeps of a node, where the disk lacks it and has room.

        Args:
            node: a block of some text.
            group: number of the layer group, in the order of every cache.
            arena: the group's.
            may_age: whether a block in the model's dtype is soon to get colder, and to wait.

        Returns:
            Whether it is there, or on its way.
        """
        held, key = arena.kept(node), _key(node.digest, group)
        if held is None or self._known.get(key) is held.block.tier:
            return True
        block, pools = held.block, held.pools
        if block.tier is Tier.HOT and may_age:
            return False
        size = sum(pool.format.bytes_per_block(block.tier) for pool in pools)
        if not (self._jobs.is_idle if self._is_failing else self._jobs.has_room(size)):
            return False
        copied = copy_block(pools, block.tier, block.index, len(node.tokens))
        self._know(key, block.tier)
        layers = [
            [i, pool.format.num_kv_heads, pool.format.head_dim, DTYPES[pool.format.dtype]]
            for i, pool in sorted(arena.pools.items())
        ]
        metadata = {"tier": block.tier.name, "layers": json.dumps(layers)}
        self._jobs.submit(partial(self._write, key, copied, metadata), size)
        return True

    def flush(self, kept: Iterable[tuple[PrefixNode, int, BlockArena]]) -> bool:
        """Write what is kept, waiting for room where there is none, and until all is written.

        Args:
            kept: (node, group, arena) as for `offer`.

        Returns:
            Whether all of it is on the disk. At the first block that can't be written it gives up.
        """
        asked = []
        for node, group, arena in kept:
            asked.append(_key(node.digest, group))
            if not self.offer(node, group, arena):
                self._jobs.drain()
                if not self.offer(node, group, arena):
                    return False
            if self._is_failing:
                self._jobs.drain()
                if self._is_failing:
                    return False
        self._jobs.drain()
        return all(key in self._known for key in asked)

    def _write(self, key: bytes, copied: CopiedBlock, metadata: dict[str, str]) -> None:
        """Write a block; runs in the background."""
        is_stored = False
        try:
            is_stored = self._files.put(key, copied.to_raw(), metadata)
        finally:
            self._is_failing = not is_stored
            if not is_stored:
                self._known.pop(key, None)

    def _know(self, key: bytes, tier: Tier) -> None:
        self._known.pop(key, None)
        self._known[key] = tier
        if len(self._known) > _MAX_KNOWN:
            self._known.pop(next(iter(self._known)), None)

    def supersede(self, shorter: PrefixNode, longer: PrefixNode) -> None:
        """Note that a partial block goes on: its files may leave a call later; see `end_call`."""
        olds = [self._superseded.pop(node.digest, ()) for node in (longer, shorter)]
        self._superseded[longer.digest] = (*olds[0], *olds[1], (self._calls, shorter.digest))
        if len(self._superseded) > _MAX_KNOWN:
            self._superseded.pop(next(iter(self._superseded)))

    def end_call(self, nodes: Sequence[PrefixNode], num_groups: int) -> None:
        """Make the blocks of a text the last to be evicted, its first block the very last.

        What an *earlier* call has superseded in this text is removed. What this one has is not yet:
        the process may be killed before anybody sees the call's answer, and the call come again.
        """
        keys = [_key(node.digest, i) for node in reversed(nodes) for i in range(num_groups)]
        touched = [key for key in keys if key in self._known]
        removed: list[tuple[list[bytes], list[bytes]]] = []
        for node in nodes:
            olds = self._superseded.pop(node.digest, ())
            later = tuple(old for old in olds if old[0] == self._calls)
            if later:
                self._superseded[node.digest] = later
            gone = [
                _key(old, i) for call, old in olds if call < self._calls for i in range(num_groups)
            ]
            removed.append(([_key(node.digest, i) for i in range(num_groups)], gone))
            for key in gone:
                self._known.pop(key, None)
        self._calls += 1
        self._jobs.submit(partial(self._tidy, touched, removed))

    def _tidy(
        self, touched: Sequence[bytes], removed: Sequence[tuple[Sequence[bytes], Sequence[bytes]]]
    ) -> None:
        """Keep the order of use, and remove what was superseded; runs in the background."""
        for new, old in removed:
            if old and all(key in self._files for key in new):
                for key in old:
                    self._files.discard(key)
        if self._files.max_bytes is not None:
            for key in touched:
                self._files.touch(key)

    def peek(self, digest: bytes, group: int) -> dict[str, str] | None:
        """Return the metadata of a block on the disk, once it is written; None: there is none."""
        key = _key(digest, group)
        metadata = self._files.peek(key)
        if metadata is None and key in self._known:
            self._jobs.drain()
            metadata = self._files.peek(key)
            if metadata is None:
                self._known.pop(key, None)  # evicted, or set aside
        return metadata

    def forget(self, digest: bytes, group: int) -> None:
        """Believe no more that a block is on the disk: it is written when it is kept again."""
        self._known.pop(_key(digest, group), None)

    def expect(self, places: Iterable[tuple[bytes, int]]) -> None:
        """Begin to read blocks, named by their digests and the numbers of their layer groups."""
        if self.ahead is not None:
            self.ahead.expect([_key(*place) for place in places])

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
        key = _key(node.digest, group)
        found = self._get(key, place.block.tier)
        if found is None:
            self._known.pop(key, None)
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
        self._know(key, block.tier)
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


def _key(digest: bytes, group: int) -> bytes:
    return digest + group.to_bytes(2, "little")
