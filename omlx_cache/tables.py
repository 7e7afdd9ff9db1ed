"""From rows of stored blocks to the tensors that a launch reads.

Everything is computed with numpy on the host, packed into one buffer and sent to a device in one
copy. Each table starts at a multiple of 16 bytes in the buffer, so that the kernels' pointers
always have the alignment that they were compiled for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from omlx_cache.sequences import Geometry, StoredBlock
from omlx_kernels.layout import BLOCK_TIERS, Tier

_ALIGNMENT = 4  # int32 elements in 16 bytes


def tables_of_rows(
    rows: Sequence[Sequence[StoredBlock]],
    sink_pages: Sequence[int | None],
    lengths: Sequence[int],
    new_tokens: Sequence[int],
    blocks_per_split: int,
) -> dict[str, np.ndarray]:
    """Build the int32 tables of `AttentionMetadata`, by field name.

    Args:
        rows: each sequence's live blocks, the new ones included.
        sink_pages: each sequence's page; None where it has none, which is listed as -1.
        lengths: tokens of each sequence, the new ones included.
        new_tokens: how many of them are new (queries).
        blocks_per_split: blocks that one decode split reads at most.
    """
    width = max([len(row) for row in rows], default=0) or 1
    table = np.zeros((len(rows), width), np.int32)
    starts = np.zeros_like(table)
    bounds = np.zeros((len(rows), len(BLOCK_TIERS) + 1), np.int32)
    splits: list[tuple[int, int, int, int]] = []
    split_starts = [0]
    for seq, row in enumerate(rows):
        if sink_pages[seq] is not None:
            splits.append((seq, int(Tier.SINK), 0, 1))
        entry = 0
        for i, tier in enumerate(BLOCK_TIERS):
            listed = [block for block in row if block.tier is tier]
            stop = entry + len(listed)
            table[seq, entry:stop] = [block.index for block in listed]
            starts[seq, entry:stop] = [block.start for block in listed]
            for first in range(entry, stop, blocks_per_split):
                splits.append((seq, int(tier), first, min(first + blocks_per_split, stop)))
            bounds[seq, i + 1] = entry = stop
        split_starts.append(len(splits))
    return {
        "block_table": table,
        "block_starts": starts,
        "tier_starts": bounds,
        "sink_pages": np.array([-1 if p is None else p for p in sink_pages], np.int32),
        "seq_lens": np.asarray(lengths, np.int32),
        "query_start_loc": np.concatenate([[0], np.cumsum(new_tokens)]).astype(np.int32),
        "splits": np.asarray(splits, np.int32).reshape(-1, 4),
        "split_starts": np.asarray(split_starts, np.int32),
    }


def blocks_of_rows(rows: Sequence[Sequence[StoredBlock]]) -> list[int]:
    """Return how many blocks each row has in each tier, row by row."""
    counts = [Counter(block.tier for block in row) for row in rows]
    return [count[tier] for count in counts for tier in BLOCK_TIERS]


def slots_of_row(
    blocks: Sequence[StoredBlock], geometry: Geometry, length: int, new_tokens: int
) -> np.ndarray:
    """Return the hot slot of each new token of a sequence of ``length`` old tokens; -1: a sink."""
    positions = np.arange(length, length + new_tokens)
    size, origin = geometry.block_size, geometry.sink_tokens
    hot = {block.start: block.index for block in blocks if block.tier is Tier.HOT}
    starts = (positions - origin) // size * size + origin
    slots = np.full(new_tokens, -1, np.int64)
    for start in range(*_start_range(starts, positions, origin, size)):
        chosen = (starts == start) & (positions >= origin)
        slots[chosen] = hot[start] * size + (positions[chosen] - start)
    return slots


def _start_range(
    starts: np.ndarray, positions: np.ndarray, origin: int, size: int
) -> tuple[int, int, int]:
    """Return range() arguments over the distinct block starts of the non-sink positions."""
    stored = starts[positions >= origin]
    return (int(stored[0]), int(stored[-1]) + 1, size) if stored.size else (0, 0, size)


def sink_slots_of_row(
    page: int | None, sink_tokens: int, length: int, new_tokens: int
) -> np.ndarray:
    """Return the slot in the sink pages of each new token; -1: not a sink."""
    positions = np.arange(length, length + new_tokens)
    if page is None:
        return np.full(new_tokens, -1, np.int64)
    return np.where(positions < sink_tokens, page * sink_tokens + positions, -1)


def send(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, torch.Tensor]:
    """Copy arrays of one dtype to ``device`` in a single transfer, each 16-byte aligned."""
    sizes = [-(-array.size // _ALIGNMENT) * _ALIGNMENT for array in arrays.values()]
    dtype = next(iter(arrays.values())).dtype
    packed = torch.from_numpy(np.zeros(sum(sizes), dtype))
    offset = 0
    for array, size in zip(arrays.values(), sizes, strict=True):
        packed.numpy()[offset : offset + array.size] = array.ravel()
        offset += size
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    else:
        packed = packed.to(device)
    pieces = packed.split(sizes)
    return {
        name: piece[: array.size].view(array.shape)
        for (name, array), piece in zip(arrays.items(), pieces, strict=True)
    }
