"""Copies of one layer's blocks on a device, for the queries of a prompt, begun a layer early.

The blocks of all layers lie in CPU memory; a step needs those of one layer after the other. While a
layer runs, those of the next one are copied on a stream of their own, from pinned memory::

    default stream   attend layer 0 | mlp .... | attend layer 1 | mlp .... | attend layer 2
    side stream                     copy layer 1 ...            copy layer 2 ...

Both layers' copies take room on the device at that time. A copy that isn't there when its layer
runs is waited for, or made then: never wrong, only early or late. Without a GPU the same happens
without streams.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from omlx_cache.tables import send
from omlx_kernels.layout import BLOCK_TIERS, LayerBlocks, Tier
from omlx_kernels.metadata import AttentionMetadata

if TYPE_CHECKING:
    from omlx_cache.host_tier import HostTier

logger = logging.getLogger(__name__)


@lru_cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of a GPU on which copies run beside the kernels."""
    return torch.cuda.Stream(device)


@dataclass
class _Sent:
    """The blocks of a layer on a device, and the event after which they are there."""

    blocks: LayerBlocks
    arrival: torch.cuda.Event | None

    def wait(self, device: torch.device) -> LayerBlocks:
        """Let the current stream wait for the blocks, and keep them until it has used them."""
        if self.arrival is not None:
            stream = torch.cuda.current_stream(device)
            stream.wait_event(self.arrival)
            for tier in Tier:
                for part in self.blocks.tier(tier).tensors().values():
                    part.record_stream(stream)
        return self.blocks


class LayersAhead:
    """The copies of one step for the layers of one arena.

    Args:
        host: holds the blocks.
        is_ahead: whether to begin with the next layer's copy; else each is made when it is needed.

    Attributes:
        hits: layers whose copy had begun before they ran.
        misses: layers whose copy had not, though another layer had run before them.
    """

    def __init__(self, host: HostTier, *, is_ahead: bool) -> None:
        self._host, self._is_ahead = host, is_ahead
        self.hits = self.misses = 0
        self.clear()

    def clear(self) -> None:
        """Forget the step."""
        self._meta: AttentionMetadata | None = None
        self._ids: dict[Tier, list[int]] = {}
        self._tables: dict[torch.device, AttentionMetadata] = {}
        self._arrays: dict[str, Any] = {}
        self._coming: dict[int, _Sent] = {}

    def take(
        self, layer: int, meta: AttentionMetadata, device: torch.device
    ) -> tuple[LayerBlocks, AttentionMetadata]:
        """Return a layer's blocks on a device, with tables that fit there.

        Args:
            layer: index of the layer.
            meta: tables of the step, in CPU memory; the same object for all layers of a step.
            device: where the queries are.
        """
        if meta is not self._meta:
            self._begin(meta)
        elif layer in self._coming:
            self.hits += 1
        else:
            self.misses += 1
        sent = self._coming.pop(layer, None) or self._send(layer, device, is_ahead=False)
        blocks = sent.wait(device)
        self._send_next(layer)
        if device not in self._tables:
            sent_tables: dict[str, Any] = send(self._arrays, device)
            self._tables[device] = replace(meta, **sent_tables)
        return blocks, self._tables[device]

    def _begin(self, meta: AttentionMetadata) -> None:
        """Number the blocks that a step's tables list, tier by tier."""
        self.clear()
        tables = {name: x for name, x in vars(meta).items() if isinstance(x, torch.Tensor)}
        arrays = {name: x.numpy().copy() for name, x in tables.items()}
        for i, tier in enumerate(BLOCK_TIERS):
            first, stop = arrays["tier_starts"][:, i], arrays["tier_starts"][:, i + 1]
            listed = [
                (row, entry) for row in range(len(first)) for entry in range(first[row], stop[row])
            ]
            ids = sorted({int(arrays["block_table"][at]) for at in listed})
            place = {index: i for i, index in enumerate(ids)}
            for at in listed:
                arrays["block_table"][at] = place[int(arrays["block_table"][at])]
            self._ids[tier] = ids
        self._meta, self._arrays = meta, arrays

    def _send_next(self, layer: int) -> None:
        """Begin with the copy for the layer that runs next, if there is room for it."""
        following = [i for i in self._host.devices if i > layer]
        if not self._is_ahead or not following:
            return
        coming = min(following)
        try:
            self._coming[coming] = self._send(coming, self._host.devices[coming], is_ahead=True)
        except (MemoryError, torch.OutOfMemoryError):
            logger.info("no room on the device to copy blocks ahead in; they are copied later")

    def _send(self, layer: int, device: torch.device, *, is_ahead: bool) -> _Sent:
        """Copy what the step's tables list of a layer to a device."""
        source, is_gpu = self._host.pools[layer].blocks, device.type == "cuda"
        on_side = torch.cuda.stream(side_stream(device)) if is_gpu and is_ahead else nullcontext()
        parts: dict[str, Any] = {}
        with on_side:
            for tier in Tier:
                ids, own = self._ids.get(tier, []), source.tier(tier)
                copied = {}
                for name, part in own.tensors().items():
                    target = copied[name] = part.new_empty(
                        (len(ids), *part.shape[1:]), device=device
                    )
                    for place, index in enumerate(ids):
                        target[place].copy_(part[index], non_blocking=is_gpu)
                parts[tier.name.lower()] = replace(own, **copied)
            arrival = torch.cuda.current_stream(device).record_event() if is_gpu else None
        if arrival is not None:
            self._host.note_leaving(arrival)
        return _Sent(LayerBlocks(**parts), arrival if is_ahead else None)
