"""One layer of a `PagedCache`: it stores keys and values, attends to them, and ages its blocks."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from omlx_cache.block_pool import LayerPool, MemoryMeter, copy_blocks
from omlx_cache.compat import CacheLayerMixin
from omlx_cache.layer_group import LayerGroup
from omlx_cache.look import Look
from omlx_cache.read_back import read_back
from omlx_cache.rotary import Rotation
from omlx_kernels import ops
from omlx_kernels.layout import BlockFormat, LayerBlocks, Tier


def convert(
    blocks: LayerBlocks, conversions: list[tuple[Tier, Tier, torch.Tensor, torch.Tensor]]
) -> None:
    """Convert blocks: (tier, colder tier, ids, ids there) each."""
    for old, new, old_ids, new_ids in conversions:
        ops.convert_blocks(blocks.tier(old), blocks.tier(new), old, new, old_ids, new_ids)


if TYPE_CHECKING:
    from omlx_cache.cache import PagedCache


class PagedLayer(CacheLayerMixin):
    """One layer's share of a `PagedCache`: its pool, and the group that it belongs to.

    Attributes:
        owner: the cache, which the layer doesn't keep alive.
    """

    is_croppable = True
    is_compileable = True

    def __init__(
        self, index: int, group: LayerGroup, meter: MemoryMeter, rotation: Rotation | None
    ) -> None:
        super().__init__()
        self.index = index
        self.group, self._meter, self._rotation = group, meter, rotation
        self.is_initialized = self.pool is not None
        self.pending: tuple[torch.Tensor, torch.Tensor] | None = None  # taken, not attended to
        self.num_columns = 0
        self.owner: weakref.ref[PagedCache] | None = None

    @property
    def keys(self) -> torch.Tensor | None:
        """A copy of all keys, [rows, kv_heads, columns, head_dim]; slow, see `read_back`."""
        return self._read_back()[0]

    @keys.setter
    def keys(self, tensor: torch.Tensor | None) -> None:
        self._refuse_tensor(tensor)

    @property
    def values(self) -> torch.Tensor | None:
        """A copy of all values, like `keys`."""
        return self._read_back()[1]

    @values.setter
    def values(self, tensor: torch.Tensor | None) -> None:
        self._refuse_tensor(tensor)

    @staticmethod
    def _refuse_tensor(tensor: torch.Tensor | None) -> None:
        if tensor is not None:  # transformers' own constructor begins with None
            raise NotImplementedError(
                "PagedLayer: keys and values can be read but not replaced, they are blocks that "
                "rows share; change them with the methods of the PagedCache"
            )

    def _read_back(self) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        cache = None if self.owner is None else self.owner()
        if cache is None:
            raise RuntimeError(
                "PagedLayer: keys and values can be read while the layer's cache lives, got a "
                "layer whose cache is gone; hold on to the PagedCache"
            )
        with cache.steps.alone():
            return read_back(self, cache.valid)

    @property
    def pool(self) -> LayerPool | None:
        """The layer's blocks; None before its first keys."""
        return self.group.arena.pools.get(self.index)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Fix the format of the layer's blocks from its first keys, [batch, heads, *, head_dim]."""
        if key_states.shape != value_states.shape:
            raise NotImplementedError(
                f"PagedCache: keys and values must have one shape, got "
                f"{tuple(key_states.shape)} and {tuple(value_states.shape)}"
            )
        geometry = self.group.geometry
        heads, dim = key_states.shape[1], key_states.shape[3]
        # Under autocast the rotary embedding widens the keys; the values are as projected.
        dtype = value_states.dtype
        block_format = BlockFormat(geometry.block_size, geometry.sink_tokens, heads, dim, dtype)
        pool = LayerPool(block_format, key_states.device, self._meter)
        self.group.arena.pools[self.index] = pool
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the new keys and values, [batch, kv_heads, columns, head_dim], and return them.

        They are stored by `attend`, which the model calls next.
        """
        # What a traced model reads here it would be compiled for, once for each value.
        if not torch.compiler.is_compiling() and self.group.step is None:
            raise RuntimeError(
                "PagedCache.update must be called inside a step of the model that the cache was "
                "made for; call omlx_cache.patch(model) and then model(..., cache=cache)"
            )
        self.pending = (key_states, value_states)
        return key_states, value_states

    @property
    def stored(self) -> LayerPool:
        """What the layer has stored.

        Raises:
            RuntimeError: before its first keys.
        """
        if self.pool is None:
            raise RuntimeError("PagedLayer: the layer must have run, got one without keys")
        return self.pool

    def _store(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if self.pool is None:
            self.lazy_initialization(key_states, value_states)
        pool, step = self.stored, self.group.running_step
        pool.fit(self.group.capacity())
        blocks, tables = pool.blocks, step.tables(key_states.device)
        copy_blocks(blocks.hot, step.copies)
        copy_blocks(blocks.sink, step.page_copies)
        # [batch, heads, columns, dim] -> [batch * columns, heads, dim]
        dtype = pool.format.dtype
        k, v = (
            x.detach().to(dtype).transpose(1, 2).flatten(0, 1) for x in (key_states, value_states)
        )
        rotate_v = self.group.policy.rotates_values
        if tables.sink_slots is not None:
            ops.append_kv(k, v, blocks.sink, tables.sink_slots, rotate_v=rotate_v)
        ops.append_kv(k, v, blocks.hot, tables.slots, rotate_v=rotate_v)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sm_scale: float,
        *,
        softcap: float | None = None,
        sink_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store the new keys and values, attend to all, then convert the blocks that age.

        Args:
            query: [batch, num_q_heads, columns, head_dim].
            key, value: [batch, kv_heads, columns, head_dim], of the step's columns.
            sm_scale: factor on the scores.
            softcap: bound on the scores; None is none.
            sink_logits: [num_q_heads] learned sinks; None is none.

        Returns:
            [batch, columns, num_q_heads, head_dim] in query's dtype; padding columns are 0,
            but for those of `AskedPadding`.
        """
        self._store(key, value)
        group, step = self.group, self.group.running_step
        blocks, tables = self.stored.blocks, step.tables(query.device)
        batch, heads, columns, dim = query.shape
        (q, *_), sight = self.operands(query)
        sink_q = sight.pop("sink_q")
        scoring: dict[str, Any] = {"sm_scale": sm_scale, "rotated_v": group.policy.rotates_values}
        scoring |= {"softcap": softcap, "window_size": sight.pop("window_size")}
        there = step.host_tables()
        metas = tables.meta, None if there is None else there.meta
        logits = None if sink_logits is None else sink_logits.detach()
        look = Look(blocks, group.arena.host, self.index, sight, scoring, logits)
        decodes = tables.meta.max_query_len <= 1
        is_watched = group.observer is not None or (group.mass is not None and decodes)
        out, mass = look(q, metas, sink_q=sink_q, wants_mass=is_watched)
        if group.promise is not None:
            group.promise.add(self.index, q, sm_scale)
        if group.observer is not None and mass is not None:
            group.observer(self.index, tables.meta, mass[: tables.meta.splits.shape[0]])
        if group.mass is not None and not decodes:
            group.mass.add_prompt(look, q, metas, sink_q)
        elif group.mass is not None and mass is not None:
            group.mass.add(mass)
        if tables.token_index is not None:
            padded = out.new_zeros(batch * columns, heads, dim)
            out = padded.index_copy_(0, tables.token_index, out)
        if step.padding is not None:
            places = step.padding.places(query.device)
            q = query.transpose(1, 2)[places].to(self.stored.format.dtype)
            seen, _ = look(q, step.padding.metas(query.device), sink_q=None)
            out.view(batch, columns, heads, dim)[places] = seen
        convert(blocks, tables.convert)
        if there is not None:
            convert(group.arena.cpu_tier.fitted(self.index).blocks, there.convert)
        return out.view(batch, columns, heads, dim).to(query.dtype)

    def operands(self, query: torch.Tensor) -> tuple[tuple, dict]:
        """Return q, blocks and tables of the step for `paged_attention`, and what a query sees.

        Args:
            query: [batch, num_q_heads, columns, head_dim].
        """
        group, pool = self.group, self.stored
        tables = group.running_step.tables(query.device)
        q = query.to(pool.format.dtype).transpose(1, 2).flatten(0, 1)
        packed = q if tables.token_index is None else q[tables.token_index]
        sight = {
            "window_size": group.geometry.window_size,
            "keep_sinks": group.keep_sinks,
            "sink_q": self._sink_query(packed, tables.sink_offsets),
        }
        return (packed, pool.blocks, tables.meta), sight

    def _sink_query(self, q: torch.Tensor, offsets: torch.Tensor | None) -> torch.Tensor | None:
        """Return the queries as they look at the sinks outside of the window; None: as they are."""
        group = self.group
        if offsets is None or self._rotation is None or not group.keep_sinks:
            return None
        if not group.geometry.sink_tokens:
            return None
        self._rotation = self._rotation.to(q.device)
        return self._rotation.rotate(q, offsets)

    @property
    def is_sliding(self) -> bool:
        """Whether the layer sees a window: its own, or the configuration's."""
        return self.group.geometry.window_size is not None

    @property
    def record_past(self) -> bool:
        """Whether what the window leaves behind is kept until the next `crop`; of all layers."""
        return self.group.keep_past

    @record_past.setter
    def record_past(self, keep: bool) -> None:
        self.group.keep_past = keep

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (columns that a mask covers, offset of the first)."""
        return self.num_columns + query_length, 0

    def get_seq_length(self) -> int:
        """Columns seen so far, padding included."""
        return self.num_columns

    def get_max_length(self) -> int:
        """Return -1: no bound on the columns."""
        return -1

    def _refuse(self, *args, **kwargs) -> None:
        raise NotImplementedError(
            "PagedLayer: layers share their rows and blocks, and can't be changed one by one; call "
            "the method of this name on the PagedCache"
        )

    reset = crop = reorder_cache = batch_repeat_interleave = batch_select_indices = _refuse
    offload = prefetch = _refuse
