"""One step of one layer group as a transaction: planned on the host, then committed or undone.

While a step runs, the rows of the group are as they were: new tokens go to slots that no table
lists yet, converted blocks go to ids that no table lists yet, and what leaves is released only by
`StepPlan.commit`. So `StepPlan.rollback` (an interrupt, an error in some layer) restores the
cache exactly, whichever layers had already run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from omlx_cache.block_allocator import BlockAllocator
from omlx_cache.block_arena import BlockArena
from omlx_cache.host_tier import CPU
from omlx_cache.policy.choice import Policy
from omlx_cache.sequences import Geometry, Sequence, StoredBlock
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


@dataclass
class RowPlan:
    """What a step does to one sequence."""

    sequence: Sequence
    new_tokens: int
    blocks: list[StoredBlock] = field(default_factory=list)  # during the step
    recalled: list[StoredBlock] = field(default_factory=list)  # in CPU memory, attended to
    taken: list[StoredBlock] = field(default_factory=list)  # allocated for the step
    given_up: list[StoredBlock] = field(default_factory=list)  # shared ones, copied on write
    sink_page: int | None = None
    old_sink_page: int | None = None

    @property
    def length(self) -> int:
        """Tokens after the step."""
        return self.sequence.length + self.new_tokens


class StepPlan:
    """Plan a step: allocate what it needs, decide what ages and what leaves.

    Args:
        rows: the group's sequences.
        new_tokens: real tokens that each row gets.
        valid: [rows, columns] bool, which columns of the step are real tokens; None: all.
        geometry: the group's block arithmetic.
        arena: where blocks and sink pages come from.
        others: the rows of other groups that draw from the same arena.
        policy: which tier a block belongs to.
        split_size: from the blocks of each row and tier, and the device, the blocks that a decode
            split reads at most.
        release: whether blocks that the window has left behind are released at the end.
        recall: which of its blocks in CPU memory a row attends to.

    Raises:
        OutOfBlocksError: when the step needs more blocks than are free; nothing is changed.
    """

    def __init__(
        self,
        rows: list[Sequence],
        new_tokens: list[int],
        valid: np.ndarray | None,
        *,
        geometry: Geometry,
        arena: BlockArena,
        others: list[Sequence],
        policy: Policy,
        split_size: SplitSize,
        release: bool,
        recall: Callable[[Sequence], list[StoredBlock]],
    ) -> None:
        self._release = release
        self.geometry, self.policy, self.valid = geometry, policy, valid
        self._arena, self._others = arena, others
        self._blocks, self._pages, self._host = arena.blocks, arena.pages, arena.host
        self._split_size = split_size
        self._devices: dict[torch.device, DeviceTables] = {}
        self.rows = [RowPlan(row, n) for row, n in zip(rows, new_tokens, strict=True)]
        starts = [
            geometry.new_starts(row.length, n) for row, n in zip(rows, new_tokens, strict=True)
        ]
        shared = [self._shared_tail(row) for row in self.rows]
        self._blocks.require(sum(map(len, starts)) + sum(tail is not None for tail in shared))
        self.copies: list[tuple[int, int]] = []
        self.page_copies: list[tuple[int, int]] = []
        for row, row_starts, tail in zip(self.rows, starts, shared, strict=True):
            self._extend(row, row_starts, tail)
        self.conversions = self._age(
            [(row.blocks, row.length) for row in self.rows],
            [(row.blocks, row.length) for row in others],
            self._blocks,
            arena.num_holders,
        )
        self.offloaded_conversions = self._age_offloaded()
        self._host_tables: HostTables | None = None
        for row in self.rows:
            row.recalled = recall(row.sequence) if row.new_tokens else []

    def _shared_tail(self, row: RowPlan) -> StoredBlock | None:
        """Return the row's partial block when others hold it too: writing needs a copy."""
        stored = row.sequence.blocks
        if not row.new_tokens or not stored:
            return None
        tail = stored[-1]
        partial = tail.start + self.geometry.block_size > row.sequence.length
        return tail if partial and self._blocks.refs(tail.tier, tail.index) > 1 else None

    def _extend(self, row: RowPlan, starts: range, tail: StoredBlock | None) -> None:
        row.blocks = list(row.sequence.blocks)
        if tail is not None:
            (index,) = self._blocks.allocate(Tier.HOT, 1)
            self.copies.append((tail.index, index))
            row.given_up.append(tail)
            row.blocks[-1] = StoredBlock(tail.start, Tier.HOT, index)
            row.taken.append(row.blocks[-1])
        for start, index in zip(starts, self._blocks.allocate(Tier.HOT, len(starts)), strict=True):
            row.blocks.append(StoredBlock(start, Tier.HOT, index))
            row.taken.append(row.blocks[-1])
        row.sink_page = row.old_sink_page = row.sequence.sink_page
        if not self.geometry.sink_tokens or not row.new_tokens:
            return
        writes_sinks = row.sequence.length < self.geometry.sink_tokens
        old = row.sink_page
        if old is None:
            (row.sink_page,) = self._pages.allocate(Tier.SINK, 1)
        elif writes_sinks and self._pages.refs(Tier.SINK, old) > 1:
            (new,) = self._pages.allocate(Tier.SINK, 1)
            self.page_copies.append((old, new))
            row.sink_page = new

    def _age(
        self,
        own: list[tuple[list[StoredBlock], int]],
        others: list[tuple[list[StoredBlock], int]],
        allocator: BlockAllocator,
        num_holders: Callable[[StoredBlock], int],
    ) -> dict[StoredBlock, StoredBlock]:
        """Give each full block that every holder wants colder an id in the colder tier.

        Args:
            own: the blocks and the length after the step of each row of the step.
            others: the same of all other rows.
            allocator: of the blocks.
            num_holders: how many rows hold a block.
        """
        wanted: dict[StoredBlock, list[Tier]] = {}
        for blocks, length in own:
            for block in blocks:
                if not self._leaves(block, length):
                    tier = self._tier_of(block, length)
                    if tier > block.tier:
                        wanted.setdefault(block, []).append(tier)
        for blocks, length in others if wanted else ():
            for block in wanted.keys() & set(blocks):
                tier = self._tier_of(block, length)
                if tier > block.tier:
                    wanted[block].append(tier)
        moves = {}
        for block, tiers in wanted.items():
            if len(tiers) == num_holders(block):
                tier = min(tiers)  # the warmest that a holder asks for
                index = allocator.begin_replace(block.tier, block.index, tier)
                moves[block] = StoredBlock(block.start, tier, index)
        return moves

    def _age_offloaded(self) -> dict[StoredBlock, StoredBlock]:
        """Do the same for the blocks in CPU memory."""
        if self._host is None:
            return {}
        return self._age(
            [(row.sequence.offloaded, row.length) for row in self.rows],
            [(row.offloaded, row.length) for row in self._others],
            self._host.blocks,
            self._arena.num_holders_on_host,
        )

    def _tier_of(self, block: StoredBlock, length: int) -> Tier:
        return self.policy.tier_of(block.start + self.geometry.block_size, length)

    def _leaves(self, block: StoredBlock, length: int) -> bool:
        return self._release and self.geometry.is_released(block, length)

    def _kept(
        self,
        blocks: list[StoredBlock],
        length: int,
        conversions: Mapping[StoredBlock, StoredBlock],
        allocator: BlockAllocator,
    ) -> list[StoredBlock]:
        """Return what a row holds of some blocks after the step, and let go of the rest."""
        kept = []
        for block in blocks:
            leaves = self._leaves(block, length)
            if leaves or block in conversions:
                allocator.release(block.tier, block.index)
            if not leaves:
                kept.append(conversions.get(block, block))
        return kept

    def commit(self) -> None:
        """Make the step's result the state of the rows, and release what left."""
        for row in self.rows:
            kept = self._kept(row.blocks, row.length, self.conversions, self._blocks)
            for block in row.given_up:
                self._blocks.release(block.tier, block.index)
            if row.old_sink_page not in (None, row.sink_page):
                self._pages.release(Tier.SINK, row.old_sink_page)
            sequence, length = row.sequence, row.length
            if sequence.offloaded:
                sequence.offloaded = self._kept(
                    sequence.offloaded,
                    length,
                    self.offloaded_conversions,
                    self._arena.cpu_tier.blocks,
                )
            sequence.length, sequence.sink_page, sequence.blocks = length, row.sink_page, kept
            if self._release:
                sequence.forget_before(self.geometry.first_live(length))
        self._arena.convert(self.conversions, self._others)
        self._arena.convert_offloaded(self.offloaded_conversions, self._others)

    def rollback(self) -> None:
        """Release everything that the step took; the rows were never touched."""
        for new in self.conversions.values():
            _cancel(self._blocks, new)
        for new in self.offloaded_conversions.values():
            _cancel(self._arena.cpu_tier.blocks, new)
        for row in self.rows:
            for block in row.taken:
                self._blocks.release(block.tier, block.index)
            if row.sink_page is not None and row.sink_page != row.old_sink_page:
                self._pages.release(Tier.SINK, row.sink_page)

    @property
    def split_blocks(self) -> list[tuple[int, int | None]]:
        """Name the splits of the step where each reads one block: row, start of its block.

        None instead of a start is the sink page. Those of `host_tables` follow.
        """
        here: list[tuple[int, int | None]] = []
        there: list[tuple[int, int | None]] = []
        for i, row in enumerate(self.rows):
            here += [] if row.sink_page is None else [(i, None)]
            here += [(i, b.start) for t in BLOCK_TIERS for b in row.blocks if b.tier is t]
            there += [(i, b.start) for t in BLOCK_TIERS for b in row.recalled if b.tier is t]
        return here + there

    def tables(self, device: torch.device) -> DeviceTables:
        """Return the step's tensors on ``device``, sent there on first use."""
        if device not in self._devices:
            self._devices[device] = self._build_tables(device)
        return self._devices[device]

    def _build_tables(self, device: torch.device) -> DeviceTables:
        rows = [row.blocks for row in self.rows]
        arrays = tables_of_rows(
            rows,
            [row.sink_page for row in self.rows],
            [row.length for row in self.rows],
            [row.new_tokens for row in self.rows],
            self._split_size(blocks_of_rows(rows), device),
        )
        meta, convert = self._send(arrays, self.conversions, device)
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

    def _send(
        self, arrays: dict, conversions: Mapping[StoredBlock, StoredBlock], device: torch.device
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
            max_query_len=max((row.new_tokens for row in self.rows), default=0),
        )
        return meta, [(*p, ints[f"{p} from"], ints[f"{p} to"]) for p in sorted(pairs)]

    def host_tables(self) -> HostTables | None:
        """Return what the step does to blocks in CPU memory; None: nothing."""
        if self._host_tables is None and (
            self.offloaded_conversions or any(row.recalled for row in self.rows)
        ):
            rows = [row.recalled for row in self.rows]
            arrays = tables_of_rows(
                rows,
                [None] * len(rows),
                [row.length for row in self.rows],
                [row.new_tokens for row in self.rows],
                self._split_size(blocks_of_rows(rows), CPU),
            )
            self._host_tables = HostTables(*self._send(arrays, self.offloaded_conversions, CPU))
        return self._host_tables

    def _sink_offsets(self) -> np.ndarray | None:
        """Return ``min(window - position, 0)`` of each query; None when all are 0."""
        window = self.geometry.window_size
        if window is None or all(row.length <= window + 1 for row in self.rows):
            return None
        positions = [np.arange(row.sequence.length, row.length) for row in self.rows]
        return np.minimum(window - np.concatenate(positions), 0).astype(np.float32)

    def _token_arrays(self) -> dict[str, np.ndarray]:
        """Build the int64 arrays that are indexed by token."""
        geometry = self.geometry
        slots, sinks = [], []
        for row in self.rows:
            old, new = row.sequence.length, row.new_tokens
            slots.append(slots_of_row(row.blocks, geometry, old, new))
            sinks.append(sink_slots_of_row(row.sink_page, geometry.sink_tokens, old, new))
        arrays = {"slots": np.concatenate(slots), "sink_slots": np.concatenate(sinks)}
        if (arrays["sink_slots"] < 0).all():
            del arrays["sink_slots"]
        if self.valid is not None:
            index = np.flatnonzero(self.valid)
            for name, packed in arrays.items():
                arrays[name] = np.full(self.valid.size, -1, np.int64)
                arrays[name][index] = packed
            arrays["token_index"] = index
        return arrays


def _cancel(allocator: BlockAllocator, block: StoredBlock) -> None:
    while allocator.refs(block.tier, block.index):
        allocator.release(block.tier, block.index)
