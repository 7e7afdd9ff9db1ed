"""One cache's share in the prefix store: what its rows begin with, and what they leave there."""

from __future__ import annotations

import numpy as np
import torch

from omlx_cache.cache_rows import CacheRows
from omlx_cache.prefix_disk import Reads
from omlx_cache.prefix_store import PrefixStore


class PrefixShare:
    """What a cache takes from its model's prefix store, and lets it hold; nothing without a store.

    Methods are called under the store's lock, but for `expect`.

    Args:
        store: of the model; None: there is none.
        rows: of the cache.

    Attributes:
        reused_tokens: tokens that the rows began with, over all rows.
        reads: what was read from the disk for them.
    """

    def __init__(self, store: PrefixStore | None, rows: CacheRows) -> None:
        self._store, self._rows = store, rows
        self.reused_tokens, self.reads = 0, Reads()

    def begin(self, ids: torch.Tensor, valid: np.ndarray) -> None:
        """Note the ids of all tokens from now on, and begin with what the store knows of them.

        Args:
            ids: [rows, columns] of the prompts; the cache must be empty.
            valid: [rows, columns] bool, which of them are real tokens.
        """
        if self._store is None:
            return
        ids = ids.detach().long()  # texts are compared by their bytes
        before = self._store.reads
        columns, lengths = self._store.begin(self._rows.groups, ids.cpu().numpy(), valid)
        self.reads = self._store.reads.since(before)
        self._rows.columns.start(valid[:, :columns], lengths, ids[:, :columns])
        self._rows.num_columns = columns
        self.reused_tokens = int(lengths.sum())

    def expect(self, texts: list[np.ndarray]) -> None:
        """Begin to read what the disk has of texts, [*] int64, for a `begin` that may come."""
        if self._store is not None:
            self._store.expect(self._rows.groups, texts)

    def keep(self, *, partial: bool, rows: list[int] | None = None) -> None:
        """Let the store hold what some rows hold.

        Args:
            partial: whether with their last block, which isn't full.
            rows: which; None: all.
        """
        columns = self._rows.columns
        if self._store is not None and columns.ids:
            texts = columns.tokens()
            chosen = range(len(texts)) if rows is None else rows
            self._store.keep(self._rows.groups, {i: texts[i] for i in chosen}, partial=partial)
