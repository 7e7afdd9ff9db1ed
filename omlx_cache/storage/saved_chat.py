"""A chat in one file: a saved cache (`omlx_cache.storage.saved_cache`) with the chat beside it.

The cache begins with what the prefix store knows of the chat's token ids, and its blocks go back
into the store of the model that the file is loaded for.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from omlx_cache.cache import PagedCache
from omlx_cache.patch_state import state_of
from omlx_cache.storage.fingerprint import (
    block_fingerprint,
    template_fingerprint,
    tokenizer_fingerprint,
)
from omlx_cache.storage.saved_cache import SavedCache

VERSION = 1


def save_chat(
    path: str | os.PathLike[str], model: nn.Module, tokenizer: Any, chat: Mapping[str, Any]
) -> None:
    """Write a chat and what the model's prefix store has of it.

    Args:
        path: of the file.
        model: patched, with ``prefix_cache``.
        tokenizer: of the chat.
        chat: as JSON can; ``chat["ids"]`` are its token ids.

    Raises:
        OSError: the file can't be written; one of that name is as it was.
    """
    cache = PagedCache(model)
    ids = chat["ids"]
    if ids:
        # A prompt's last token is always computed: one more, and all of the chat may be found.
        prompt = torch.tensor([[*ids, 0]])
        cache.record(prompt, np.ones(tuple(prompt.shape), bool))
    extra = {
        "version": VERSION,
        "blocks": block_fingerprint(cache, state_of(model).spec.decoder).hex(),
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "chat template": template_fingerprint(tokenizer),
        "chat": dict(chat),
    }
    cache.save(path, extra=extra)


def load_chat(path: str | os.PathLike[str], model: nn.Module, tokenizer: Any) -> dict[str, Any]:
    """Put the blocks of a saved chat into the model's prefix store, and return the chat.

    Raises:
        OSError: the file can't be read.
        ValueError: the file is damaged or no chat, or one of another model, tokenizer, chat
            template or cache format.
        OutOfBlocksError: it has more blocks than ``max_gpu_blocks``.
    """
    saved = SavedCache(path, caller="ChatSession.load")
    if saved.extra.get("version") != VERSION or "chat" not in saved.extra:
        raise ValueError(
            f"ChatSession.load: {path} must hold a chat, got a cache without one; read it with "
            f"omlx_cache.PagedCache.load(path, model)"
        )
    present = {
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "chat template": template_fingerprint(tokenizer),
    }
    for what, fingerprint in present.items():
        if saved.extra[what] != fingerprint:
            raise ValueError(
                f"ChatSession.load: {path} must be a chat with this tokenizer, got one whose "
                f"{what} differs; load the tokenizer that it was saved with"
            )
    cache = saved.restore(model)
    if saved.extra["blocks"] != block_fingerprint(cache, state_of(model).spec.decoder).hex():
        cache.reset()
        raise ValueError(
            f"ChatSession.load: {path} must be a chat with a model that is patched as this one, "
            f"got blocks of another precision; patch(model, ...) with the configuration that it "
            f"was saved with: {saved.changed_keys(cache)}"
        )
    chat = saved.extra["chat"]
    if columns := cache.get_seq_length():
        cache.keep_as(torch.tensor([chat["ids"][:columns]]))
    return chat


def is_saved_chat(path: str | os.PathLike[str]) -> bool:
    """Whether a file is a whole chat that `save_chat` wrote."""
    try:
        return "chat" in SavedCache(path).extra
    except (OSError, ValueError):
        return False
