"""`prefetch`: read a text's blocks from disk before the call that begins with them."""

from __future__ import annotations

import logging
from threading import Thread
from typing import Any

import numpy as np
import torch

from omlx_cache.cache import PagedCache
from omlx_cache.patch_state import PatchState, state_of

logger = logging.getLogger(__name__)


def prefetch(
    model: Any, ids: torch.Tensor, attention_mask: torch.Tensor | None = None
) -> Thread | None:
    """Begin to read what the disk has of texts, so that the call that continues them waits less.

    Returns at once; a thread reads. Call it when it is likely that a chat goes on: when it is
    opened, or when its user begins to type. What was read is used by the next ``generate`` whose
    prompt begins with it, and forgotten when other texts need its room. It changes no result: what
    isn't there in time is read by the call itself.

    Args:
        model: a patched model. Without ``disk_cache``, or with ``prefetch: false``, nothing
            happens.
        ids: [rows, columns] or [columns] token ids, of which the prompts will begin.
        attention_mask: like ids, 1 for tokens and 0 for padding; None: all are tokens.

    Returns:
        The thread that looks for what there is to read, to be waited for by who wants to; None:
        there is nothing to do.

    Raises:
        ValueError: when the model is not patched, or ids have another shape.

    Example:
        >>> omlx_cache.patch(model, disk_cache=True)             # doctest: +SKIP
        >>> omlx_cache.prefetch(model, ids)                      # doctest: +SKIP
        >>> model.generate(ids, max_new_tokens=64)               # doctest: +SKIP
    """
    state = state_of(model)
    rows = torch.atleast_2d(torch.as_tensor(ids)).detach().long().cpu()
    mask = torch.ones_like(rows) if attention_mask is None else torch.atleast_2d(attention_mask)
    if rows.dim() != 2 or mask.shape != rows.shape:
        raise ValueError(
            f"omlx_cache.prefetch: ids must be [rows, columns], and attention_mask alike, got "
            f"{list(rows.shape)} and {list(mask.shape)}"
        )
    if not (state.config.disk_cache and state.config.prefetch):
        return None
    real = mask.detach().cpu().numpy() != 0
    texts = [row[own] for row, own in zip(rows.numpy(), real, strict=True)]
    thread = Thread(target=_expect, args=(state, texts), name="omlx_cache prefetch", daemon=True)
    thread.start()
    return thread


def _expect(state: PatchState, texts: list[np.ndarray]) -> None:
    try:
        cache = PagedCache.for_patch(state)
        cache.expect(texts)
    except Exception:  # nobody waits for it, and the call itself will say what is wrong
        logger.warning("omlx_cache.prefetch: nothing was read ahead", exc_info=True)
