"""One rank of ``test_tensor_parallel``: load, generate, patch, generate again, save what came out.

Run as ``torchrun tensor_parallel_worker.py FOLDER``; FOLDER/<family> holds the models.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tiny import greedy, left_padded, random_ids
from transformers import AutoModelForCausalLM

import omlx_cache
from omlx_cache.compat import cache_name

SETTINGS = {"block_size": 64, "recent_tokens": 0, "prefill_chunk": 48}
INPUTS = left_padded(random_ids(2, 150), [150, 40])


def texts(model) -> dict[str, torch.Tensor]:
    """Greedy text and beams."""
    return {
        "greedy": greedy(model, INPUTS, 8),
        "beams": greedy(model, INPUTS, 8, num_beams=3, pad_token_id=0),
    }


@torch.no_grad()
def logits_and_heads(model) -> tuple[torch.Tensor, int]:
    """Logits of a prompt and of the columns after it, and the key heads of this process' cache."""
    cache = omlx_cache.PagedCache(model)
    name, ids = cache_name(type(model).forward), INPUTS["input_ids"][:1]
    model(ids[:, :140], **{name: cache})
    logits = model(ids[:, 140:], **{name: cache}).logits
    return logits, cache.layers[0].pool.format.num_kv_heads


def results(model) -> dict:
    """Everything that must not depend on the number of processes."""
    said = {"stock": texts(model)}
    with omlx_cache.patched(model, **SETTINGS, cache_bits=16):
        said["patched"] = texts(model)
    with omlx_cache.patched(model, **SETTINGS, cache_bits=8, window_size=100):
        said["logits"], said["heads"] = logits_and_heads(model)
    return said


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    found = {}
    for path in sorted(p for p in folder.iterdir() if p.is_dir()):
        model = AutoModelForCausalLM.from_pretrained(
            path, tp_plan="auto", attn_implementation="eager"
        )
        found[path.name] = results(model.eval())
    torch.save(found, folder / f"rank{torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()
