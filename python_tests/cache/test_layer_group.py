"""`LayerGroup` as a state machine: steps, rollbacks, forks and crops against plain lengths."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from omlx_cache.block_arena import BlockArena
from omlx_cache.layer_group import LayerGroup
from omlx_cache.policy.tiering import TierPolicy
from omlx_cache.sequences import Geometry, Sequence
from omlx_kernels.errors import OutOfBlocksError
from omlx_kernels.layout import BLOCK_TIERS, Tier

SIZE = 64


ONE = ((Tier.K8V8, None),)
ALL = ((Tier.K8V8, 64), (Tier.K8V4, 100), (Tier.K4V4, None))


def new_group(sinks=4, window=None, recent=0, max_blocks=None, ranges=ONE) -> LayerGroup:
    return LayerGroup(
        Geometry(SIZE, sinks, window),
        keep_sinks=True,
        policy=TierPolicy(recent, ranges),
        arena=BlockArena(max_blocks),
    )


class GroupMachine(RuleBasedStateMachine):
    """Knows of each row only its length, and what must follow from it."""

    @initialize(
        sinks=st.sampled_from([0, 4, 64]),
        window=st.none() | st.integers(65, 300),
        recent=st.sampled_from([0, 128]),
        max_blocks=st.none() | st.integers(6, 20),
        rows=st.integers(1, 3),
        ranges=st.sampled_from([(), ONE, ALL]),
    )
    def start(self, sinks, window, recent, max_blocks, rows, ranges):
        self.group = new_group(sinks, window, recent, max_blocks, ranges)
        self.group.rows = [Sequence() for _ in range(rows)]
        self.lengths = [0] * rows
        self.reopened = False  # whether a block may be warmer than its age until the next step

    def snapshot(self):
        return [(r.length, r.sink_page, list(r.blocks)) for r in self.group.rows]

    @rule(data=st.data(), undo=st.booleans())
    def step(self, data, undo):
        new = [data.draw(st.integers(0, 150)) for _ in self.lengths]
        before, used = self.snapshot(), self.group.blocks.num_used
        try:
            self.group.begin(new, None)
        except OutOfBlocksError as raised:
            error = raised
        else:
            error = None
        if error is not None:
            assert error.free == self.group.blocks.max_blocks - used
            assert error.needed > error.free
            assert (self.snapshot(), self.group.blocks.num_used) == (before, used)
            return
        tables = self.group.step.tables(_cpu())
        self.check_slots(tables, new)
        if undo:
            self.group.rollback()
            assert (self.snapshot(), self.group.blocks.num_used) == (before, used)
        else:
            self.group.commit()
            self.lengths = [n + m for n, m in zip(self.lengths, new, strict=True)]

    def check_slots(self, tables, new):
        """Every new token has exactly one place, and no two tokens share one."""
        slots = tables.slots.tolist()
        sinks = [-1] * len(slots) if tables.sink_slots is None else tables.sink_slots.tolist()
        assert all((a < 0) != (b < 0) for a, b in zip(slots, sinks, strict=True))
        assert len(slots) == sum(new)
        for kind in (slots, sinks):
            used = [slot for slot in kind if slot >= 0]
            assert len(used) == len(set(used))
        listed = {
            int(tables.meta.block_table[row, entry])
            for row in range(len(new))
            for entry in range(
                int(tables.meta.tier_starts[row, 0]), int(tables.meta.tier_starts[row, 1])
            )
        }
        assert {slot // SIZE for slot in slots if slot >= 0} <= listed

    @precondition(lambda self: len(self.lengths) <= 4)
    @rule(data=st.data())
    def select(self, data):
        count = len(self.lengths)
        chosen = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=4))
        self.group.select(chosen)
        self.reopened = True  # what another row kept warm ages at the next step only
        self.lengths = [self.lengths[i] for i in chosen]

    @rule(keep=st.booleans())
    def keep_past(self, keep):
        self.group.keep_past = keep

    @rule(data=st.data())
    def crop(self, data):
        removed = [data.draw(st.integers(0, n)) for n in self.lengths]
        before, used = self.snapshot(), self.group.blocks.num_used
        try:
            self.group.check_crop(removed)
        except (ValueError, OutOfBlocksError):
            assert (self.snapshot(), self.group.blocks.num_used) == (before, used)
            return
        self.group.crop(removed)
        self.reopened = True  # shorter rows: blocks are colder than their age, or re-opened
        self.lengths = [n - m for n, m in zip(self.lengths, removed, strict=True)]

    @invariant()
    def rows_list_what_a_query_can_see(self):
        if not hasattr(self, "group"):
            return
        geometry = self.group.geometry
        assert [row.length for row in self.group.rows] == self.lengths
        for row in self.group.rows:
            starts = [block.start for block in row.blocks]
            released = geometry.num_released(row.length)
            first = geometry.sink_tokens + released * SIZE
            needed = list(range(first, max(first, row.length), SIZE))
            assert starts[-len(needed) :] == needed if needed else True
            assert starts == sorted(set(starts))
            for block in row.blocks:
                partial = block.start + SIZE > row.length
                assert block.tier is Tier.HOT or not partial
                wanted = self.group.policy.tier_of(block.start + SIZE, row.length)
                refs = self.group.blocks.refs(block.tier, block.index)
                assert refs > 1 or block.tier >= wanted or self.reopened

    @invariant()
    def every_block_has_as_many_holders_as_rows_that_list_it(self):
        if not hasattr(self, "group"):
            return
        blocks = Counter((b.tier, b.index) for row in self.group.rows for b in row.blocks)
        assert self.group.blocks.num_used == len(blocks)
        for (tier, index), holders in blocks.items():
            assert self.group.blocks.refs(tier, index) == holders
        pages = Counter(r.sink_page for r in self.group.rows if r.sink_page is not None)
        assert self.group.pages.num_used == len(pages)
        for page, holders in pages.items():
            assert self.group.pages.refs(Tier.SINK, page) == holders


def _cpu():
    return torch.device("cpu")


TestGroupMachine = GroupMachine.TestCase
TestGroupMachine.settings = settings(max_examples=60, stateful_step_count=25)


def test_a_step_can_be_undone_past_the_window_while_the_past_is_kept():
    group = new_group(window=100)
    group.rows = [Sequence()]
    for new in (500, 90):
        group.keep_past = new == 90
        group.begin([new], None)
        group.commit()
    before = len(group.rows[0].blocks)
    group.check_crop([90])
    group.crop([0])  # nothing to undo: what the window left behind goes now
    assert len(group.rows[0].blocks) < before
    with pytest.raises(ValueError, match="activate_past_recording"):
        group.check_crop([90])


@pytest.mark.parametrize("recent", [0, 1, 64, 128])
def test_a_full_block_ages_when_it_leaves_the_recent_tokens(recent):
    group = new_group(recent=recent)
    group.rows = [Sequence()]
    for _ in range(4 + 64 + recent - 1):
        group.begin([1], None)
        group.commit()
    assert group.rows[0].blocks[0].tier is Tier.HOT
    group.begin([1], None)
    assert [block.index for block in group.step.conversions] == [0]
    group.commit()
    assert group.rows[0].blocks[0].tier is Tier.K8V8


def test_padding_gets_no_slot():
    group = new_group(sinks=1)
    group.rows = [Sequence(), Sequence()]
    valid = np.array([[False, True, True], [True, True, True]])
    group.begin([2, 3], valid)
    tables = group.step.tables(_cpu())
    assert tables.slots.tolist() == [-1, -1, 0, -1, 64, 65]
    assert tables.sink_slots.tolist() == [-1, 0, -1, 1, -1, -1]
    assert tables.token_index.tolist() == [1, 2, 3, 4, 5]
    assert tables.meta.query_start_loc.tolist() == [0, 2, 5]


@pytest.mark.parametrize("chunks", [[300], [64] * 5, [1] * 70, [200, 1, 1, 100]])
@pytest.mark.parametrize("window", [None, 65, 130])
def test_require_is_exact(chunks, window):
    """`require` refuses exactly the step sequences in which some step would run out."""
    for max_blocks in range(1, 8):
        group = new_group(window=window, max_blocks=max_blocks)
        group.rows = [Sequence()]
        try:
            group.require([[n] for n in chunks])
            fits = True
        except OutOfBlocksError:
            fits = False
        survived = True
        for n in chunks:
            try:
                group.begin([n], None)
            except OutOfBlocksError:
                survived = False
                break
            group.commit()
        assert fits == survived


def test_blocks_walk_down_the_tiers_as_they_age():
    group = new_group(ranges=ALL)
    group.rows = [Sequence()]
    seen = []
    for _ in range(40):
        group.begin([10], None)
        group.commit()
        if group.rows[0].blocks:
            seen.append(group.rows[0].blocks[0].tier)
    assert list(dict.fromkeys(seen)) == [Tier.HOT, Tier.K8V8, Tier.K8V4, Tier.K4V4]
    assert [b.tier for b in group.rows[0].blocks] == sorted(
        (b.tier for b in group.rows[0].blocks), reverse=True
    )


def test_several_tiers_convert_in_one_step():
    group = new_group(ranges=ALL)
    group.rows = [Sequence()]
    for new in (200, 200):
        group.begin([new], None)
        pairs = [(old, cold) for old, cold, *_ in group.step.tables(_cpu()).convert]
        group.commit()
    assert pairs == sorted(set(pairs))
    assert (Tier.HOT, Tier.K8V8) in pairs
    assert any(old is not Tier.HOT for old, _ in pairs)


def test_splits_are_sized_for_a_gpu_and_cover_each_tier_once(monkeypatch):
    from omlx_cache import layer_group

    group = new_group()
    group.rows = [Sequence(), Sequence()]
    group.begin([64 * 40, 70], None)
    group.commit()
    pool = SimpleNamespace(format=SimpleNamespace(num_kv_heads=8))
    group.arena.pools = {0: pool}
    monkeypatch.setattr(layer_group, "num_multiprocessors", lambda device: 82)
    size = group._split_size([40, 1], torch.device("cuda"))
    assert 1 <= size < 40
    monkeypatch.setattr(group, "_split_size", lambda blocks, device: size)
    group.begin([1, 1], None)
    meta = group.step.tables(_cpu()).meta
    group.step.rollback()
    covered = []
    for seq, tier, first, last in meta.splits.tolist():
        if tier != Tier.SINK:
            assert last - first <= size
            bounds = meta.tier_starts[seq, BLOCK_TIERS.index(tier) :].tolist()
            assert bounds[0] <= first < last <= bounds[1]
            covered += [(seq, entry) for entry in range(first, last)]
    entries = [(s, e) for s in range(2) for e in range(int(meta.tier_starts[s, -1]))]
    assert covered == entries
    assert meta.split_starts.tolist()[-1] == len(meta.splits)
