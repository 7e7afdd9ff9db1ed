"""What the Triton kernels share: dots, tiles, scores, masks, the online softmax.

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
TIER_HOT = tl.constexpr(int(Tier.HOT))
TIER_K8V8 = tl.constexpr(int(Tier.K8V8))
TIER_K8V4 = tl.constexpr(int(Tier.K8V4))
TIER_K4V4 = tl.constexpr(int(Tier.K4V4))
TIERS = tl.constexpr(len(BLOCK_TIERS))

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
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
    """Return the columns of a tile: a power of two whose quarters (`codes`) a dot accepts."""
    return max(64, triton.next_power_of_2(head_dim))


@cache
def block_sink(sink_tokens: int) -> int:
    """Return the keys of a tile of the sink page; longer pages take several tiles."""
    return min(64, max(16, triton.next_power_of_2(sink_tokens)))


def tier_pointers(blocks: LayerBlocks) -> list[tuple[torch.Tensor, ...]]:
    """Return the tensors of SINK and of each of `BLOCK_TIERS`, in the order of `TierBlocks`."""
    return [tuple(blocks.tier(t).tensors().values()) for t in (Tier.SINK, *BLOCK_TIERS)]


def score_factors(sm_scale: float, softcap: float | None) -> tuple[float, float | None]:
    """Return the arguments of `scale_scores`."""
    if softcap is None:
        return sm_scale * LOG2_E.value, None
    return 2 * sm_scale * LOG2_E.value / softcap, softcap * LOG2_E.value


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
def untraced(x):
    """Return an int32 scalar that the compiler cannot tell to be ``x``.

    What is computed from it is computed there and then, where the compiler would keep the same
    values from an earlier computation in registers over all loops in between (or spill them).
    """
    if not INTERPRET and is_cuda():
        x = tl.inline_asm_elementwise("", "=r,0", [x], dtype=tl.int32, is_pure=False, pack=1)
    return x


@triton.jit
def channels(HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the channel that each column of a tile holds; `tile_mask` says which columns do.

    A head_dim that is no power of two is padded half by half, as 4-bit codes store it (80 in a tile
    of 128: 40 channels, 24 columns of padding, 40 channels, 24 columns of padding).
    """
    HALF: tl.constexpr = BLOCK_D // 2
    column = tl.arange(0, BLOCK_D)
    return column if HEAD_DIM == BLOCK_D else column % HALF + column // HALF * (HEAD_DIM // 2)


@triton.jit
def tile_mask(rows, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the mask of a [rows, channels] tile; whole channels cost no comparison."""
    mask = rows[:, None]
    if HEAD_DIM != BLOCK_D:
        is_channel = tl.arange(0, BLOCK_D) % (BLOCK_D // 2) < HEAD_DIM // 2
        mask = mask & is_channel[None, :]
    return mask


@triton.jit
def gated(mask, flag):
    """Return ``mask`` where the scalar ``flag`` is set, else nothing.

    triton 3.9's interpreter makes integers of the scalar's copies, which loads refuse as a mask.
    """
    both = mask & flag
    if INTERPRET:
        both = both != 0
    return both


@triton.jit
def scale_scores(dots, score_scale, softcap):
    """Turn dots into base-2 scores, ``softcap * tanh(score / softcap)`` where there is a cap.

    ``softcap`` is None, or the cap times log2(e); ``score_scale`` then makes 2**dots the
    exp(2 * score / softcap) that tanh is computed from (`score_factors`).
    """
    scaled = dots * score_scale
    if softcap is not None:
        scaled = softcap - 2.0 * softcap / (tl.exp2(scaled) + 1.0)
    return scaled


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
