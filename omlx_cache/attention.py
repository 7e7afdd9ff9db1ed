"""Where a model's attention layers meet the cache.

`PagedAttention` stands in a model where an attention module stood, and owns it: projections,
rotary embedding, GPTQ kernels, adapters and hooks keep running as they are. It only tells the
original which cache serves it, through the keyword arguments that every attention
module of transformers hands on to its attention function, and that function is
`paged_attention_forward`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn

from omlx_cache import compiled
from omlx_cache.attention_weights import attention_weights
from omlx_cache.cache import PagedCache
from omlx_cache.compat import Cache, register_attention
from omlx_cache.paged_layer import PagedLayer

ATTENTION_NAME = "omlx_paged"
"""``config._attn_implementation`` of a patched model."""

_CACHE_ARGUMENT = "omlx_cache"


class PagedAttention(nn.Module):
    """An attention module whose keys and values go to a `PagedCache`.

    It shares its original's children, parameters and buffers, so that names, ``state_dict``,
    ``.to()`` and adapters added later work as before; everything else is looked up on the original.

    Args:
        original: the attention module to own; it must have a ``layer_idx``.
    """

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.__dict__["original"] = original  # not a child: names must stay what they were
        for shared in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[shared] = original.__dict__[shared]
        self.training = original.training

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # "original": while unpickling or copying. A hook of accelerate is each module's own.
            if name in ("original", "_hf_hook", "_old_forward"):
                raise
            return getattr(self.__dict__["original"], name)

    def train(self, mode: bool = True) -> PagedAttention:
        """Set the mode of the original too, which is not a child."""
        self.original.train(mode)
        return super().train(mode)

    def hand_back(self) -> nn.Module:
        """Return the original, and give it the hook that accelerate has put on this module."""
        hook = self.__dict__.get("_hf_hook")
        if hook is not None:
            hooks = import_module("accelerate.hooks")
            hooks.remove_hook_from_module(self)
            hooks.add_hook_to_module(self.original, hook, append=True)
        return self.original

    def extra_repr(self) -> str:
        """Name the module that is owned."""
        return f"original={type(self.original).__name__}"

    def forward(self, *args, **kwargs):
        """Run the original with the cache that serves it."""
        # Its name differs between models and versions, and some pass it by position.
        cache = next((x for x in (*args, *kwargs.values()) if isinstance(x, Cache)), None)
        if not isinstance(cache, PagedCache):
            if self.original.config._attn_implementation != ATTENTION_NAME:
                return self.original(*args, **kwargs)  # a stock call
            raise TypeError(
                f"PagedAttention: the cache must be a PagedCache, got {type(cache).__name__}; call "
                f"the patched model (or its decoder), not a layer of it"
            )
        layer = cache.layers[self.original.layer_idx]
        layer.pending = None
        output = self.original(*args, **{**kwargs, _CACHE_ARGUMENT: cache})
        if layer.pending is not None:
            raise RuntimeError(
                f"omlx_cache: {type(self.original).__name__} stored keys and values but attended "
                f"with another function; set_attn_implementation can't be used on a patched model, "
                f"call omlx_cache.unpatch(model) first"
            )
        return output


class _RefuseBackward(torch.autograd.Function):
    """Identity on ``out`` that depends on ``query`` and fails when a gradient arrives."""

    @staticmethod
    def forward(ctx, out: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        raise RuntimeError(
            "omlx_cache: paged attention has no backward pass; call omlx_cache.unpatch(model) to "
            "train, or run the forward pass under torch.no_grad()"
        )


def paged_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Attend through the block table; the function behind ``ATTENTION_NAME``.

    Args:
        module: the original attention module.
        query: [batch, num_q_heads, columns, head_dim], rotated.
        key, value: what `PagedLayer.update` was given and returned.
        attention_mask: None always: the patched decoder turns masks into stored columns.
        scaling: factor on the scores; None is ``head_dim ** -0.5``.
        softcap: scores become ``softcap * tanh(score / softcap)``; None leaves them.
        s_aux: [num_q_heads] learned scores that take part in the softmax and carry no value.
        kwargs: whatever else the module hands on; `omlx_cache.inspection` has refused models
            that name arguments which would have to be heeded.

    Returns:
        [batch, columns, num_q_heads, head_dim], and None for the weights: where they are wanted,
        the cache collects them.
    """
    cache: PagedCache | None = kwargs.get(_CACHE_ARGUMENT)
    if cache is None or attention_mask is not None:
        raise RuntimeError(
            f"omlx_cache: {type(module).__name__} was called outside of its patched model; call "
            f"the model, or omlx_cache.unpatch(model) first"
        )
    layer: PagedLayer = cache.layers[module.layer_idx]
    if layer.pending is None or layer.pending[0] is not key or layer.pending[1] is not value:
        raise NotImplementedError(
            f"omlx_cache: {type(module).__name__} can't be served: it attends to other keys and "
            f"values than it has stored; call omlx_cache.unpatch(model)"
        )
    layer.pending = None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if torch.compiler.is_compiling():
        # As an op it has no backward either, and torch says so.
        tensors = (query, key, value)
        out = compiled.attend(cache.handle, module.layer_idx, *tensors, scale, softcap, s_aux)
        return out, None
    out = layer.attend(query.detach(), key, value, scale, softcap=softcap, sink_logits=s_aux)
    if cache.steps.weights is not None:
        valid = cache.steps.columns()
        weights = attention_weights(
            layer, valid, query.detach(), scale, softcap=softcap, sink_logits=s_aux
        )
        cache.steps.weights.append(weights)
    if torch.is_grad_enabled() and query.requires_grad:
        out = _RefuseBackward.apply(out, query)
    return out, None


def register() -> None:
    """Make `paged_attention_forward` known to transformers; `patch` does, importing does not."""
    register_attention(ATTENTION_NAME, paged_attention_forward)
