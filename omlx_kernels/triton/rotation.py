"""The orthonormal Hadamard rotation of values, in kernels: `omlx_kernels.quantization.hadamard`.

Sylvester's matrix has ``H[i, j] = (-1) ** popcount(i & j)``; a head_dim is rotated in blocks of
the largest power of two that divides it. Two forms of the same rotation:

* `rotate` adds and subtracts in log2(size) steps, in float32: for the few rows of append and of
  decode's merge, where building a matrix would cost more than the rotation itself;
* `hadamard_columns` builds columns of the matrix for a dot: for the many rows of extend, whose
  tensor cores need the time of a tile or two of keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from omlx_kernels.triton.common import channels


@triton.jit
def rotate(x, HEAD_DIM: tl.constexpr):
    """Rotate the rows of a float32 tile [rows, channels], channels in their natural order."""
    SIZE: tl.constexpr = HEAD_DIM & -HEAD_DIM
    offs_d = tl.arange(0, x.shape[1])[None, :]
    for bit in tl.static_range(8):
        if (1 << bit) < SIZE:
            partner = tl.gather(x, tl.broadcast_to(offs_d ^ (1 << bit), x.shape), 1)
            x = tl.where((offs_d & (1 << bit)) == 0, x + partner, partner - x)
    return x * (SIZE**-0.5)


@triton.jit
def hadamard_columns(
    first, DTYPE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, COLUMNS: tl.constexpr
):
    """Return columns ``first ...`` of the matrix as 1, -1 and 0: [BLOCK_D, COLUMNS].

    Its rows follow a tile's channels (padding is 0), its columns the natural order. The factor
    size**-0.5 is left to the caller.
    """
    SIZE: tl.constexpr = HEAD_DIM & -HEAD_DIM
    row = channels(HEAD_DIM, BLOCK_D)[:, None]
    column = first + tl.arange(0, COLUMNS)[None, :]
    bits = row & column & (SIZE - 1)
    bits ^= bits >> 4
    bits ^= bits >> 2
    bits ^= bits >> 1
    sign = tl.where((bits & 1) == 0, 1.0, -1.0)
    same_block = row // SIZE == column // SIZE
    if HEAD_DIM != BLOCK_D:
        is_channel = tl.arange(0, BLOCK_D) % (BLOCK_D // 2) < HEAD_DIM // 2
        same_block = same_block & is_channel[:, None]
    return tl.where(same_block, sign, 0.0).to(DTYPE)
