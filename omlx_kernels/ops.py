"""The public ops: one name, one contract, the implementation that fits the device.

| device | implementation |
|---|---|
| CUDA | ``omlx_kernels.triton`` |
| CPU | ``omlx_kernels.native`` (C++) where its library loads |
| anything else | ``omlx_kernels.vectorized`` (plain torch) |

`implementation` says which one serves a device; `use_implementation` forces one, which is how the
tests prove that each of them meets the same contract. Under `torch.compile` a call becomes one
opaque op of `torch.ops.omlx` (`omlx_kernels.library`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from importlib import import_module
from types import ModuleType

import torch

from omlx_kernels.checks import check_append, check_attention, check_convert, check_copy
from omlx_kernels.layout import LayerBlocks, Tier, TierBlocks
from omlx_kernels.metadata import AttentionMetadata

IMPLEMENTATIONS = ("triton", "native", "vectorized", "reference")

_forced: ContextVar[str | None] = ContextVar("omlx_forced_implementation", default=None)


def implementation(device: torch.device) -> ModuleType:
    """Return the module that serves ``device``; it is imported on first use."""
    name = _forced.get()
    if name is None and device.type == "cuda":
        name = "triton"
    elif name is None:
        is_native = device.type == "cpu" and import_module("omlx_kernels.native").available()
        name = "native" if is_native else "vectorized"
    return import_module(f"omlx_kernels.{name}")


@contextmanager
def use_implementation(name: str) -> Iterator[ModuleType]:
    """Force one implementation for the current thread or task.

    Args:
        name: one of `IMPLEMENTATIONS`. ``"triton"`` on a CPU needs ``TRITON_INTERPRET=1`` in the
            environment before triton is first imported.

    Raises:
        ValueError: for another name.
    """
    if name not in IMPLEMENTATIONS:
        raise ValueError(
            f"use_implementation: name must be one of {', '.join(IMPLEMENTATIONS)}, got {name!r}"
        )
    token = _forced.set(name)
    try:
        yield import_module(f"omlx_kernels.{name}")
    finally:
        _forced.reset(token)


def append_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    dst: TierBlocks,
    slot_mapping: torch.Tensor,
    *,
    rotate_v: bool = False,
) -> None:
    """Write the newest tokens' keys and values into their slots.

    Args:
        k: [num_tokens, kv_heads, head_dim] in the dtype of ``dst``; any strides.
        v: the same shape and dtype.
        dst: hot blocks, or sink pages (a page is written like a block of ``sink_tokens`` tokens).
        slot_mapping: [num_tokens] int64; token ``i`` goes to block ``slot // size`` at offset
            ``slot % size``, where ``size`` is ``dst.k.shape[2]``. -1 skips the token. Slots are
            distinct and inside ``dst``: the caller's duty, not checked.
        rotate_v: store the values rotated (`omlx_kernels.quantization.hadamard`).

    Mutates:
        ``dst.k`` and ``dst.v``.

    Raises:
        ValueError: for a wrong shape, dtype or device, before anything is written.
    """
    if torch.compiler.is_compiling():
        library.append_kv(k, v, library.parts_of(dst), slot_mapping, rotate_v)
        return
    check_append(k, v, dst, slot_mapping)
    if k.shape[0]:
        implementation(k.device).append_kv(k, v, dst, slot_mapping, rotate_v=rotate_v)


def convert_blocks(
    src: TierBlocks,
    dst: TierBlocks,
    src_tier: Tier,
    dst_tier: Tier,
    src_ids: torch.Tensor,
    dst_ids: torch.Tensor,
) -> None:
    """Turn full blocks of one tier into blocks of a colder one; the only place that quantizes.

    Args:
        src: blocks of ``src_tier``.
        dst: blocks of ``dst_tier`` of the same layer.
        src_tier: HOT, K8V8 or K8V4.
        dst_tier: a colder tier than ``src_tier``.
        src_ids: [num_blocks] int32 physical ids in ``src``.
        dst_ids: [num_blocks] int32 physical ids in ``dst``, distinct.

    Mutates:
        ``dst``, every part of the listed blocks (no stale scale survives).

    Raises:
        ValueError: for a wrong shape, dtype, device or pair of tiers, before anything is written.

    The codes and scales are those of `omlx_kernels.quantization`; where a value lies exactly
    between two codes an implementation may take either. Keys or values whose format does not
    change (the keys from K8V8 to K8V4, the values from K8V4 to K4V4) are copied bit for bit.
    Values are quantized as they are stored: whoever uses 4-bit values has rotated them on append.
    """
    if torch.compiler.is_compiling():
        parts = library.parts_of(src), library.parts_of(dst)
        library.convert_blocks(*parts, int(src_tier), int(dst_tier), src_ids, dst_ids)
        return
    check_convert(src, dst, src_tier, dst_tier, src_ids, dst_ids)
    if src_ids.numel():
        implementation(src.k.device).convert_blocks(src, dst, src_tier, dst_tier, src_ids, dst_ids)


def copy_blocks(blocks: TierBlocks, src_ids: torch.Tensor, dst_ids: torch.Tensor) -> None:
    """Copy whole blocks (or sink pages) of one tier, codes and scales, bit for bit.

    Args:
        blocks: blocks of any tier.
        src_ids: [num_blocks] int32 physical ids to copy from; an id may come several times.
        dst_ids: [num_blocks] int32 physical ids to copy to, distinct, none of them in ``src_ids``.

    Mutates:
        ``blocks``, every part of the blocks ``dst_ids``.

    Raises:
        ValueError: for a wrong shape, dtype or device, before anything is written.
    """
    if torch.compiler.is_compiling():
        library.copy_blocks(library.parts_of(blocks), src_ids, dst_ids)
        return
    check_copy(blocks, src_ids, dst_ids)
    if src_ids.numel():
        implementation(blocks.k.device).copy_blocks(blocks, src_ids, dst_ids)


def paged_attention(
    q: torch.Tensor,
    blocks: LayerBlocks,
    meta: AttentionMetadata,
    *,
    sm_scale: float,
    window_size: int | None = None,
    keep_sinks: bool = True,
    rotated_v: bool = False,
    sink_q: torch.Tensor | None = None,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    split_mass: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend the newest tokens of each sequence to everything that the sequence has stored.

    The keys and values of the new tokens are already in the hot blocks (or the sink page), so one
    launch reads all of them through the table. A query at position ``p`` sees key position ``j``,
    if the tables list where it is stored::

        j <= p  and  ( window_size is None            0 1 2 3 4 5 6 7   window_size = 3, p = 7,
                       or j > p - window_size         S S . . . x x x   sink_tokens = 2
                       or (keep_sinks and j < sink_tokens) )

    Args:
        q: [num_tokens, num_q_heads, head_dim], the model's dtype, last dimension contiguous; query
            head ``h`` reads key/value head ``h // (num_q_heads / kv_heads)``.
        blocks: the layer's stored blocks.
        meta: the step's tables; see `AttentionMetadata`.
        sm_scale: factor on the scores before softmax, usually ``head_dim ** -0.5``.
        window_size: keys that a query sees, itself included; None is all.
        keep_sinks: whether sink tokens stay visible outside the window.
        rotated_v: the stored values are rotated; the output is rotated back.
        sink_q: shaped like q; the query with which a sink token *outside the window* is scored (a
            rotary model stands it at a capped distance). Inside the window a sink token is scored
            with ``q`` like any other. None is ``q``.
        softcap: scores become ``softcap * tanh(score / softcap)``; None leaves them (Gemma 2).
        sink_logits: [num_q_heads] learned scores that take part in the softmax and carry no value
            (GPT-OSS); never capped.
        split_mass: [num_splits, num_q_heads] float32, contiguous, written: the share of the
            attention of each sequence's *newest* query that falls on the keys of each of
            ``meta.splits``, 0 for a sequence without queries. With one block a split it is the
            mass of each block. A sequence's shares add up to 1, less what a learned sink takes.
        lse: [num_tokens, num_q_heads] float32, contiguous, written: the natural logarithm of the
            sum of ``exp(score)`` over what each query sees, scaled and capped as above, a learned
            sink included. With it attention over disjoint sets of keys can be merged
            (`omlx_kernels.merge`); only one of the parts may be given the learned sinks.

    Returns:
        [num_tokens, num_q_heads, head_dim], contiguous, in q's dtype. A query that sees no key
        gives 0, and an ``lse`` of -inf, or of its learned sink.

    Mutates:
        ``split_mass`` and ``lse``.

    Raises:
        ValueError: for a wrong shape, dtype, device or window.
    """
    if torch.compiler.is_compiling():
        parts, tables = library.layer_parts(blocks), library.tables_of(meta)
        scoring = (sm_scale, window_size, keep_sinks, rotated_v, sink_q, softcap, sink_logits)
        written = split_mass, lse
        return library.paged_attention(q, parts, tables, meta.max_query_len, *scoring, *written)
    check_attention(q, blocks, meta, window_size, sink_q, softcap, sink_logits, split_mass, lse)
    if split_mass is not None:
        split_mass.zero_()
    if lse is not None:
        lse.fill_(float("-inf"))  # of rows that belong to no sequence
    if not q.shape[0]:
        return torch.empty_like(q)
    attend = partial(
        implementation(q.device).paged_attention,
        sm_scale=sm_scale,
        window_size=window_size,
        keep_sinks=keep_sinks,
        rotated_v=rotated_v,
        softcap=softcap,
        sink_logits=sink_logits,
    )
    if split_mass is None or meta.max_query_len == 1:
        return attend(q, blocks, meta, sink_q=sink_q, split_mass=split_mass, lse=lse)
    # The splits, and so their mass, belong to decode: ask again for the newest query alone.
    newest, rows = meta.newest_queries()
    newest_sink_q = None if sink_q is None else sink_q[rows]
    attend(q[rows], blocks, newest, sink_q=newest_sink_q, split_mass=split_mass)
    return attend(q, blocks, meta, sink_q=sink_q, lse=lse)


from omlx_kernels import library  # noqa: E402  (its ops call the functions above)
