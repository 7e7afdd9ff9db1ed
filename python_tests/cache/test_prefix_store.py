"""The prefix store as a state machine: whatever happens, a row finds the tokens that it read.

Instead of keys, a pool holds the number that a token's *text so far* has: a block that were reused
behind another text, written to while somebody else holds it, or moved without its holders, shows.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from omlx_cache.block_pool import LayerPool, copy_blocks
from omlx_cache.config import CacheConfig
from omlx_cache.layer_group import LayerGroup
from omlx_cache.policy.eviction import EvictionPolicy
from omlx_cache.policy.tiering import TierPolicy
from omlx_cache.prefix_store import PrefixStore
from omlx_cache.sequences import Geometry, Sequence
from omlx_kernels.errors import OutOfBlocksError
from omlx_kernels.layout import BLOCK_TIERS, BlockFormat, Tier

SIZE = 64
WINDOWS = {"full": None, "window": 90}


def numbers(ids: np.ndarray) -> np.ndarray:
    """Return for each token a number, exact in float32, that depends on all tokens up to it."""
    found, state = [], 1
    for token in ids.tolist():
        state = (state * 31 + token + 7) % 65521
        found.append(state)
    return np.array(found, np.float32)


class StoreMachine(RuleBasedStateMachine):
    """Chats over two tokens, so that they begin alike again and again."""

    @initialize(
        sinks=st.sampled_from([0, 4]),
        kept=st.none() | st.integers(1, 8),
        room=st.sampled_from([None, 4, 6, 6, 8, 12]),
        kinds=st.sampled_from([["full"], ["window"], ["full", "window"]]),
        host=st.sampled_from(["none", "unbounded", "unbounded", 2, 6]),
        pruning=st.sampled_from([None, None, "oldest", "random"]),
        recall=st.none() | st.integers(1, 3),
    )
    def start(self, sinks, kept, room, kinds, host, pruning, recall):
        more = {}
        if host != "none":
            more = {"cpu_offload": True, "max_cpu_blocks": None if host == "unbounded" else host}
        if host != "none" and recall is not None:
            more |= {"recall": "topk", "recall_blocks": recall}
        config = CacheConfig(
            block_size=SIZE,
            sink_tokens=sinks,
            cache_bits=16,
            max_gpu_blocks=room,
            prefix_cache=True,
            prefix_cache_blocks=kept,
            recent_tokens=0,
            pruning=pruning,
            **more,
        )
        self.store, self.kinds, self.kept = PrefixStore(config, ()), kinds, kept
        for kind in kinds:
            arena = self.store.arena(kind)
            block_format = BlockFormat(SIZE, sinks, 1, 32, torch.float32)
            arena.pools[0] = LayerPool(block_format, torch.device("cpu"), self.store.meter)
        self.chats: list[SimpleNamespace] = []
        self.texts: list[np.ndarray] = [np.zeros(0, np.int64)]

    def new_groups(self):
        config = self.store.config
        return [
            LayerGroup(
                Geometry(SIZE, config.sink_tokens, WINDOWS[kind]),
                keep_sinks=True,
                policy=TierPolicy(0, ()),
                arena=self.store.arena(kind),
                eviction=EvictionPolicy.from_config(config),
                recall=config.recall_blocks if config.recall == "topk" else None,
            )
            for kind in self.kinds
        ]

    def some_text(self, data) -> np.ndarray:
        known = self.texts[data.draw(st.integers(0, len(self.texts) - 1))]
        cut = data.draw(st.integers(0, len(known)))
        fresh = data.draw(st.lists(st.tuples(st.integers(1, 150), st.integers(0, 1)), max_size=3))
        return np.concatenate([known[:cut], *(np.full(n, t) for n, t in fresh)]).astype(np.int64)

    @precondition(lambda self: len(self.chats) < 4)
    @rule(data=st.data())
    def begin(self, data):
        text = np.append(self.some_text(data), 1)
        groups = self.new_groups()
        columns, lengths = self.store.begin(groups, text[None], np.ones((1, len(text)), bool))
        assert columns == lengths[0] < len(text)
        for group in groups:
            group.rows = group.rows or [Sequence()]
        chat = SimpleNamespace(groups=groups, text=text[:columns])
        self.chats.append(chat)
        self.read(chat, text[columns:])

    @precondition(lambda self: self.chats)
    @rule(data=st.data(), length=st.integers(1, 200), token=st.integers(0, 1))
    def go_on(self, data, length, token):
        self.read(data.draw(st.sampled_from(self.chats)), np.full(length, token))

    def read(self, chat, new):
        """Run a step as a cache does, or find no room and change nothing."""
        text = np.concatenate([chat.text, new]).astype(np.int64)
        begun = []
        try:
            for group in chat.groups:
                group.begin([len(new)], None)
                begun.append(group)
        except OutOfBlocksError:
            for group in begun:
                group.rollback()
            return
        values = torch.from_numpy(numbers(text)[len(chat.text) :])
        for group in chat.groups:
            (pool,) = group.pools
            pool.fit(group.capacity())
            copy_blocks(pool.blocks.hot, group.step.copies)
            copy_blocks(pool.blocks.sink, group.step.page_copies)
            tables = group.step.tables(torch.device("cpu"))
            if group.promise is not None:
                group.promise.add(0, values[:, None, None].repeat(1, 1, 32) / 65521, 1.0)
            places = [(pool.blocks.hot.k, tables.slots)]
            if tables.sink_slots is not None:
                places.append((pool.blocks.sink.k, tables.sink_slots))
            for tensor, slots in places:
                real = slots >= 0
                size = tensor.shape[2]
                tensor[slots[real] // size, 0, slots[real] % size] = values[real, None]
            group.commit()
        chat.text = text

    @precondition(lambda self: self.chats)
    @rule(data=st.data(), partial=st.booleans())
    def keep(self, data, partial):
        chat = data.draw(st.sampled_from(self.chats))
        self.store.keep(chat.groups, {0: chat.text}, partial=partial)
        self.texts.append(chat.text)
        bound = self.kept
        assert all(bound is None or len(a.kept_blocks) <= bound for a in self.store.arenas)

    @precondition(lambda self: self.chats)
    @rule(data=st.data())
    def leave(self, data):
        chat = self.chats.pop(data.draw(st.integers(0, len(self.chats) - 1)))
        self.store.abandon(tuple(chat.groups))

    @precondition(lambda self: self.chats)
    @rule(data=st.data(), length=st.integers(1, 130))
    def end(self, data, length):
        """A call as it usually ends: it goes on, keeps what it has, and is gone."""
        chat = self.chats.pop(data.draw(st.integers(0, len(self.chats) - 1)))
        self.read(chat, np.full(length, 1))
        self.store.keep(chat.groups, {0: chat.text}, partial=True)
        self.texts.append(chat.text)
        self.store.abandon(tuple(chat.groups))

    @rule()
    def find_what_was_kept_last(self):
        groups = self.new_groups()
        prefix = self.store.finder().find(self.texts[-1], groups)
        assert prefix.length <= len(self.texts[-1])
        for group in groups:
            group.leave()

    @invariant()
    def rows_hold_their_own_text(self):
        for chat in getattr(self, "chats", ()):
            expected = torch.from_numpy(numbers(chat.text))
            for group in chat.groups:
                (pool,), (row,) = group.pools, group.rows
                assert row.length == len(chat.text)
                places = [(pool, row.blocks)]
                if group.arena.host is not None and row.offloaded:
                    places.append((group.arena.host.pools[0], row.offloaded))
                for place, blocks in places:
                    for block in blocks:
                        own = expected[block.start : block.start + SIZE]
                        assert torch.equal(place.blocks.hot.k[block.index, 0, : len(own), 0], own)
                starts = [b.start for _, blocks in places for b in blocks] + list(row.dropped)
                first = group.geometry.first_live(row.length)
                assert sorted(starts) == list(range(first, row.length, SIZE))
                sinks = expected[: group.geometry.sink_tokens]
                if len(sinks):
                    assert torch.equal(pool.blocks.sink.k[row.sink_page, 0, : len(sinks), 0], sinks)

    @invariant()
    def every_holder_is_counted_and_no_block_is_lost(self):
        for arena in self.store.arenas if hasattr(self, "store") else ():
            rows = arena.rows
            held = Counter((False, b.tier, b.index) for row in rows for b in row.blocks)
            held += Counter((True, b.tier, b.index) for row in rows for b in row.offloaded)
            held += Counter((k.is_away, k.block.tier, k.block.index) for k in arena.kept_blocks)
            room = max([index for *_, index in held], default=0) + 2
            for is_away in (False, True) if arena.host is not None else (False,):
                allocator = arena.host.blocks if is_away else arena.blocks
                for tier in BLOCK_TIERS:
                    for index in range(room):
                        assert allocator.refs(tier, index) == held[is_away, tier, index]
                assert allocator.num_used == sum(place == is_away for place, *_ in held)
                assert allocator.max_blocks is None or allocator.num_used <= allocator.max_blocks
            pages = {row.sink_page for row in rows} - {None}
            pages |= {page.block.index for page in arena.kept_pages}
            assert arena.pages.num_used == len(pages)

    @invariant()
    def only_what_was_read_with_all_of_its_window_is_kept(self):
        """What a row has read since it lost a part of its window must be found by nobody."""
        for chat in getattr(self, "chats", ()):
            losses = [g.rows[0].whole for g in chat.groups if g.rows[0].whole is not None]
            for group in chat.groups if losses else ():
                own = [(False, block) for block in group.rows[0].blocks]
                own += [(True, block) for block in group.rows[0].offloaded]
                for node in self.store.tree:
                    kept = group.arena.kept_blocks.find(node)
                    if kept is not None and (kept.is_away, kept.block) in own:
                        assert node.end <= min(losses)

    @invariant()
    def the_tree_holds_nothing_but_what_is_kept(self):
        if not hasattr(self, "store"):
            return
        leaves = [node for node in self.store.tree if not node.children]
        for node in leaves:
            kept = [a.kept_blocks.find(node) or a.kept_pages.find(node) for a in self.store.arenas]
            assert any(kept)

    def teardown(self):
        for chat in getattr(self, "chats", ()):
            self.store.abandon(tuple(chat.groups))
        if hasattr(self, "store"):
            self.store.close()
            for arena in self.store.arenas:
                assert (arena.blocks.num_used, arena.pages.num_used) == (0, 0)
                assert arena.host is None or arena.host.blocks.num_used == 0
                assert arena.capacity() == dict.fromkeys(Tier, 0)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=60, stateful_step_count=25)
