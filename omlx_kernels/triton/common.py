"""What the Triton kernels share: dots, unpacking of codes, masks, the online softmax.

Under ``TRITON_INTERPRET=1`` bfloat16 arithmetic is silently wrong (values are kept as raw uint16)
and a cast to it truncates, so every dot goes through `dot` and every cast to a narrower float
through `narrow`, which take a detour when `INTERPRET` is set. Everything else that computes does so
in float32 or float16 already.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from omlx_kernels.layout import BLOCK_TIERS, LayerBlocks, Tier

INTERPRET = tl.constexpr(bool(triton.knobs.runtime.interpret))
PERMUTE_BYTES = tl.constexpr(
    "prmt.b32 $0, $2, 0x64646464, 0x4240; prmt.b32 $1, $2, 0x64646464, 0x4341;"
)
"""PTX: two 16-bit words in, the low bytes and the high bytes out, each below a byte 0x64."""
TIER_HOT = tl.constexpr(int(Tier.HOT))
TIER_K8V8 = tl.constexpr(int(Tier.K8V8))

LOG2_E = 1.4426950408889634
DTYPE_NAMES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
}
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


@cache
def block_d(head_dim: int) -> int:
    """Return the channels of a tile: head_dim padded to a power of two that a dot accepts."""
    return max(32, triton.next_power_of_2(head_dim))


@cache
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
    if INTERPRET and tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def tile_mask(rows, offs_d, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the mask of a [rows, channels] tile; whole channels cost no comparison."""
    return rows[:, None] if HEAD_DIM == BLOCK_D else rows[:, None] & (offs_d < HEAD_DIM)[None, :]


@triton.jit
def _bytes_to_1024(bits):
    """Split uint16 words into two float16, 1024 + the low byte and 1024 + the high byte.

    The float16 with the bits ``0x6400 | byte`` is 1024 + byte, exactly, so a byte permutation
    (`PERMUTE_BYTES`, one instruction for two words) replaces every conversion.
    """
    if not INTERPRET and is_cuda():
        low, high = tl.inline_asm_elementwise(
            PERMUTE_BYTES, "=r,=r,r", [bits], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        low = ((bits & 0xFF) | 0x6400).to(tl.float16, bitcast=True)
        high = ((bits >> 8) | 0x6400).to(tl.float16, bitcast=True)
    return low, high


@triton.jit
def unpack_u8(words, DTYPE: tl.constexpr):
    """Split int16 words of two uint8 codes into the low and the high ones (even, odd channels)."""
    bits = words.to(tl.uint16, bitcast=True)
    if tl.float16 == DTYPE:
        low, high = _bytes_to_1024(bits)
        low, high = low - 1024.0, high - 1024.0
    else:
        low, high = (bits & 0xFF).to(DTYPE), (bits >> 8).to(DTYPE)
    return low, high


@triton.jit
def unpack_s8(words, DTYPE: tl.constexpr):
    """Split int16 words of two int8 codes into the low and the high ones (even, odd channels)."""
    if tl.float16 == DTYPE:
        low, high = _bytes_to_1024(words.to(tl.uint16, bitcast=True) ^ 0x8080)  # code + 128
        low, high = low - 1152.0, high - 1152.0
    else:
        low, high = ((words << 8) >> 8).to(DTYPE), (words >> 8).to(DTYPE)
    return low, high


@triton.jit
def unpack_halves(words, DTYPE: tl.constexpr):
    """Split int32 words of two float16 into the low and the high ones (even, odd channels)."""
    low = words.to(tl.int16).to(tl.float16, bitcast=True)
    high = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return low.to(DTYPE), high.to(DTYPE)


@triton.jit
def rough_log2(x):
    """Return log2 of positive float32 numbers, up to .09 too low, in two instructions."""
    return x.to(tl.int32, bitcast=True).to(tl.float32) * (1.0 / 8388608.0) - 127.0


@triton.jit
def online_softmax(scores, weights, m_i):
    """Advance the running maximum of ``weights`` over a tile of base-2 scores.

    ``weights`` are the scores, or scores plus the log2 of what p is to be multiplied by. Masked
    entries of both are -inf.

    Returns:
        p = 2**(scores - m), the factor that brings older sums to the new maximum, and the new
        maximum m. Rows that have seen no key yet keep m = -inf, p = 0 and no NaN.
    """
    m_new = tl.maximum(m_i, tl.max(weights, 1))
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    return tl.exp2(scores - m_safe[:, None]), tl.exp2(m_i - m_safe), m_new


@triton.jit
def visible_tiles(
    starts_ptr,
    first,
    last,
    key_first,
    key_stop,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return the shortest run of tiles of the entries [first, last) with every visible key.

    Tile ``t`` is the tokens ``t % n * BLOCK_N ...`` of entry ``t // n``, n tiles a block. Entries
    may be listed in any order; in the order of their positions the run holds nothing else.
    """
    CHUNK: tl.constexpr = 64
    TILES: tl.constexpr = BLOCK_SIZE // BLOCK_N
    lo = last * TILES
    hi = first * TILES
    for base in tl.range(first, last, CHUNK):
        entry = base + tl.arange(0, CHUNK)
        start = tl.load(starts_ptr + entry, mask=entry < last, other=0)
        tile_lo = tl.maximum(key_first - start, 0) // BLOCK_N
        tile_hi = tl.minimum((tl.maximum(key_stop - start, 0) + BLOCK_N - 1) // BLOCK_N, TILES)
        seen = (entry < last) & (tile_lo < tile_hi)
        lo = tl.minimum(lo, tl.min(tl.where(seen, entry * TILES + tile_lo, lo)))
        hi = tl.maximum(hi, tl.max(tl.where(seen, entry * TILES + tile_hi, hi)))
    return lo, hi


@triton.jit
def mask_scores(scores, key_pos, row_pos, window_size, KEEP: tl.constexpr):
    """Set the scores [BLOCK_M, BLOCK_N] of keys that the row does not see to -inf.

    ``KEEP`` leaves keys before the window visible. Without it one unsigned comparison does both
    sides: a key after the row is at a distance of more than 2**31.
    """
    distance = row_pos[:, None] - key_pos[None, :]
    if KEEP:
        visible = distance >= 0
    else:
        visible = distance.to(tl.uint32, bitcast=True) < window_size.to(tl.uint32)
    return tl.where(visible, scores, float("-inf"))
