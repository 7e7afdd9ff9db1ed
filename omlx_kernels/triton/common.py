"""What the Triton kernels share: exact dots, unpacking of codes, the online softmax, row layout.

Under ``TRITON_INTERPRET=1`` bfloat16 arithmetic is silently wrong (values are kept as raw uint16),
and a cast to it truncates, so every dot goes through `dot` and every cast to a narrower float through
`narrow`, which take a detour when `INTERPRET` is set. Everything else that computes does so in float32
or float16 already.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from omlx_kernels.layout import BLOCK_TIERS, LayerBlocks, Tier

INTERPRET = tl.constexpr(bool(triton.knobs.runtime.interpret))
TIER_HOT = tl.constexpr(int(Tier.HOT))
TIER_K8V8 = tl.constexpr(int(Tier.K8V8))

LOG2_E = 1.4426950408889634
NO_WINDOW = 2**31 - 1
"""The window of a launch without one: ``position - NO_WINDOW`` still fits int32."""
TABLES = [
    "block_table_ptr",
    "block_starts_ptr",
    "sink_pages_ptr",
    "seq_lens_ptr",
    "query_start_loc_ptr",
    "splits_ptr",
]
"""Read as scalars, so their alignment is no reason to compile a kernel again."""


def current_target() -> tuple[str, int | str]:
    """Return the backend and architecture that a launch compiles for, e.g. ``("cuda", 90)``."""
    if INTERPRET.value:
        return "interpreter", 0
    target = triton.runtime.driver.active.get_current_target()
    return target.backend, target.arch


@lru_cache(maxsize=None)
def block_d(head_dim: int) -> int:
    """Return the channels of a tile: head_dim padded to a power of two that a dot accepts."""
    return max(16, triton.next_power_of_2(head_dim))


@lru_cache(maxsize=None)
def block_sink(sink_tokens: int) -> int:
    """Return the keys of a tile of the sink page; longer pages take several tiles."""
    return min(64, max(16, triton.next_power_of_2(sink_tokens)))


def tier_pointers(blocks: LayerBlocks) -> list[tuple[torch.Tensor, ...]]:
    """Return the tensors of SINK and of each of `BLOCK_TIERS`, in the order of `TierBlocks`."""
    return [tuple(blocks.tier(t).tensors().values()) for t in (Tier.SINK, *BLOCK_TIERS)]


@triton.jit
def dot(a, b, acc):
    """Return acc + a @ b, accumulated in float32; float32 operands are never cut to tf32."""
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """Round float32 to ``DTYPE``, to nearest even."""
    if INTERPRET and DTYPE == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def tile_mask(rows, offs_d, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the mask of a [rows, channels] tile; whole channels cost no comparison."""
    if HEAD_DIM == BLOCK_D:
        mask = rows[:, None]
    else:
        mask = rows[:, None] & (offs_d < HEAD_DIM)[None, :]
    return mask


@triton.jit
def dequantize_k8(codes, scale, zero, DTYPE: tl.constexpr):
    """Turn uint8 key codes [tokens, channels] into ``code * scale + zero`` in registers."""
    k = unsigned_to_float(codes, DTYPE)
    return k * scale.to(DTYPE)[None, :] + zero.to(DTYPE)[None, :]


@triton.jit
def unsigned_to_float(codes, DTYPE: tl.constexpr):
    """Turn uint8 into float16 without a conversion instruction, or into float32 with one.

    As a float16 the bits ``0x6400 | code`` read 1024 + code, exactly.
    """
    if DTYPE == tl.float16:
        bits = codes.to(tl.uint16) | 0x6400
        x = bits.to(tl.float16, bitcast=True) - 1024.0
    else:
        x = codes.to(DTYPE)
    return x


@triton.jit
def signed_to_float(codes, DTYPE: tl.constexpr):
    """Turn int8 into float16 without a conversion instruction, or into float32 with one."""
    if DTYPE == tl.float16:
        shifted = codes.to(tl.uint8, bitcast=True) ^ 0x80  # code + 128
        bits = shifted.to(tl.uint16) | 0x6400
        x = bits.to(tl.float16, bitcast=True) - 1152.0
    else:
        x = codes.to(DTYPE)
    return x


@triton.jit
def online_softmax(scores, m_i):
    """Advance the running maximum over a tile of base-2 scores; masked scores are -inf.

    Returns:
        p = 2**(scores - m), the factor that brings older sums to the new maximum, and the new
        maximum. Rows that have seen no key yet keep m = -inf, p = 0 and no NaN.
    """
    m_new = tl.maximum(m_i, tl.max(scores, 1))
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    return tl.exp2(scores - m_safe[:, None]), tl.exp2(m_i - m_safe), m_new
