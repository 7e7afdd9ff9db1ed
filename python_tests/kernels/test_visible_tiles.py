"""`visible_tiles`: extend walks the tiles that some row sees, and no others."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_device import needs_device, to_device, triton

from omlx_kernels.triton.common import visible_tiles

tl = triton.language
pytestmark = needs_device
SIZE, TILE = 128, 64


@triton.jit
def _visible_tiles_kernel(
    out_ptr, starts_ptr, first, last, key_first, key_stop,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    lo, hi = visible_tiles(starts_ptr, first, last, key_first, key_stop, BLOCK_SIZE, BLOCK_N)
    tl.store(out_ptr, lo)
    tl.store(out_ptr + 1, hi)


@settings(max_examples=60)
@given(
    blocks=st.sampled_from([0, 1, 2, 3, 70]),
    first=st.sampled_from([0, 2]),
    edges=st.tuples(st.integers(-200, 9300), st.sampled_from([1, 63, 64, 65, 200, 5000])),
    shuffled=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_the_run_is_the_visible_tiles(blocks, first, edges, shuffled, seed):
    key_first, key_stop = edges[0], sum(edges)
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(seed))
    starts = 4 + SIZE * (order if shuffled else torch.arange(blocks))
    starts = torch.cat([torch.full((first,), key_first), starts]).int()  # others' entries
    out = to_device(torch.full((2,), -1, dtype=torch.int32))
    last = first + blocks
    _visible_tiles_kernel[(1,)](
        out, to_device(starts), first, last, key_first, key_stop, BLOCK_SIZE=SIZE, BLOCK_N=TILE
    )
    lo, hi = out.tolist()
    per_block = SIZE // TILE
    tile_starts = {
        t: int(starts[t // per_block]) + t % per_block * TILE
        for t in range(first * per_block, last * per_block)
    }
    seen = [t for t, s in tile_starts.items() if s < key_stop and s + TILE > key_first]
    if not seen:
        assert lo >= hi
    else:
        assert (lo, hi) == (min(seen), max(seen) + 1)
        assert shuffled or hi - lo == len(seen)
