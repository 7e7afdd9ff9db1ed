"""Stand the queries of a rotary model closer to the sinks than they are.

A window can slide as far as a chat goes, but the pinned sink tokens stay at positions
``0 .. sink_tokens - 1``, and past the trained length a model has never seen such distances: the
sinks then do harm instead of good. So a query at position ``p`` looks at the sinks outside of its
window of ``w`` tokens from position ``min(p, w)``. Rotations add up, ``R(w) q = R(w - p) R(p) q``,
so the rotated query is rotated once more by ``min(w - p, 0)`` and no stored key changes.

Which channels turn together, and how fast, differs between models, and between the layers of one:
layers may have frequencies of their own, or not rotate at all.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import nn

from omlx_cache.attention_source import read_source


@dataclass(frozen=True)
class Rotation:
    """How a layer rotates its queries and keys.

    Attributes:
        inv_freq: [rotary_dim / 2] float32 radians per position; their sign is the direction.
        is_interleaved: whether channels ``2 i, 2 i + 1`` turn together (GPT-J, GLM, Cohere)
            instead of ``i, i + rotary_dim / 2`` (Llama).
    """

    inv_freq: torch.Tensor
    is_interleaved: bool = False

    def to(self, device: torch.device) -> Rotation:
        """Return the same rotation with its frequencies on ``device``."""
        return Rotation(self.inv_freq.to(device), self.is_interleaved)

    def rotate(self, q: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Rotate queries by a number of positions each.

        Args:
            q: [num_tokens, heads, head_dim]; only the first ``rotary_dim`` channels rotate.
            offsets: [num_tokens] float32 positions to move by; negative is towards position 0.

        Returns:
            The same shape and dtype; computed in float32.
        """
        half = self.inv_freq.shape[0]
        angles = offsets[:, None] * self.inv_freq
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        rotary = q[..., : 2 * half].float()
        a, b = (
            (rotary[..., ::2], rotary[..., 1::2])
            if self.is_interleaved
            else (rotary[..., :half], rotary[..., half:])
        )
        # [..., rotary_dim / 2, 2], or [..., 2, rotary_dim / 2]
        turned = torch.stack(
            (a * cos - b * sin, b * cos + a * sin), -1 if self.is_interleaved else -2
        )
        return torch.cat([turned.flatten(-2).to(q.dtype), q[..., 2 * half :]], -1)


@dataclass(frozen=True)
class SinkDistance:
    """How far from the sinks a layer's queries may stand.

    Attributes:
        rotation: moves a query to where it looks at the sinks from; None leaves it where it is.
        can_pin: whether sinks may stay visible outside of the window at all.
    """

    rotation: Rotation | None
    can_pin: bool


def sink_distance(decoder: nn.Module, attention: nn.Module, head_dim: int) -> SinkDistance:
    """Find out how an attention module of ``decoder`` may look at pinned sinks.

    A module that doesn't rotate knows no distances, and one whose frequencies follow the length of
    the text is made for any distance: sinks stay pinned and queries where they are. Where a module
    rotates in a way that isn't understood, which is found by asking its own rotary function, the
    sinks leave with the window like any other token.
    """
    source = read_source(type(attention))
    if source.rotates(attention) is False:
        return SinkDistance(None, can_pin=True)
    embedding = getattr(decoder, "rotary_emb", None)
    layer_types = getattr(decoder.config, "layer_types", None)
    layer_type = layer_types[attention.layer_idx] if layer_types else None
    if follows_length(embedding, layer_type):
        return SinkDistance(None, can_pin=True)
    # What is normalized channel by channel can't be rotated on, and where an image takes fewer
    # positions than tokens a count of tokens says nothing of distances.
    rotation = None
    if not source.normalizes_rotated and not hasattr(embedding, "mrope_section"):
        rotation = _rotation(embedding, layer_type, attention, head_dim)
    return SinkDistance(rotation, can_pin=rotation is not None)


def follows_length(embedding: nn.Module | None, layer_type: str | None = None) -> bool:
    """Whether the frequencies of a rotary embedding follow the length of what runs at once.

    Args:
        embedding: a rotary embedding of transformers, which may hold frequencies for each type of
            layer; None never does.
        layer_type: the type to ask for; None is any.
    """
    kinds = getattr(embedding, "rope_type", None)
    if isinstance(kinds, dict):
        kinds = [kinds.get(layer_type)] if layer_type else list(kinds.values())
    else:
        kinds = [kinds]
    return any(kind is not None and ("dynamic" in kind or kind == "longrope") for kind in kinds)


def _rotation(
    embedding: nn.Module | None, layer_type: str | None, attention: nn.Module, head_dim: int
) -> Rotation | None:
    """Return the rotation that the module's own rotary function makes; None when it is another."""
    apply = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    inv_freq = getattr(embedding, f"{layer_type}_inv_freq", getattr(embedding, "inv_freq", None))
    if apply is None or inv_freq is None or inv_freq.is_meta:
        return None
    inv_freq = inv_freq.detach().float().cpu()
    known = [Rotation(sign * inv_freq, pairs) for sign in (1, -1) for pairs in (False, True)]
    offsets = torch.tensor([0.0, -3.0])
    angles = offsets[:, None] * inv_freq
    # The function takes all channels, or only the first ones, those that turn.
    for dim in (head_dim, 2 * inv_freq.shape[0]):
        probe = torch.linspace(-1, 1, dim).expand(1, 1, 2, -1).contiguous()
        for table in (angles.repeat(1, 2), angles.repeat_interleave(2, 1), angles):
            try:
                turned = apply(probe, probe, table.cos()[None], table.sin()[None])[0]
            except (RuntimeError, TypeError):  # another number of channels, another signature
                continue
            for rotation in known:
                expected = rotation.rotate(probe[0].transpose(0, 1), offsets).transpose(0, 1)
                if turned.shape == probe.shape and torch.allclose(turned[0], expected, atol=1e-5):
                    return rotation
    return None
