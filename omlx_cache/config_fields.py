"""The keys of the configuration: section, default, what is accepted, and what each one does.

kv_cache:      block_size, max_gpu_blocks, cpu_offload, max_cpu_blocks, recall, recall_blocks,
               disk_cache, max_disk_bytes, prefetch, recent_tokens, prefill_chunk, prefix_cache,
               prefix_cache_blocks
quantization:  model_bits, cache_bits, tiers, target_saving, keep_layers
attention:     window_size, sink_tokens, pruning, prune_ratio
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from omlx_cache.config_types import Bits, Directory, KVBits, Positive, Tiers, WeightBits, key


class ConfigFields(BaseModel):
    """The fields of `omlx_cache.config.CacheConfig`, which reads and checks them."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", protected_namespaces=())

    block_size: int = key(
        "kv_cache",
        256,
        "a multiple of 64 from 64 to 4096",
        "Tokens in one block: the unit of allocation, precision conversion and release. Small "
        "blocks leave less room unused at the end of a sequence, large blocks need less "
        "bookkeeping. Start from 256.",
        multiple_of=64,
        ge=64,
        le=4096,
    )
    max_gpu_blocks: Positive | None = key(
        "kv_cache",
        None,
        "an integer of at least 1, or null (no bound)",
        "The most blocks that the pool on the model's device may hold at once: over all sequences, "
        "counted once for each group of layers that share a block table, whatever a block's "
        "precision. Where a step needs more, blocks move away with cpu_offload, or are dropped "
        "with pruning; else it raises OutOfBlocksError and leaves the cache as it was. null: the "
        "pool grows as needed.",
    )
    cpu_offload: bool = key(
        "kv_cache",
        False,
        "true or false",
        "Whether blocks move to CPU memory when max_gpu_blocks leaves no room for new ones: those "
        "that are worth least, see pruning. They are still attended to, as recall says.",
    )
    max_cpu_blocks: Positive | None = key(
        "kv_cache",
        None,
        "an integer of at least 1, or null (no bound)",
        "The most blocks in CPU memory, counted as max_gpu_blocks is. When it is reached, blocks "
        "that only prefix_cache holds leave first, the least recently used ones (with disk_cache "
        "they are read back from disk); then, with pruning, the least valuable are dropped; "
        "without, the step raises OutOfBlocksError.",
    )
    recall: Literal["all", "topk"] = key(
        "kv_cache",
        "all",
        "all or topk",
        "Which of the blocks in CPU memory a step attends to: all of them, which gives the text "
        "that a cache without offloading gives, or the recall_blocks of them that promise the most "
        "attention, which bounds the time of a step.",
    )
    recall_blocks: Positive = key(
        "kv_cache",
        16,
        "an integer of at least 1",
        "With recall: topk, how many blocks in CPU memory a sequence attends to in a step.",
    )
    disk_cache: bool | Directory = key(
        "kv_cache",
        False,
        "true, false or the path of a directory",
        "Whether, or in which directory, what prefix_cache keeps (which this turns on) is also "
        "written to disk: there the next process finds it, and so does a call for which memory "
        "had no room. Written in the background. Several models and processes may share a "
        "directory. true: a directory of the user's cache. Who can read the files can read what "
        "was said.",
    )
    max_disk_bytes: Positive | None = key(
        "kv_cache",
        10_000_000_000,
        "an integer of at least 1, or null (no bound)",
        "With disk_cache, the most bytes that the directory may hold, of all models and processes "
        "that share it with this setting; blocks unused for longest leave first. null: no bound.",
    )
    prefetch: bool = key(
        "kv_cache",
        True,
        "true or false",
        "Whether blocks begin to move before they are needed: the next ones are read from disk "
        "while one is put in its place, and the next layer's are copied from CPU memory to a GPU "
        "while a layer reads a prompt. Changes when blocks move, and no result.",
    )
    recent_tokens: int = key(
        "kv_cache",
        128,
        "an integer of at least 0",
        "How many of a sequence's newest tokens stay in the model's own dtype. A finished block is "
        "converted to cache_bits once all of it is older; with 0, as soon as it is finished.",
        ge=0,
    )
    prefill_chunk: Positive | None = key(
        "kv_cache",
        512,
        "an integer of at least 1, or null (the whole prompt at once)",
        "Prompt tokens processed at a time. A chunk sees the history as it is stored, and itself "
        "unquantized; smaller chunks lower the memory peak of a long prompt.",
    )
    prefix_cache: bool = key(
        "kv_cache",
        False,
        "true or false",
        "Whether generate keeps the blocks of what it has read and written, and begins a later "
        "text that starts alike with them, so that only the rest is computed: the next turn of a "
        "chat, an edited history, a system prompt that several chats share. All caches of the "
        "model then draw from one pool. What was read after pruning has dropped a part of the "
        "text, or recall: topk has left one out, is not kept: another call would not compute it.",
    )
    prefix_cache_blocks: Positive | None = key(
        "kv_cache",
        64,
        "an integer of at least 1, or null (no bound)",
        "With prefix_cache, the most blocks that are kept for later calls, counted once for each "
        "group of layers that share a block table; the least recently used leave first. A chat is "
        "continued without computing its history again while all of its blocks (in a window) are "
        "kept. Kept blocks count against max_gpu_blocks. Where a step needs their room, they move "
        "to CPU memory with cpu_offload, and come back when a text begins with them; without, they "
        "leave early. null: no bound of their own.",
    )
    model_bits: WeightBits | None = key(
        "quantization",
        None,
        "2, 3, 4, 8, 16 or 32, or null (not checked)",
        "Bits of the model's weights, only as a check: patching a model that has others raises "
        "ConfigError. null: not checked.",
    )
    cache_bits: Bits | KVBits = key(
        "quantization",
        8,
        "4, 8 or 16, or {k: 8, v: 4}",
        "Bits of the K and V numbers older than recent_tokens. 8: K per channel in groups of 64 "
        "tokens, V per token. {k: 8, v: 4}: V in 4 bits, rotated, per token in groups of 64 "
        "channels. 4: K too. 16: never quantized, all in the model's own dtype (also where that is "
        "float32). For several precisions by age see tiers.",
    )
    tiers: Tiers | None = key(
        "quantization",
        None,
        "a mapping of k8v8, k8v4, k4v4 (in this order) to tokens, the last to null (the rest)",
        "Precision by age, instead of cache_bits: how many tokens older than recent_tokens each "
        "tier takes, from new to old. {k8v4: 6200, k4v4: null} keeps 6200 tokens at 8-bit K and "
        "4-bit V, and everything older at 4 bits. A block changes its tier once all of it is old "
        "enough. null: one tier, as cache_bits says.",
    )
    target_saving: float | None = key(
        "quantization",
        None,
        "a number between 0 and 1, or null",
        "The share of the cache's memory to save, instead of cache_bits or tiers: 0.6 keeps it at "
        "40 % of what the same tokens take in 16 bits, everything counted (a float32 model stores "
        "the same tokens alike, and saves more of its own bytes). The oldest blocks get as cold "
        "as that takes and no colder: first 4-bit V, then 4-bit K. Holds from 8192 tokens on "
        "(with a shorter window: from its length on), on average over the time between two "
        "conversions; shorter texts save less.",
        gt=0,
        lt=1,
    )
    keep_layers: Literal["auto"] | list[int] | None = key(
        "quantization",
        "auto",
        "auto, a list of layer numbers, such as [0, -1], or null",
        "Layers that stay at 8 bits, whatever the others do (or in the model's dtype, with "
        "cache_bits: 16); negative numbers count from the last layer. auto: layers whose keys "
        "would be lost in 4 bits, because their projection adds a large bias that the rotary "
        "embedding turns into a wave, keep 8-bit keys; patch says which. null: none.",
    )
    window_size: Literal["auto"] | Positive | None = key(
        "attention",
        "auto",
        "an integer of at least 1, auto, or null (no window)",
        "How many of the newest tokens a query sees, itself included, besides the sink tokens; "
        "more than sink_tokens. Blocks that no later query can see are freed. auto: the length the "
        "model was trained for, or a layer's own window where it has one. null: no window but a "
        "layer's own.",
    )
    sink_tokens: int = key(
        "attention",
        4,
        "an integer from 0 to 64",
        "How many of a sequence's first tokens every query goes on seeing, in the model's own "
        "dtype, once the window has left them behind. Without any, text falls apart there.",
        ge=0,
        le=64,
    )
    pruning: Literal["oldest", "topk", "random"] | None = key(
        "attention",
        None,
        "oldest, topk, random or null",
        "Which blocks are worth least: the oldest, those that have got the least attention lately "
        "(topk), or random ones. They are dropped where max_gpu_blocks leaves no room for new "
        "ones, and as prune_ratio says; with cpu_offload they move to CPU memory instead, and are "
        "dropped only where max_cpu_blocks leaves no room there. The sinks and the recent tokens "
        "always stay. null: nothing is dropped.",
    )
    prune_ratio: float = key(
        "attention",
        0.0,
        "a number from 0 up to, but not including, 1",
        "With pruning, the share of the blocks behind the recent tokens that is dropped in any "
        "case, after each forward pass of the model. What is dropped is lost to the text: facts "
        "that later questions ask for may be gone.",
        ge=0,
        lt=1,
    )
