"""Blocks that age, move to CPU memory, come under a bound and are dropped: a state machine.

It mirrors each row as a plain list of numbers. Instead of keys, the pools hold the number of a
token, so a block that is lost, mixed up with another one, or converted wrongly shows. ``make
stress`` runs it for minutes, with 64 rows.
"""

from __future__ import annotations

import copy
import os
from collections import Counter

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from omlx_cache.block_arena import BlockArena
from omlx_cache.block_pool import LayerPool, MemoryMeter, copy_blocks
from omlx_cache.host_tier import HostTier
from omlx_cache.layer_group import LayerGroup
from omlx_cache.paged_layer import convert
from omlx_cache.policy.eviction import EvictionPolicy
from omlx_cache.policy.tiering import TierPolicy
from omlx_cache.sequences import Geometry, Sequence
from omlx_kernels.errors import OutOfBlocksError
from omlx_kernels.layout import BlockFormat, Tier
from omlx_kernels.quantization import read_blocks

SIZE, DIM = 64, 32
CPU = torch.device("cpu")
RANGES = {
    "16 bits": (),
    "8 bits": ((Tier.K8V8, None),),
    "tiers": ((Tier.K8V8, 64), (Tier.K8V4, 128), (Tier.K4V4, None)),
}
LONG = bool(os.environ.get("OMLX_STRESS"))
MAX_ROWS = 64 if LONG else 4


def numbers(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.uniform(-1, 1, count).astype(np.float32)


def worst_error(tier: Tier) -> float:
    """Return by how much a key may be off: a step of each tier that it has been through.

    A block is rounded with all that it holds, and may be cut to a single token afterwards: so the
    steps are those of the widest block that `numbers` can fill.
    """
    eight, four = 2.0 / 255, 2.0 / 15
    return {Tier.HOT: 0.0, Tier.K8V8: eight, Tier.K8V4: eight, Tier.K4V4: eight + four}[tier]


class TiersMachine(RuleBasedStateMachine):
    @initialize(
        sinks=st.sampled_from([0, 4]),
        window=st.none() | st.integers(200, 600),
        recent=st.sampled_from([0, 70]),
        ranges=st.sampled_from(sorted(RANGES)),
        room=st.sampled_from([None, 4, 5, 6, 9]),
        host=st.sampled_from(["none", "unbounded", "unbounded", 3, 8]),
        ranking=st.sampled_from(["oldest", "topk", "random"]),
        drops=st.booleans(),
        ratio=st.sampled_from([0.0, 0.0, 0.4]),
        recall=st.none() | st.integers(1, 3),
        seed=st.integers(0, 99),
    )
    def start(self, sinks, window, recent, ranges, room, host, ranking, drops, ratio, recall, seed):
        self.rng = np.random.default_rng(seed)
        if host != "none":
            bound = None if host == "unbounded" else host * MAX_ROWS // 4
            host = HostTier(bound, keeps_bounds=recall is not None)
        else:
            host = None
        room = room and room * MAX_ROWS // 4
        self.group = LayerGroup(
            Geometry(SIZE, sinks, window),
            keep_sinks=True,
            policy=TierPolicy(recent, RANGES[ranges]),
            arena=BlockArena(room, host),
            eviction=EvictionPolicy(ranking, drops or bool(ratio), ratio, recent),
            recall=recall,
        )
        block_format = BlockFormat(SIZE, sinks, 1, DIM, torch.float32)
        self.group.arena.pools[0] = LayerPool(block_format, CPU, MemoryMeter())
        self.texts = [np.zeros(0, np.float32)]
        self.group.rows = [Sequence()]
        self.can_be_warm = False
        for length in (100, 130, 90, 1, 60):
            self.step([length])

    @rule(data=st.data(), steps=st.integers(1, 5), longest=st.sampled_from([5, 70, 150]))
    def grow(self, data, steps, longest):
        for _ in range(steps):
            self.step([data.draw(st.integers(0, longest)) for _ in self.texts])

    @rule(data=st.data())
    def fail(self, data):
        self.step([data.draw(st.integers(0, 100)) for _ in self.texts], undo=True)

    def step(self, new, undo=False):
        before = self.described()
        try:
            self.group.require([new])
        except OutOfBlocksError:
            assert self.described() == before
            if not self.is_shared():
                return
        try:
            self.group.begin(new, None)
        except OutOfBlocksError:
            assert self.is_shared(), "require promised that there is room"
            return
        fresh = [numbers(self.rng, n) for n in new]
        self.write(np.concatenate(fresh))
        if undo:
            self.group.rollback()
            return
        self.group.commit()
        self.group.prune()
        self.can_be_warm = False
        self.texts = [np.concatenate(pair) for pair in zip(self.texts, fresh, strict=True)]

    def write(self, values: np.ndarray) -> None:
        """Do what a layer does in a step."""
        group, step, arena = self.group, self.group.step, self.group.arena
        pool = arena.pools[0]
        pool.fit(arena.capacity())
        tables, there = step.tables(CPU), step.host_tables()
        copy_blocks(pool.blocks.hot, step.copies)
        copy_blocks(pool.blocks.sink, step.page_copies)
        keys = torch.from_numpy(values)
        for blocks, slots in (
            (pool.blocks.hot, tables.slots),
            (pool.blocks.sink, tables.sink_slots),
        ):
            for token, slot in enumerate([] if slots is None else slots.tolist()):
                if slot >= 0:
                    blocks.k[slot // blocks.k.shape[2], 0, slot % blocks.k.shape[2]] = keys[token]
                    blocks.v[slot // blocks.k.shape[2], 0, slot % blocks.k.shape[2]] = keys[token]
        if group.mass is not None:
            shares = self.rng.uniform(size=(len(step.split_blocks), 1)).astype(np.float32)
            group.mass.add(torch.from_numpy(shares))
        if group.promise is not None:
            group.promise.add(0, torch.from_numpy(keys.numpy()[:, None, None].repeat(DIM, 2)), 1.0)
        convert(pool.blocks, tables.convert)
        if there is not None:
            for row in step.rows:
                assert set(row.recalled) <= set(row.sequence.offloaded)
            convert(arena.host.fitted(0).blocks, there.convert)

    @precondition(lambda self: len(self.texts) <= MAX_ROWS)
    @rule(data=st.data())
    def fork(self, data):
        count = len(self.texts)
        chosen = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=MAX_ROWS))
        self.group.select(chosen)
        self.texts = [self.texts[i] for i in chosen]
        self.can_be_warm = True

    @rule(data=st.data())
    def crop(self, data):
        removed = [data.draw(st.integers(0, min(len(text), 200))) for text in self.texts]
        before = self.described()
        try:
            self.group.check_crop(removed)
        except ValueError:
            assert self.described() == before
            return
        except OutOfBlocksError:
            return
        self.group.crop(removed)
        self.texts = [t[: len(t) - n] for t, n in zip(self.texts, removed, strict=True)]
        self.can_be_warm = True

    @rule(keep=st.booleans())
    def keep_past(self, keep):
        self.group.keep_past = keep

    @rule()
    def copied(self):
        self.group = copy.deepcopy(self.group)

    def teardown(self):
        if hasattr(self, "group"):
            self.group.clear()
            assert self.group.blocks.num_used == self.group.pages.num_used == 0
            if self.group.arena.host is not None:
                assert self.group.arena.host.blocks.num_used == 0

    def is_shared(self) -> bool:
        held = [(b.tier, b.index) for row in self.group.rows for b in row.blocks]
        return len(held) > len(set(held))

    def described(self):
        return copy.deepcopy(self.group.rows)

    @precondition(lambda self: hasattr(self, "group"))
    @invariant()
    def every_row_finds_its_tokens(self):
        for row, text in zip(self.group.rows, self.texts, strict=True):
            assert row.length == len(text)
            geometry, arena = self.group.geometry, self.group.arena
            present = [*row.blocks, *row.offloaded]
            starts = sorted([*(block.start for block in present), *row.dropped])
            needed = range(geometry.first_live(len(text)), len(text), SIZE)
            assert starts == sorted(set(starts))
            assert set(needed) <= set(starts)
            for block in present:
                pools = arena.pools if block in row.blocks else arena.host.pools
                keys, _ = read_blocks(
                    pools[0].blocks.tier(block.tier), block.tier, [block.index], torch.float32
                )
                expected = text[block.start : block.start + SIZE]
                found = keys[0, 0, : len(expected), 0].numpy()
                # A block that was cut and filled again has been rounded before.
                twice = 3 if self.can_be_warm else 2
                tiers = [Tier.HOT, *(tier for tier, _ in self.group.policy.ranges)]
                bound = max(map(worst_error, tiers))
                assert np.abs(found - expected).max() <= bound * twice + 1e-6
            if row.sink_page is not None:
                page = arena.pools[0].blocks.sink.k[row.sink_page, 0, :, 0].numpy()
                sinks = text[: geometry.sink_tokens]
                assert (page[: len(sinks)] == sinks).all()

    @precondition(lambda self: hasattr(self, "group"))
    @invariant()
    def every_block_has_as_many_holders_as_rows_that_list_it(self):
        arena = self.group.arena
        kinds = [(arena.blocks, "blocks")]
        if arena.host is not None:
            kinds.append((arena.host.blocks, "offloaded"))
        else:
            assert not any(row.offloaded for row in self.group.rows)
        for allocator, name in kinds:
            held = Counter((b.tier, b.index) for row in self.group.rows for b in getattr(row, name))
            assert allocator.num_used == len(held)
            assert allocator.max_blocks is None or allocator.num_used <= allocator.max_blocks
            for (tier, index), holders in held.items():
                assert allocator.refs(tier, index) == holders

    @precondition(lambda self: hasattr(self, "group"))
    @invariant()
    def what_is_pruned_is_old_and_no_more_than_asked_for(self):
        policy, geometry = self.group._evictor.policy, self.group.geometry
        for row in self.group.rows:
            if not policy.drops:
                assert not row.dropped
            if policy.prune_ratio and not self.can_be_warm and not self.is_shared():
                old = policy.num_old(geometry, row.length)
                assert len(row.dropped) >= int(policy.prune_ratio * old) or self.group.keep_past


TestTiersMachine = TiersMachine.TestCase
TestTiersMachine.settings = settings(
    max_examples=400 if LONG else 60,
    stateful_step_count=60 if LONG else 25,
    suppress_health_check=list(HealthCheck),
)
