"""The quantizers of the cache in plain torch: what every kernel must reproduce.

``x ~ code * scale + zero``. Scales and zeros are stored as float16, and the codes are computed
against the *stored* (rounded) values, so that ``|x - x_hat| <= scale / 2`` holds for every input
within +-65504, constant and zero rows included:

* A zero is rounded down: to the nearest float16, or the one below where that is above the minimum.
* A scale is rounded to nearest, which costs the end of the range 2**-11 of its 255 steps; in the
  subnormals, where rounding may cost half of it, a step is added first. It is never 0.

Nothing is added where nothing need be: what was quantized once quantizes to the same codes again.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from omlx_kernels.layout import QUANT_GROUP, Tier, TierBlocks

RANGE_SLACK = 0.0005
"""A little more than half a float16 step (2**-11), relative."""
TINY = 2.0**-24
"""The smallest positive float16."""
SMALLEST_NORMAL = 2.0**-14
"""The smallest float16 that keeps all its bits."""
FLOAT16_MAX = 65504.0


def _asymmetric(
    low: torch.Tensor, high: torch.Tensor, levels: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the float16 (scale, zero) with which codes 0..levels reach from low to high."""
    nearest = low.clamp(-FLOAT16_MAX, FLOAT16_MAX).half()
    below = (low - RANGE_SLACK * low.abs() - TINY).clamp(-FLOAT16_MAX, FLOAT16_MAX).half()
    zero = torch.where(nearest.float() > low, below, nearest)
    return _scale((high - zero.float()) * (1 / levels)), zero


def _scale(step: torch.Tensor) -> torch.Tensor:
    """Round a step between codes to a float16 that still reaches the end of the range."""
    step = step + TINY * (step < SMALLEST_NORMAL)
    return step.clamp(max=FLOAT16_MAX).half()


def quantize_k(k: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize keys per (head, channel) in groups of 64 tokens, asymmetric.

    Args:
        k: [..., num_tokens, head_dim] floating point; num_tokens is a multiple of 64.
        bits: 8 or 4.

    Returns:
        codes uint8 [..., num_tokens, head_dim * bits / 8]; scale and zero float16
        [..., num_tokens / 64, head_dim].
    """
    grouped = k.float().unflatten(-2, (-1, QUANT_GROUP))
    levels = 2**bits - 1
    scale, zero = _asymmetric(grouped.amin(-2), grouped.amax(-2), levels)
    codes = (grouped - zero.float().unsqueeze(-2)) / scale.float().unsqueeze(-2)
    codes = codes.round_().clamp_(0, levels).to(torch.uint8).flatten(-3, -2)
    return codes if bits == 8 else pack(codes), scale, zero


def dequantize_k(
    codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int, dtype: torch.dtype
) -> torch.Tensor:
    """Undo `quantize_k`: return [..., num_tokens, head_dim] in ``dtype`` (float32 or wider)."""
    codes = codes if bits == 8 else unpack(codes)
    grouped = codes.to(dtype).unflatten(-2, (-1, QUANT_GROUP))
    grouped.mul_(scale.to(dtype).unsqueeze(-2)).add_(zero.to(dtype).unsqueeze(-2))
    return grouped.flatten(-3, -2)


def quantize_v8(v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize values to 8 bits per (head, token), symmetric.

    Args:
        v: [..., num_tokens, head_dim] floating point.

    Returns:
        codes int8 in -127..127 [..., num_tokens, head_dim]; scale float16 [..., num_tokens].
    """
    v = v.float()
    scale = _scale(v.abs().amax(-1) * (1 / 127))
    codes = (v / scale.float().unsqueeze(-1)).round_().clamp_(-127, 127)
    return codes.to(torch.int8), scale


def dequantize_v8(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Undo `quantize_v8`: return [..., num_tokens, head_dim] in ``dtype`` (float32 or wider)."""
    return codes.to(dtype).mul_(scale.to(dtype).unsqueeze(-1))


def quantize_v4(v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize (rotated) values to 4 bits per (head, token) in groups of 64 channels, asymmetric.

    Args:
        v: [..., num_tokens, head_dim] floating point; head_dim is even, and its last group may
            have fewer than 64 channels.

    Returns:
        codes uint8 [..., num_tokens, head_dim / 2]; scale and zero float16
        [..., num_tokens, ceil(head_dim / 64)].
    """
    groups = v.float().split(QUANT_GROUP, -1)
    low = torch.stack([g.amin(-1) for g in groups], -1)
    high = torch.stack([g.amax(-1) for g in groups], -1)
    scale, zero = _asymmetric(low, high, 15)
    wide_scale, wide_zero = (_per_channel(x.float(), v.shape[-1]) for x in (scale, zero))
    codes = ((v.float() - wide_zero) / wide_scale).round_().clamp_(0, 15).to(torch.uint8)
    return pack(codes), scale, zero


def dequantize_v4(
    codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Undo `quantize_v4`: return [..., num_tokens, head_dim] in ``dtype`` (float32 or wider)."""
    values = unpack(codes).to(dtype)
    dim = values.shape[-1]
    return values.mul_(_per_channel(scale.to(dtype), dim)).add_(_per_channel(zero.to(dtype), dim))


def _per_channel(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Repeat each group's number over its channels: [..., groups] -> [..., dim]."""
    return x.repeat_interleave(QUANT_GROUP, -1)[..., :dim]


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Pack 4-bit codes uint8 [..., dim] into [..., dim / 2]: channel c low, c + dim/2 high."""
    low, high = codes.chunk(2, -1)
    return low | (high << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Undo `pack`."""
    return torch.cat([packed & 15, packed >> 4], -1)


def quantize_into(dst: TierBlocks, tier: Tier, ids, k: torch.Tensor, v: torch.Tensor) -> None:
    """Quantize whole blocks [blocks, kv_heads, size, dim] into the blocks ``ids`` of a tier."""
    k_bits, v_bits = tier.code_bits
    part = dst.tensors()
    part["k"][ids], part["k_scale"][ids], part["k_zero"][ids] = quantize_k(k, k_bits)
    if v_bits == 8:
        part["v"][ids], part["v_scale"][ids] = quantize_v8(v)
    else:
        part["v"][ids], part["v_scale"][ids], part["v_zero"][ids] = quantize_v4(v)


def read_blocks(
    src: TierBlocks, tier: Tier, ids, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of blocks (pages) ``ids``, as stored: values may be rotated.

    Returns:
        k, v: [blocks, kv_heads, size, dim] in ``dtype`` (float32 or wider).
    """
    if tier.bits is None:
        return src.k[ids].to(dtype), src.v[ids].to(dtype)
    k_bits, v_bits = tier.bits
    part = {name: tensor[ids] for name, tensor in src.tensors().items()}
    k = dequantize_k(part["k"], part["k_scale"], part["k_zero"], k_bits, dtype)
    if v_bits == 8:
        return k, dequantize_v8(part["v"], part["v_scale"], dtype)
    return k, dequantize_v4(part["v"], part["v_scale"], part["v_zero"], dtype)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Rotate the last dimension by an orthonormal, symmetric Hadamard transform: its own inverse.

    A head_dim that is not a power of two is rotated in blocks of the largest power of two that
    divides it (80: 16, 96: 32, 112: 16).

    Args:
        x: [..., head_dim] floating point; computed in float32 or wider.

    Returns:
        The same shape and dtype.
    """
    dim = x.shape[-1]
    size = dim & -dim
    wide = torch.promote_types(x.dtype, torch.float32)
    blocks = x.to(wide).unflatten(-1, (dim // size, size))
    return (blocks @ hadamard_matrix(size).to(x.device, wide)).flatten(-2).to(x.dtype)


@lru_cache
def hadamard_matrix(size: int) -> torch.Tensor:
    """Return the orthonormal Hadamard matrix (Sylvester's) of a power-of-two size, float64."""
    if size == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    half = hadamard_matrix(size // 2)
    rows = (torch.cat([half, half], 1), torch.cat([half, -half], 1))
    return torch.cat(rows) * 2**-0.5
