"""One step of one layer group as a transaction: planned on the host, then committed or undone.

While a step runs, the rows of the group are as they were: new tokens go to slots that no table
lists yet, converted blocks go to ids that no table lists yet, and what leaves is released only by
`StepPlan.commit`. So `StepPlan.rollback` (an interrupt, an error in some layer) restores the
cache exactly, whichever layers had already run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from omlx_cache.block_arena import BlockArena
from omlx_cache.policy.choice import Policy
from omlx_cache.sequences import Geometry, Sequence, StoredBlock
from omlx_cache.tables import (
    blocks_of_rows,
    send,
    sink_slots_of_row,
    slots_of_row,
    tables_of_rows,
)
from omlx_kernels.layout import Tier
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
class RowPlan:
    """What a step does to one sequence."""

    sequence: Sequence
    new_tokens: int
    blocks: list[StoredBlock] = field(default_factory=list)  # during the step
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
    ) -> None:
        self._release = release
        self.geometry, self.policy, self.valid = geometry, policy, valid
        self._arena, self._others = arena, others
        self._blocks, self._pages = arena.blocks, arena.pages
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
        self.conversions = self._age()

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

    def _age(self) -> dict[StoredBlock, StoredBlock]:
        """Give each full block that every holder wants colder an id in the colder tier."""
        wanted: dict[StoredBlock, list[Tier]] = {}
        for row in self.rows:
            for block in row.blocks:
                if not self._leaves(block, row):
                    tier = self.policy.tier_of(block.start + self.geometry.block_size, row.length)
                    if tier > block.tier:
                        wanted.setdefault(block, []).append(tier)
        for sequence in self._others if wanted else ():
            for block in wanted.keys() & set(sequence.blocks):
                tier = self.policy.tier_of(block.start + self.geometry.block_size, sequence.length)
                if tier > block.tier:
                    wanted[block].append(tier)
        moves = {}
        for block, tiers in wanted.items():
            if len(tiers) == self._arena.num_holders(block):
                tier = min(tiers)  # the warmest that a holder asks for
                index = self._blocks.begin_replace(block.tier, block.index, tier)
                moves[block] = StoredBlock(block.start, tier, index)
        return moves

    def _leaves(self, block: StoredBlock, row: RowPlan) -> bool:
        return self._release and self.geometry.is_released(block, row.length)

    def commit(self) -> None:
        """Make the step's result the state of the rows, and release what left."""
        for row in self.rows:
            kept = []
            for block in row.blocks:
                if self._leaves(block, row):
                    self._blocks.release(block.tier, block.index)
                elif block in self.conversions:
                    kept.append(self.conversions[block])
                    self._blocks.release(block.tier, block.index)
                else:
                    kept.append(block)
            for block in row.given_up:
                self._blocks.release(block.tier, block.index)
            if row.old_sink_page not in (None, row.sink_page):
                self._pages.release(Tier.SINK, row.old_sink_page)
            sequence = row.sequence
            sequence.length, sequence.sink_page, sequence.blocks = row.length, row.sink_page, kept
        self._arena.convert(self.conversions, self._others)

    def rollback(self) -> None:
        """Release everything that the step took; the rows were never touched."""
        for new in self.conversions.values():
            while self._blocks.refs(new.tier, new.index):
                self._blocks.release(new.tier, new.index)
        for row in self.rows:
            for block in row.taken:
                self._blocks.release(block.tier, block.index)
            if row.sink_page is not None and row.sink_page != row.old_sink_page:
                self._pages.release(Tier.SINK, row.sink_page)

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
        names = list(arrays)
        pairs = {(old.tier, new.tier) for old, new in self.conversions.items()}
        for pair in pairs:
            moves = [m for m in self.conversions.items() if (m[0].tier, m[1].tier) == pair]
            arrays[f"{pair} from"] = np.array([old.index for old, _ in moves], np.int32)
            arrays[f"{pair} to"] = np.array([new.index for _, new in moves], np.int32)
        ints = send(arrays, device)
        longs = send(self._token_arrays(), device)
        meta = AttentionMetadata(
            **{name: ints[name] for name in names},
            max_query_len=max((row.new_tokens for row in self.rows), default=0),
        )
        convert = [(*p, ints[f"{p} from"], ints[f"{p} to"]) for p in sorted(pairs)]
        offsets = self._sink_offsets()
        return DeviceTables(
            meta=meta,
            slots=longs["slots"],
            sink_slots=longs.get("sink_slots"),
            token_index=longs.get("token_index"),
            convert=convert,
            sink_offsets=None if offsets is None else send({"": offsets}, device)[""],
        )

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
