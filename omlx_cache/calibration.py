"""Measure which layers of a model can't be stored in 4 bits, on a text of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from omlx_cache.config import CacheConfig
from omlx_cache.patching import patched
from omlx_cache.unwrap import unwrap

MIN_TOKENS = 256
_SETTING = {"cache_bits": 4, "block_size": 64, "recent_tokens": 0, "prefill_chunk": 64}
"""So that all that a scored token attends to, but the newest 64 tokens, has been quantized."""


@dataclass(frozen=True)
class Calibration:
    """What 4 bits cost, layer by layer.

    Attributes:
        divergence: for each layer, the mean KL divergence in nats of the next-token distributions
            when it alone is stored in 4 bits, from those when all layers are stored in 8.
        limit: nats from which on a layer should stay at 8 bits.
    """

    divergence: tuple[float, ...]
    limit: float

    @property
    def keep_layers(self) -> list[int]:
        """The layers beyond the limit, for `CacheConfig.keep_layers`."""
        return [i for i, nats in enumerate(self.divergence) if nats > self.limit]


@torch.no_grad()
def calibrate(
    model: Any,
    input_ids: torch.Tensor,
    *,
    limit: float = 0.0005,
    progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """Find the layers that a text shows to be worse off in 4 bits than others.

    Reads the text once for each layer, and once more. `patch` by itself goes by what it reads from
    the weights; this measures, and so it also finds what has other reasons than a bias.

    Args:
        model: what `patch` takes, patched or not; it is left as it was, but for what
            ``prefix_cache`` kept, which is let go.
        input_ids: [1, num_tokens] int64, at least 256 tokens of text as the model will read it.
            The second half is scored.
        limit: nats beyond which a layer is named in ``keep_layers``. An ordinary layer loses about
            .00005.
        progress: called with the number of readings done and of all of them.

    Raises:
        ValueError: for too short a text, or more than one.
        NotImplementedError: with the reason, for a model that can't be served.

    Example:
        >>> found = omlx_cache.calibrate(model, tokenizer(text, return_tensors="pt").input_ids)
        ... # doctest: +SKIP
        >>> omlx_cache.patch(model, cache_bits=4, keep_layers=found.keep_layers)  # doctest: +SKIP
    """
    if input_ids.ndim != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] < MIN_TOKENS:
        raise ValueError(
            f"omlx_cache.calibrate: input_ids must be one text of at least {MIN_TOKENS} tokens, "
            f"[1, num_tokens], got {list(input_ids.shape)}; pass "
            f"tokenizer(text, return_tensors='pt').input_ids of a longer text"
        )
    inner = unwrap(model)
    num_layers = inner.config.get_text_config(decoder=True).num_hidden_layers
    scored = input_ids.shape[1] // 2
    layers = list(range(num_layers))

    def read(kept: list[int], done: int) -> torch.Tensor:
        with patched(model, CacheConfig(**_SETTING, keep_layers=kept)):
            logits = inner(input_ids.to(inner.device), logits_to_keep=scored).logits[0]
        if progress is not None:
            progress(done, num_layers + 1)
        return logits.float().log_softmax(-1)

    reference = read(layers, 1)
    divergence = []
    for layer in layers:
        found = read([i for i in layers if i != layer], layer + 2)
        nats = (reference.exp() * (reference - found)).sum(-1).mean()
        divergence.append(nats.item())
    return Calibration(tuple(divergence), limit)
