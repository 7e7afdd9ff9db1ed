"""The tensors of one step, built from its plan for each device that a layer of the group is on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from omlx_cache.host_tier import CPU
from omlx_cache.row_plan import RowPlan
from omlx_cache.sequences import Geometry, StoredBlock
from omlx_cache.tables import (
    blocks_of_rows,
    send,
    sink_slots_of_row,
    slots_of_row,
    tables_of_rows,
)
from omlx_kernels.layout import BLOCK_TIERS, Tier
from omlx_kernels.metadata import AttentionMetadata

SplitSize = Callable[[list[int], torch.device], int]
Conversions = Mapping[StoredBlock, StoredBlock]


@dataclass
class DeviceTables:
    """A step's tensors on one device.

    Attributes:
        meta: tables for `paged_attention`.
        slots: [num_tokens] int64, hot slots; padding and sinks are -1.
        sink_slots: the same for the sink pages; None when no new token is a sink.
        token_index: [num_queries] int64 rows of the flattened batch that hold real tokens; None
            when all do.
        convert: (tier, colder tier, int32 ids, int32 ids) of the blocks that age in this step.
        sink_offsets: [num_queries] float32, by how many positions (<= 0) each query moves to look
            at the sinks; None when no query has left the window that begins at position 0.
    """

    meta: AttentionMetadata
    slots: torch.Tensor
    sink_slots: torch.Tensor | None
    token_index: torch.Tensor | None
    convert: list[tuple[Tier, Tier, torch.Tensor, torch.Tensor]]
    sink_offsets: torch.Tensor | None


@dataclass
class HostTables:
    """What a step does to blocks in CPU memory; tensors on the CPU.

    Attributes:
        meta: tables of the blocks that it attends to.
        convert: as in `DeviceTables`.
    """

    meta: AttentionMetadata
    convert: list[tuple[Tier, Tier, torch.Tensor, torch.Tensor]]


class StepTables:
    """The tensors of one step, each sent to its device on first use.

    Args:
        rows: what the step does to each sequence.
        valid: [rows, columns] bool, which columns of the step are real tokens; None: all.
        geometry: the group's block arithmetic.
        split_size: from the blocks of each row and tier, and the device, the blocks that a decode
            split reads at most.
        conversions: the blocks that age in the step, and what each becomes.
        offloaded_conversions: the same in CPU memory.
    """

    def __init__(
        self,
        rows: Sequence[RowPlan],
        valid: np.ndarray | None,
        *,
        geometry: Geometry,
        split_size: SplitSize,
        conversions: Conversions,
        offloaded_conversions: Conversions,
    ) -> None:
        self._rows, self._valid, self._geometry = rows, valid, geometry
        self._split_size = split_size
        self._conversions, self._offloaded_conversions = conversions, offloaded_conversions
        self._devices: dict[torch.device, DeviceTables] = {}
        self._host: HostTables | None = None

    def on(self, device: torch.device) -> DeviceTables:
        """Return the step's tensors on ``device``."""
        if device not in self._devices:
            self._devices[device] = self._build(device)
        return self._devices[device]

    def on_host(self) -> HostTables | None:
        """Return what the step does to blocks in CPU memory; None: nothing."""
        if self._host is None and (
            self._offloaded_conversions or any(row.recalled for row in self._rows)
        ):
            blocks = [row.recalled for row in self._rows]
            arrays = self._tables_of(blocks, [None] * len(blocks), CPU)
            self._host = HostTables(*self._send(arrays, self._offloaded_conversions, CPU))
        return self._host

    def split_blocks(self) -> list[tuple[int, int | None]]:
        """Name the splits where each reads one block, in their order: row, start of its block.

        None instead of a start is the sink page. Those of `on_host` follow.
        """
        here: list[tuple[int, int | None]] = []
        there: list[tuple[int, int | None]] = []
        for i, row in enumerate(self._rows):
            here += [] if row.sink_page is None else [(i, None)]
            here += [(i, b.start) for t in BLOCK_TIERS for b in row.blocks if b.tier is t]
            there += [(i, b.start) for t in BLOCK_TIERS for b in row.recalled if b.tier is t]
        return here + there

    def _build(self, device: torch.device) -> DeviceTables:
        pages = [row.sink_page for row in self._rows]
        arrays = self._tables_of([row.blocks for row in self._rows], pages, device)
        meta, convert = self._send(arrays, self._conversions, device)
        longs = send(self._token_arrays(), device)
        offsets = self._sink_offsets()
        return DeviceTables(
            meta=meta,
            slots=longs["slots"],
            sink_slots=longs.get("sink_slots"),
            token_index=longs.get("token_index"),
            convert=convert,
            sink_offsets=None if offsets is None else send({"": offsets}, device)[""],
        )

    def _tables_of(
        self,
        blocks: list[list[StoredBlock]],
        sink_pages: list[int | None],
        device: torch.device,
    ) -> dict[str, np.ndarray]:
        """Build the int32 tables of attention to the ``blocks`` of each row."""
        return tables_of_rows(
            blocks,
            sink_pages,
            [row.length for row in self._rows],
            [row.new_tokens for row in self._rows],
            self._split_size(blocks_of_rows(blocks), device),
        )

    def _send(
        self, arrays: dict[str, np.ndarray], conversions: Conversions, device: torch.device
    ) -> tuple[AttentionMetadata, list[tuple[Tier, Tier, torch.Tensor, torch.Tensor]]]:
        """Send the tables of attention, and of conversions by pair of tiers, in one transfer."""
        names = list(arrays)
        pairs = {(old.tier, new.tier) for old, new in conversions.items()}
        for pair in pairs:
            moves = [m for m in conversions.items() if (m[0].tier, m[1].tier) == pair]
            arrays[f"{pair} from"] = np.array([old.index for old, _ in moves], np.int32)
            arrays[f"{pair} to"] = np.array([new.index for _, new in moves], np.int32)
        ints = send(arrays, device)
        meta = AttentionMetadata(
            **{name: ints[name] for name in names},
            max_query_len=max((row.new_tokens for row in self._rows), default=0),
        )
        return meta, [(*p, ints[f"{p} from"], ints[f"{p} to"]) for p in sorted(pairs)]

    def _sink_offsets(self) -> np.ndarray | None:
        """Return ``min(window - position, 0)`` of each query; None when all are 0."""
        window = self._geometry.window_size
        if window is None or all(row.length <= window + 1 for row in self._rows):
            return None
        positions = [np.arange(row.sequence.length, row.length) for row in self._rows]
        return np.minimum(window - np.concatenate(positions), 0).astype(np.float32)

    def _token_arrays(self) -> dict[str, np.ndarray]:
        """Build the int64 arrays that are indexed by token."""
        geometry = self._geometry
        slots, sinks = [], []
        for row in self._rows:
            old, new = row.sequence.length, row.new_tokens
            slots.append(slots_of_row(row.blocks, geometry, old, new))
            sinks.append(sink_slots_of_row(row.sink_page, geometry.sink_tokens, old, new))
        arrays = {"slots": np.concatenate(slots), "sink_slots": np.concatenate(sinks)}
        if (arrays["sink_slots"] < 0).all():
            del arrays["sink_slots"]
        if self._valid is not None:
            index = np.flatnonzero(self._valid)
            for name, packed in arrays.items():
                arrays[name] = np.full(self._valid.size, -1, np.int64)
                arrays[name][index] = packed
            arrays["token_index"] = index
        return arrays
