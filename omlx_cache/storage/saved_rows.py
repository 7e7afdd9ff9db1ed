"""The rows of a layer group, described for a file: which blocks they hold, and where those lie.

Ids are renumbered without gaps. A block that several rows hold is described once for each and
stored once, and shared again when it is restored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from omlx_cache.sequences import Sequence, StoredBlock
from omlx_kernels.layout import BLOCK_TIERS, Tier

if TYPE_CHECKING:
    from omlx_cache.layer_group import LayerGroup

DEVICE, CPU = "device", "cpu"
Space = tuple[str, Tier]
"""Where an id of a block means something: the place, and the tier."""


@dataclass(frozen=True)
class Contents:
    """What a group stores, renumbered without gaps.

    Attributes:
        places: for each space, the ids that are in use, in order -> where they are stored.
        filled: tokens in each (space, physical id): the rest of a block is stored as zeros.
    """

    places: dict[Space, dict[int, int]]
    filled: dict[tuple[Space, int], int]


def contents_of(group: LayerGroup) -> Contents:
    filled: dict[tuple[Space, int], int] = {}
    size, sinks = group.geometry.block_size, group.geometry.sink_tokens
    for row in group.rows:
        held = [(((DEVICE, b.tier), b.index), min(size, row.length - b.start)) for b in row.blocks]
        held += [(((CPU, b.tier), b.index), size) for b in row.offloaded]
        if row.sink_page is not None:
            held.append((((DEVICE, Tier.SINK), row.sink_page), min(sinks, row.length)))
        for block, tokens in held:
            filled[block] = max(tokens, filled.get(block, 0))
    places: dict[Space, dict[int, int]] = {(DEVICE, Tier.SINK): {}}
    for space, index in sorted(filled):
        own = places.setdefault(space, {})
        own[index] = len(own)
    return Contents(places, filled)


def describe_rows(group: LayerGroup, contents: Contents) -> dict:
    def described(place: str, blocks: list[StoredBlock]) -> list:
        return [
            [b.start, place, b.tier.name, contents.places[place, b.tier][b.index]] for b in blocks
        ]

    rows = [
        {
            "length": row.length,
            "sink_page": None
            if row.sink_page is None
            else contents.places[DEVICE, Tier.SINK].get(row.sink_page),
            "blocks": [*described(DEVICE, row.blocks), *described(CPU, row.offloaded)],
            "dropped": sorted(row.dropped),
            "whole": row.whole,
            "mass": sorted(row.mass.items()),
        }
        for row in group.rows
    ]
    return {"keep_past": group.keep_past, "rows": rows}


def restore_rows(group: LayerGroup, described: dict) -> dict[Space, list[int]]:
    """Take blocks for what the rows hold, once each, and share those that several rows name.

    Returns:
        for each space the ids that were taken: what is stored at ``i`` belongs into ``ids[i]``.
    """
    rows, host = described["rows"], group.arena.host
    allocators = {DEVICE: group.blocks, CPU: group.blocks if host is None else host.blocks}
    blocks = {(place, Tier[tier], at) for row in rows for _, place, tier, at in row["blocks"]}
    pages = {row["sink_page"] for row in rows} - {None}
    ids: dict[Space, list[int]] = {}
    for place in (DEVICE, CPU):
        counts = {t: sum((each, own) == (place, t) for each, own, _ in blocks) for t in BLOCK_TIERS}
        allocators[place].require(sum(counts.values()))
        for tier, count in counts.items():
            ids[place, tier] = allocators[place].allocate(tier, count)
    ids[DEVICE, Tier.SINK] = group.pages.allocate(Tier.SINK, len(pages))
    shared = set()
    for row in rows:
        held: dict[str, list[StoredBlock]] = {DEVICE: [], CPU: []}
        for start, place, tier, at in sorted(row["blocks"]):
            own = held[place if host is not None else DEVICE]
            own.append(StoredBlock(start, Tier[tier], ids[place, Tier[tier]][at]))
        page = None
        if row["sink_page"] is not None:
            page = ids[DEVICE, Tier.SINK][row["sink_page"]]
        restored = Sequence(row["length"], page, held[DEVICE], held[CPU])
        restored.dropped, restored.mass = set(row["dropped"]), dict(row["mass"])
        restored.whole = row.get("whole", 0 if row["dropped"] else None)  # not in older files
        group.rows.append(restored)
        named = [(allocators[place], b.tier, b.index) for place in held for b in held[place]]
        if page is not None:
            named.append((group.pages, Tier.SINK, page))
        for allocator, tier, index in named:
            if (id(allocator), tier, index) in shared:
                allocator.share(tier, index)
            shared.add((id(allocator), tier, index))
    group.keep_past = described["keep_past"]
    return ids
