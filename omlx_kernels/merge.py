"""Attention over disjoint sets of keys, merged into attention over all of them.

    lse = log sum_i exp(lse_i)        out = sum_i exp(lse_i - lse) out_i

For example what a sequence keeps on its device, and what was moved to the CPU's memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from omlx_kernels.errors import describe


def merge_attention(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Merge what `omlx_kernels.ops.paged_attention` gave for disjoint sets of keys.

    Args:
        parts: at least one (out, lse), all of the same queries on one device: out
            [num_tokens, num_q_heads, head_dim] of any float dtype, lse [num_tokens, num_q_heads]
            float32, natural logarithms; -inf where a query sees no key of the part, whose out
            does not count then.

    Returns:
        [num_tokens, num_q_heads, head_dim] in the first out's dtype, computed in float32; 0 where
        every lse is -inf.

    Raises:
        ValueError: for no parts, or a wrong shape, dtype or device.

    Example:
        >>> seen = torch.tensor([[0.0]]), torch.tensor([[-torch.inf]])
        >>> merge_attention([(torch.ones(1, 1, 2), seen[0]), (torch.full((1, 1, 2), 3.0), seen[0])])
        tensor([[[2., 2.]]])
        >>> merge_attention([(torch.ones(1, 1, 2), seen[0]), (torch.zeros(1, 1, 2), seen[1])])
        tensor([[[1., 1.]]])
    """
    _check(parts)
    lse = torch.stack([part_lse for _, part_lse in parts])  # [parts, num_tokens, num_q_heads]
    top = lse.amax(0)
    weights = torch.exp(lse - top.masked_fill(top == float("-inf"), 0.0))
    weights = weights / weights.sum(0).masked_fill(top == float("-inf"), 1.0)
    merged = torch.zeros(parts[0][0].shape, dtype=torch.float32, device=top.device)
    for (out, part_lse), weight in zip(parts, weights, strict=True):
        unseen = (part_lse == float("-inf"))[..., None]
        merged += (out.float() * weight[..., None]).masked_fill(unseen, 0.0)
    return merged.to(parts[0][0].dtype)


def _check(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    op = "merge_attention"
    if not parts:
        raise ValueError(describe(op, "parts", "at least one (out, lse)", "none"))
    first = parts[0][0]
    for i, (out, lse) in enumerate(parts):
        shape = list(first.shape)
        if first.dim() != 3 or out.shape != first.shape or not out.is_floating_point():
            expected = f"floats [num_tokens, num_q_heads, head_dim], shaped like the first {shape}"
            raise ValueError(describe(op, f"parts[{i}] out", expected, f"{out.dtype} {out.shape}"))
        if lse.shape != first.shape[:2] or lse.dtype != torch.float32:
            expected = f"float32 [num_tokens={shape[0]}, num_q_heads={shape[1]}]"
            raise ValueError(describe(op, f"parts[{i}] lse", expected, f"{lse.dtype} {lse.shape}"))
        if out.device != first.device or lse.device != first.device:
            expected = f"on {first.device} like the first out"
            got = f"out on {out.device}, lse on {lse.device}"
            raise ValueError(describe(op, f"parts[{i}]", expected, got, "call .to(device)"))
