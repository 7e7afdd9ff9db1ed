"""Read a layer's keys and values back from its blocks, as one tensor each: what other caches hold.

Nothing in this package needs them like that. Code that was written for other caches may look at
``cache.layers[i].keys``, to compare caches or to score what is in them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from omlx_cache.sequences import Sequence, StoredBlock
from omlx_kernels.layout import Tier
from omlx_kernels.quantization import hadamard, read_blocks

if TYPE_CHECKING:
    from omlx_cache.block_pool import LayerPool
    from omlx_cache.paged_layer import PagedLayer


def read_back(
    layer: PagedLayer, valid: np.ndarray | None
) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """Return copies of the keys and values that a layer holds, with what rounding has left.

    Args:
        layer: not in a step.
        valid: [rows, columns] bool, which columns hold a token of their row; None: all.

    Returns:
        Two tensors [rows, kv_heads, columns, head_dim] in the model's dtype. Columns of padding,
        and those that the window has left behind or that were pruned, are 0. None where nothing is
        stored.
    """
    rows, pool = layer.group.rows, layer.pool
    if pool is None or not rows:
        return None, None
    shape = (len(rows), pool.format.num_kv_heads, layer.num_columns, pool.format.head_dim)
    keys, values = (
        torch.zeros(shape, dtype=pool.format.dtype, device=pool.device) for _ in range(2)
    )
    for i, row in enumerate(rows):
        columns = np.arange(shape[2]) if valid is None else np.flatnonzero(valid[i])
        for own, block in [*((pool, b) for b in _stored(row)), *_offloaded(layer, row)]:
            k, v = read_blocks(
                own.blocks.tier(block.tier), block.tier, [block.index], torch.float32
            )
            if layer.group.policy.rotates_values:
                v = hadamard(v)
            # A row that began in the prefix store may be ahead of the columns.
            there = columns[block.start : min(block.start + k.shape[2], row.length)]
            index = torch.from_numpy(there).to(pool.device)
            keys[i][:, index] = k[0, :, : len(there)].to(keys)
            values[i][:, index] = v[0, :, : len(there)].to(values)
    return keys, values


def _stored(row: Sequence) -> list[StoredBlock]:
    """Return a row's blocks, its sink page among them."""
    sinks = [] if row.sink_page is None else [StoredBlock(0, Tier.SINK, row.sink_page)]
    return [*sinks, *row.blocks]


def _offloaded(layer: PagedLayer, row: Sequence) -> list[tuple[LayerPool, StoredBlock]]:
    """Return a row's blocks in CPU memory, with the pool that holds them."""
    host = layer.group.arena.host
    if host is None or not row.offloaded:
        return []
    host.wait()
    return [(host.pools[layer.index], block) for block in row.offloaded]
