"""Blocks in CPU memory: where they go when the device has no room for them.

A block moves as it is, in the precision that it has. It stays part of its rows, and goes on
getting colder there. It is copied on the device's current stream, before anything can be written
to where it was; `HostTier.wait` lets the CPU look only at what has arrived. A block that comes back
goes the same way, and `HostTier.wait_for_all` lets the CPU write only to what has left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy

import torch

from omlx_cache.block_allocator import BlockAllocator
from omlx_cache.block_pool import LayerPool, MemoryMeter, copy_blocks
from omlx_cache.config import CacheConfig
from omlx_cache.key_bounds import KeyBounds
from omlx_cache.layers_ahead import LayersAhead
from omlx_cache.sequences import StoredBlock
from omlx_kernels.layout import BLOCK_TIERS, Tier
from omlx_kernels.quantization import read_blocks

CPU = torch.device("cpu")


class HostTier:
    """The blocks of one arena that are in CPU memory, and their tensors.

    Args:
        max_blocks: bound on the blocks; None is no bound.
        keeps_bounds: whether to note the bounds of the blocks' keys.
        copies_ahead: whether a layer's copies for a prompt begin before it runs.

    Attributes:
        blocks: who holds which block.
        pools: the tensors, by the index of the layer; pinned where the device is a GPU.
        devices: of the layers.
        ahead: copies to the device for the queries of a prompt.
        meter: bytes held, now and at most.
        bounds: of the keys of each block; None where they aren't kept.
    """

    def __init__(
        self, max_blocks: int | None, *, keeps_bounds: bool = False, copies_ahead: bool = True
    ) -> None:
        self.blocks = BlockAllocator(BLOCK_TIERS, max_blocks)
        self.pools: dict[int, LayerPool] = {}
        self.devices: dict[int, torch.device] = {}
        self.ahead = LayersAhead(self, is_ahead=copies_ahead)
        self.meter = MemoryMeter()
        self.bounds = KeyBounds() if keeps_bounds else None
        self._arriving: list[torch.cuda.Event] = []
        self._leaving: list[torch.cuda.Event] = []

    @classmethod
    def from_config(cls, config: CacheConfig) -> HostTier | None:
        """Return what ``cpu_offload`` asks for; None: no block may move."""
        if not config.cpu_offload:
            return None
        keeps_bounds = config.recall == "topk"
        return cls(config.max_cpu_blocks, keeps_bounds=keeps_bounds, copies_ahead=config.prefetch)

    def __deepcopy__(self, memo: dict) -> HostTier:
        self.ahead.clear()
        self.wait_for_all()
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__dict__.update({k: deepcopy(v, memo) for k, v in vars(self).items()})
        return copied

    def capacity(self) -> dict[Tier, int]:
        """Return the blocks of each tier that the layers' tensors must hold."""
        return {Tier.SINK: 0, **{tier: self.blocks.capacity(tier) for tier in BLOCK_TIERS}}

    def take(self, pools: dict[int, LayerPool], blocks: Sequence[StoredBlock]) -> list[StoredBlock]:
        """Copy blocks out of the device's pools; each copy has one holder, the caller.

        Args:
            pools: of the device, by layer.
            blocks: to copy.

        Returns:
            Where each of them is now.

        Raises:
            OutOfBlocksError, MemoryError: there is no room; nothing is changed.
        """
        self.blocks.require(len(blocks))
        copies: list[StoredBlock] = []
        try:
            for block in blocks:
                (index,) = self.blocks.allocate(block.tier, 1)
                copies.append(StoredBlock(block.start, block.tier, index))
            for layer, pool in pools.items():
                self._receive(layer, pool, list(zip(blocks, copies, strict=True)))
        except BaseException:
            for block in copies:
                self.blocks.release(block.tier, block.index)
            raise
        self._arriving += _recorded(pools)
        return copies

    def give(
        self, pools: Mapping[int, LayerPool], pairs: Mapping[StoredBlock, StoredBlock]
    ) -> None:
        """Copy blocks into the device's pools, which have room for them.

        Args:
            pools: of the device, by layer.
            pairs: each block here, and its place on the device.
        """
        for layer, pool in pools.items():
            own = self.pools[layer].blocks
            for old, new in pairs.items():
                targets = pool.blocks.tier(new.tier).tensors()
                for part, source in own.tier(old.tier).tensors().items():
                    targets[part][new.index].copy_(source[old.index], non_blocking=True)
        self._leaving += _recorded(pools)

    def note_leaving(self, end: torch.cuda.Event) -> None:
        """Note when a copy of blocks to a device ends."""
        self._leaving = [each for each in self._leaving if not each.query()] + [end]

    def pool(self, layer: int, like: LayerPool) -> LayerPool:
        """Return the tensors of a layer; made on first use, for blocks like those on its device."""
        if layer not in self.pools:
            pinned, self.devices[layer] = like.device.type == "cuda", like.device
            self.pools[layer] = LayerPool(like.format, CPU, self.meter, is_pinned=pinned)
        return self.pools[layer]

    def fitted(self, layer: int) -> LayerPool:
        """Return the tensors of a layer, with room for every id."""
        pool, capacity = self.pools[layer], self.capacity()
        if not pool.fits(capacity):
            self.wait_for_all()  # the content moves
            pool.fit(capacity)
        return pool

    def _receive(
        self, layer: int, pool: LayerPool, moves: list[tuple[StoredBlock, StoredBlock]]
    ) -> None:
        self.pool(layer, pool)
        own = self.fitted(layer)
        for tier in BLOCK_TIERS:
            pairs = [(old.index, new.index) for old, new in moves if old.tier is tier]
            targets = own.blocks.tier(tier).tensors()
            for part, source in pool.blocks.tier(tier).tensors().items():
                for old, new in pairs:
                    targets[part][new].copy_(source[old], non_blocking=True)
            if self.bounds is not None and pairs:
                ids = [old for old, _ in pairs]
                keys, _ = read_blocks(pool.blocks.tier(tier), tier, ids, torch.float32)
                for (_, new), k in zip(pairs, keys, strict=True):
                    self.bounds.put(layer, tier, new, k)

    def wait(self) -> None:
        """Wait until every block that was taken has arrived."""
        while self._arriving:
            self._arriving.pop().synchronize()

    def wait_for_all(self) -> None:
        """Wait until no copy reads or writes a block here."""
        self.wait()
        while self._leaving:
            self._leaving.pop().synchronize()

    def note_bounds(self, layer: int, tier: Tier, indices: Sequence[int]) -> None:
        """Note the bounds of the keys of blocks that were written here, where they are kept."""
        if self.bounds is not None and indices:
            keys, _ = read_blocks(self.pools[layer].blocks.tier(tier), tier, indices, torch.float32)
            for index, k in zip(indices, keys, strict=True):
                self.bounds.put(layer, tier, index, k)

    def settle(self) -> dict[Tier, dict[int, int]]:
        """Close the gaps that released blocks have left, and give their memory back.

        Returns:
            by tier, old id -> new id of the blocks that moved; whoever holds one must follow.
        """
        self.ahead.clear()
        moves = {tier: self.blocks.compact(tier) for tier in BLOCK_TIERS}
        if any(moves.values()):
            self.wait_for_all()
            for pool in self.pools.values():
                for tier, pairs in moves.items():
                    copy_blocks(pool.blocks.tier(tier), list(pairs.items()))
        if self.bounds is not None:
            for tier, pairs in moves.items():
                self.bounds.follow(tier, pairs, self.blocks.capacity(tier))
        capacity = self.capacity()
        if any(pool.exceeds(capacity) for pool in self.pools.values()):
            self.wait_for_all()
            for pool in self.pools.values():
                pool.shrink(capacity)
        return moves


def _recorded(pools: Mapping[int, LayerPool]) -> list[torch.cuda.Event]:
    """Return an event for each GPU, after what its current stream has been given so far."""
    devices = {pool.device for pool in pools.values() if pool.device.type == "cuda"}
    return [torch.cuda.current_stream(device).record_event() for device in devices]
