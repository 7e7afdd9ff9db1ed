"""The quantizers of the cache in plain torch: what every kernel must reproduce.

``x ~ code * scale + zero``. Scales and zeros are stored as float16, and the codes are computed
against the *stored* (rounded) values. Rounding never loses the ends of the range: the zero is
pushed down and the scale up by a little more than half a float16 step before they are rounded, so
that ``|x - x_hat| <= scale / 2`` holds for every input within +-65504, constant and zero rows
included (`RANGE_SLACK`, `TINY`: no special cases, nothing divides by zero).
"""

from __future__ import annotations

import torch

from omlx_kernels.layout import QUANT_GROUP

RANGE_SLACK = 0.0005
"""A little more than half a float16 step (2**-11), relative."""
TINY = 2.0**-24
"""The smallest positive float16."""
FLOAT16_MAX = 65504.0


def quantize_k8(k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize keys to 8 bits per (head, channel) in groups of 64 tokens, asymmetric.

    Args:
        k: [..., num_tokens, head_dim] floating point; num_tokens is a multiple of 64.

    Returns:
        codes uint8 [..., num_tokens, head_dim]; scale and zero float16
        [..., num_tokens / 64, head_dim].
    """
    grouped = k.float().unflatten(-2, (-1, QUANT_GROUP))
    low, high = grouped.amin(-2), grouped.amax(-2)
    zero = (low - RANGE_SLACK * low.abs() - TINY).clamp(-FLOAT16_MAX, FLOAT16_MAX).half()
    scale = (high - zero.float()) * ((1 + RANGE_SLACK) / 255) + TINY
    scale = scale.clamp(max=FLOAT16_MAX).half()
    codes = (grouped - zero.float().unsqueeze(-2)) / scale.float().unsqueeze(-2)
    return codes.round_().clamp_(0, 255).to(torch.uint8).flatten(-3, -2), scale, zero


def dequantize_k8(
    codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Undo `quantize_k8`: return [..., num_tokens, head_dim] in ``dtype`` (float32 or wider)."""
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
    scale = v.abs().amax(-1) * ((1 + RANGE_SLACK) / 127) + TINY
    scale = scale.clamp(max=FLOAT16_MAX).half()
    codes = (v / scale.float().unsqueeze(-1)).round_().clamp_(-127, 127)
    return codes.to(torch.int8), scale


def dequantize_v8(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Undo `quantize_v8`: return [..., num_tokens, head_dim] in ``dtype`` (float32 or wider)."""
    return codes.to(dtype).mul_(scale.to(dtype).unsqueeze(-1))
