"""Calls, caches and copies that share a prefix store, in any order: each says what stock says.

The store by itself, with tensors that a test can read, is in ``test_prefix_store.py``.
"""

from __future__ import annotations

import copy
import gc

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tiny import greedy, left_padded, tiny_model

import omlx_cache
from omlx_cache.compat import cache_name
from omlx_cache.patch_state import state_of

NEW = 3
LONGEST = 300


class Held:
    """A cache that a caller holds, and the text that it was given."""

    def __init__(self, cache: omlx_cache.PagedCache, ids: torch.Tensor) -> None:
        self.cache, self.ids = cache, ids


class PrefixMachine(RuleBasedStateMachine):
    """Texts of few tokens, so that they begin alike again and again."""

    @initialize(
        family=st.sampled_from(["llama", "mistral-window"]),
        room=st.none() | st.integers(20, 40),
        kept=st.none() | st.integers(1, 12),
        away=st.sampled_from([None, "unbounded", "unbounded", 3, 9]),
    )
    def start(self, family, room, kept, away):
        if away and room:  # the rows of a batch and a chunk need some
            room //= 2
        offload = {"cpu_offload": bool(away)}
        if away not in (None, "unbounded"):
            offload["max_cpu_blocks"] = away
        self.stock, self.model = tiny_model(family), tiny_model(family)
        self.can_crop = family == "llama"
        omlx_cache.patch(
            self.model,
            block_size=64,
            prefill_chunk=96,
            cache_bits=16,
            prefix_cache=True,
            prefix_cache_blocks=kept,
            max_gpu_blocks=room,
            **offload,
        )
        self.kept, self.held, self.stores = kept, [], {}
        self.texts = [torch.zeros((1, 0), dtype=torch.long)]

    def text(self, data) -> torch.Tensor:
        """Continue some known text from anywhere in it."""
        known = data.draw(st.sampled_from(self.texts), "known")
        cut = data.draw(st.integers(0, known.shape[1]), "cut")
        new = data.draw(st.lists(st.integers(2, 4), min_size=1, max_size=3), "new")
        each = data.draw(st.integers(1, 50), "each")
        ids = torch.cat([known[:, :cut], torch.tensor([new]).repeat_interleave(each, 1)], 1)
        return ids[:, :LONGEST]

    def compare(self, inputs: dict[str, torch.Tensor], **kwargs) -> torch.Tensor | None:
        """Return what both models say; None where the pool is full."""
        try:
            found = greedy(self.model, inputs, NEW, **kwargs)
        except omlx_cache.OutOfBlocksError:
            return None
        finally:
            self.stores[id(state_of(self.model).store)] = state_of(self.model).store
        kwargs.pop(cache_name(type(self.model).forward), None)
        assert torch.equal(found, greedy(self.stock, inputs, NEW, **kwargs))
        return found

    @rule(data=st.data())
    def generate(self, data):
        ids = self.text(data)
        found = self.compare({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        if found is not None:
            self.texts.append(torch.cat([ids, found], 1))

    @rule(data=st.data(), beams=st.integers(1, 2))
    def generate_a_batch(self, data, beams):
        rows = [self.text(data), self.text(data)]
        width = max(row.shape[1] for row in rows)
        padded = [torch.nn.functional.pad(row, (width - row.shape[1], 0)) for row in rows]
        inputs = left_padded(torch.cat(padded), [row.shape[1] for row in rows])
        self.compare(inputs, num_beams=beams)
        self.texts += rows

    @precondition(lambda self: len(self.held) < 3)
    @rule()
    def hold_a_cache(self):
        empty = torch.zeros((1, 0), dtype=torch.long)
        self.held.append(Held(omlx_cache.PagedCache(self.model), empty))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def go_on(self, data):
        held = data.draw(st.sampled_from(self.held), "held")
        ids = torch.cat([held.ids, self.text(data)], 1)
        columns = held.cache.get_seq_length()
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        found = self.compare(inputs, **{cache_name(type(self.model).forward): held.cache})
        if found is not None:
            held.ids = torch.cat([ids, found], 1)
        else:
            held.ids = ids[:, : held.cache.get_seq_length()]
            assert held.cache.get_seq_length() >= columns

    @precondition(lambda self: self.held and len(self.held) < 4)
    @rule(data=st.data())
    def copy_a_cache(self, data):
        held = data.draw(st.sampled_from(self.held), "held")
        self.held.append(Held(copy.deepcopy(held.cache), held.ids))

    @precondition(lambda self: self.held and self.can_crop)
    @rule(data=st.data())
    def crop(self, data):
        held = data.draw(st.sampled_from(self.held), "held")
        kept = data.draw(st.integers(0, held.cache.get_seq_length()), "kept")
        held.cache.crop(kept - held.cache.get_seq_length())
        held.ids = held.ids[:, :kept]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def let_go(self, data):
        self.held.pop(data.draw(st.integers(0, len(self.held) - 1), "index"))

    @rule()
    def change_the_weights(self):
        self.held.clear()  # what they hold was computed with the old ones
        with torch.no_grad():
            for model in (self.model, self.stock):
                model.model.layers[0].self_attn.k_proj.weight.neg_()

    @invariant()
    def the_bound_holds(self):
        for store in getattr(self, "stores", {}).values():
            for arena in store.arenas:
                assert self.kept is None or len(arena.kept_blocks) <= self.kept

    def teardown(self):
        if not hasattr(self, "model"):
            return
        omlx_cache.unpatch(self.model)
        self.held.clear()
        gc.collect()
        for store in self.stores.values():
            assert [arena.blocks.num_used for arena in store.arenas] == [0] * len(store.arenas)
            assert [arena.pages.num_used for arena in store.arenas] == [0] * len(store.arenas)


TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = settings(max_examples=10, stateful_step_count=14)
