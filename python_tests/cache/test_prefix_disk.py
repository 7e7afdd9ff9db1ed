"""The prefix store with a disk as a state machine, which is restarted: rows find their own text."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from test_prefix_store import SIZE, StoreMachine

from omlx_cache.block_pool import LayerPool
from omlx_cache.prefix_disk import PrefixDisk
from omlx_cache.prefix_store import PrefixStore
from omlx_cache.sequences import Sequence
from omlx_cache.storage.block_files import BlockFiles
from omlx_kernels.layout import BlockFormat

CPU = torch.device("cpu")


class DiskMachine(StoreMachine):
    """Every restart leaves nothing but the directory."""

    @initialize(
        sinks=st.sampled_from([0, 4]),
        kept=st.none() | st.integers(1, 8),
        room=st.sampled_from([None, 5, 8, 16]),
        kinds=st.sampled_from([["full"], ["window"], ["full", "window"]]),
        host=st.sampled_from(["none", "unbounded", "unbounded", 2, 6]),
        bound=st.none() | st.integers(1, 12),
    )
    def start(self, sinks, kept, room, kinds, host, bound):
        super().start(sinks, kept, room, kinds, host, None, None)
        memory = Path("/dev/shm")
        self.directory = tempfile.mkdtemp(dir=memory if memory.is_dir() else None)
        self.bound = None if bound is None else bound * 20_000
        self.use_disk()

    def use_disk(self):
        files = BlockFiles(self.directory, b"numbers", self.bound)
        self.store.disk = PrefixDisk(files, [CPU], self.store.meter)

    def restart(self):
        for chat in self.chats:
            self.store.abandon(tuple(chat.groups))
        self.chats = []
        store = PrefixStore(self.store.config, ())
        for kind in self.kinds:
            store.arena(kind)
        self.store.close()
        self.store = store
        self.use_disk()

    def read(self, chat, new):
        self.make_pools(chat.groups)
        super().read(chat, new)

    def make_pools(self, groups):
        for group in groups:
            if not group.arena.pools:  # nothing was read from the disk
                sinks = self.store.config.sink_tokens
                block_format = BlockFormat(SIZE, sinks, 1, 32, torch.float32)
                group.arena.pools[0] = LayerPool(block_format, CPU, self.store.meter)

    @rule()
    def start_anew(self):
        self.restart()

    @rule()
    def forget_memory(self):
        for arena in self.store.arenas:
            arena.kept_blocks.reclaim(2)

    @rule()
    def flush(self):
        assert self.store.flush()

    @precondition(lambda self: self.chats)
    @rule(data=st.data())
    def what_was_flushed_is_found_after_a_restart(self, data):
        chat = data.draw(st.sampled_from(self.chats))
        self.store.keep(chat.groups, {0: chat.text}, partial=True)
        assert self.store.flush()
        text, sinks = chat.text, self.store.config.sink_tokens
        self.texts.append(text)
        self.restart()
        chat = SimpleNamespace(groups=self.new_groups(), text=text)
        ids = np.append(text, 1)
        found, _ = self.store.begin(chat.groups, ids[None], np.ones((1, len(ids)), bool))
        if (
            self.kinds == ["full"]
            and self.bound is None
            and self.store.config.max_gpu_blocks is None
        ):
            whole = sinks + (len(text) - sinks) // SIZE * SIZE
            assert found >= whole or len(text) <= sinks  # sinks alone are not worth it
        for group in chat.groups:
            group.rows = group.rows or [Sequence()]
        chat.text = text[:found]
        self.chats.append(chat)
        self.make_pools(chat.groups)
        self.rows_hold_their_own_text()
        self.read(chat, ids[found:])

    @invariant()
    def the_directory_is_bounded(self):
        if getattr(self, "bound", None) is not None:
            assert BlockFiles(self.directory, b"numbers").num_bytes() <= self.bound

    def teardown(self):
        super().teardown()
        shutil.rmtree(self.directory, ignore_errors=True)


TestDisk = DiskMachine.TestCase
TestDisk.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
