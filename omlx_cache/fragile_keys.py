"""Find the layers whose keys would be lost in 4 bits, from the biases of their projections.

A bias adds the same vector to every key, and that is harmless as long as it stays the same: a
group of 64 keys is stored relative to its minimum. Rotation makes a wave of it. Two channels that
turn by ``theta`` a token swing by up to twice their bias within a group, 4 bits divide the swing
into 15 steps, and what the text itself says may be smaller than one step. Some models of the Qwen2
family have biases of several hundreds beside keys of about 1.

With steps ``s_c`` in channel ``c`` and queries of mean square ``q_c ** 2``, rounding moves a score
by a variance of ``1 / D sum(q_c ** 2 s_c ** 2 / 12)``, and the attention's distribution by a KL
divergence of about half of it. Measured on a real model to which biases were added, this
estimate is 3 to 7 times too high; ordinary keys lose .002 to .02 nats a layer in 4 bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from omlx_cache.attention_source import read_source
from omlx_cache.rotary import Rotation, SinkDistance
from omlx_kernels.layout import QUANT_GROUP

LIMIT = 0.03
"""Nats of a layer's attention, as estimated, from which on its keys stay at 8 bits."""

_QUERY_RMS = 2.0
"""Of a channel of a query, beside its bias."""
_PHASES = 32
_OUTPUTS = {"o_proj", "out_proj", "dense", "c_proj"}
"""Names of output projections, whose biases never reach a key."""


def has_fragile_keys(attention: nn.Module, head_dim: int, sinks: SinkDistance) -> bool:
    """Whether the keys of an attention module lose too much in 4 bits, as far as biases tell.

    Args:
        attention: the module; its projections may be quantized or carry adapters.
        head_dim: channels of a head.
        sinks: how it rotates.

    Returns:
        True also where a bias can't be read, or turns in a way that isn't known and is large.
    """
    if read_source(type(attention)).rotates(attention) is False:
        return False
    try:
        biases = [_by_head(bias, head_dim) for bias in _key_biases(attention)]
    except _UnreadableError:
        return True
    if not biases:
        return False
    keys = torch.cat(biases)
    queries = _query_bias(attention, head_dim, len(keys))
    return bool(estimated_divergence(keys, queries, sinks.rotation).max() > LIMIT)


def estimated_divergence(
    keys: torch.Tensor, queries: torch.Tensor, rotation: Rotation | None
) -> torch.Tensor:
    """Estimate what 4-bit keys do to the attention of heads with these biases.

    Args:
        keys: [num_kv_heads, head_dim] float32.
        queries: the same, root mean square of the biases of the queries that read them.
        rotation: None where it isn't known: then every channel swings all the way.

    Returns:
        [num_kv_heads] nats, too high rather than too low.
    """
    dim = keys.shape[-1]
    if rotation is None:
        energy, per_query, swing = keys.square(), queries.square(), torch.tensor(2.0)
    else:
        keys, queries = (_pairs(x, rotation) for x in (keys, queries))
        energy, per_query = keys.square().sum(-1), queries.square().mean(-1)
        swing = _swing(rotation.inv_freq)
    step = energy.sqrt() * swing / 15
    channels = 1 if rotation is None else 2
    variance = channels * (_QUERY_RMS**2 + per_query) * step.square() / 12
    return variance.sum(-1) / (2 * dim)


def _pairs(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Return the channels that turn together: [..., dim] -> [..., rotary_dim / 2, 2]."""
    half = rotation.inv_freq.shape[0]
    x = x[..., : 2 * half]
    return (
        x.unflatten(-1, (half, 2)) if rotation.is_interleaved else torch.stack(x.chunk(2, -1), -1)
    )


def _swing(inv_freq: torch.Tensor) -> torch.Tensor:
    """Return how far ``cos(theta t + phase)`` swings in a group of tokens, rms over the phases."""
    tokens = torch.arange(QUANT_GROUP, dtype=torch.float32)
    phases = torch.arange(_PHASES) * (2 * torch.pi / _PHASES)
    waves = torch.cos(inv_freq[:, None, None] * tokens + phases[:, None])
    return (waves.amax(-1) - waves.amin(-1)).square().mean(-1).sqrt()


class _UnreadableError(Exception):
    """A bias lies where it can't be read now."""


def _key_biases(attention: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the biases that may reach a key.

    Where keys are normalized after their projection only the bias of that does. A fused projection
    holds keys somewhere among queries and values, head by head or one after the other: all of it
    is looked at.
    """
    children = dict(attention.named_children())
    norms = [m for n, m in children.items() if "norm" in n and n.startswith(("k_", "key_"))]
    if norms:
        sources = norms
    elif "k_proj" in children:
        sources = [children["k_proj"]]
    else:
        sources = [m for n, m in children.items() if n not in _OUTPUTS]
    for source in sources:
        bias = _bias_of(source)
        if bias is not None:
            yield bias


def _bias_of(projection: nn.Module) -> torch.Tensor | None:
    bias = getattr(projection, "bias", None)
    if not isinstance(bias, torch.Tensor):
        return None
    if bias.is_meta:  # as where accelerate keeps weights on a disk
        raise _UnreadableError
    if hasattr(bias, "to_local"):  # tensor parallel: this process stores the keys of these heads
        bias = bias.to_local()
    return bias.detach().float().cpu()


def _by_head(bias: torch.Tensor, head_dim: int) -> torch.Tensor:
    if bias.numel() % head_dim:
        raise _UnreadableError
    return bias.view(-1, head_dim)


def _query_bias(attention: nn.Module, head_dim: int, num_kv_heads: int) -> torch.Tensor:
    """Return the root mean square of the bias over the query heads of each KV head."""
    projection = getattr(attention, "q_proj", None)
    bias = None if projection is None else _bias_of(projection)
    if bias is None or bias.numel() % (num_kv_heads * head_dim):
        return torch.zeros(num_kv_heads, head_dim)
    return bias.view(num_kv_heads, -1, head_dim).square().mean(1).sqrt()
