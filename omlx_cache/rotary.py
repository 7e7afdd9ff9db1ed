"""Stand the queries of a rotary model closer to the sinks than they are.

A window can slide as far as a chat goes, but the pinned sink tokens stay at positions
``0 .. sink_tokens - 1``, and past the trained length a model has never seen such distances: the
sinks then do harm instead of good. So a query at position ``p`` looks at the sinks outside of its
window of ``w`` tokens from position ``min(p, w)``. Rotations add up, ``R(w) q = R(w - p) R(p) q``,
so the rotated query is rotated once more by ``min(w - p, 0)`` and no stored key changes.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

# Rotary embeddings whose frequencies don't depend on the length of the text.
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")


def rotate(q: torch.Tensor, offsets: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """Rotate queries by a number of positions each, in the half-split convention of Llama.

    Args:
        q: [num_tokens, heads, head_dim]; only the first ``2 * len(inv_freq)`` channels rotate.
        offsets: [num_tokens] float32 positions to move by; negative is towards position 0.
        inv_freq: [rotary_dim / 2] float32 radians per position.

    Returns:
        The same shape and dtype; computed in float32.
    """
    half = inv_freq.shape[0]
    angles = offsets[:, None] * inv_freq
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = q[..., :half].float(), q[..., half : 2 * half].float()
    turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(q.dtype)
    return torch.cat([turned, q[..., 2 * half :]], -1)


def inverse_frequencies(decoder: nn.Module, attention: nn.Module) -> torch.Tensor | None:
    """Return the radians per position with which an attention module of ``decoder`` rotates.

    Returns:
        [rotary_dim / 2] float32 on the CPU; None when the module doesn't rotate by `rotate` with
        constant frequencies, which is found by asking the module's own rotary function.
    """
    embedding = getattr(decoder, "rotary_emb", None)
    apply = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    inv_freq = getattr(embedding, "inv_freq", None)
    if apply is None or inv_freq is None or inv_freq.is_meta:
        return None
    if getattr(embedding, "rope_type", "default") not in _STATIC_ROPE:
        return None
    if not getattr(attention, "use_rope", True):
        return None
    inv_freq = inv_freq.detach().float().cpu()
    probe = torch.linspace(-1, 1, attention.head_dim).expand(1, 1, 2, -1).contiguous()
    offsets = torch.tensor([0.0, -3.0])
    angles = (offsets[:, None] * inv_freq).repeat(1, 2)[None]
    try:
        turned, _ = apply(probe, probe, angles.cos(), angles.sin())
    except (RuntimeError, TypeError):  # another signature, another convention: not ours
        return None
    expected = rotate(probe[0].transpose(0, 1), offsets, inv_freq)
    return inv_freq if torch.allclose(turned[0].transpose(0, 1), expected, atol=1e-5) else None
