"""What the C++ side relies on: tensors checked in Python, and their fields for its structs."""

from __future__ import annotations

import weakref

import torch

from omlx_kernels.checks import FLOATS
from omlx_kernels.errors import describe
from omlx_kernels.layout import BlockFormat, LayerBlocks, Tier, TierBlocks

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The numbers of src/abi.h's ``Dtype``."""

_checked: dict[int, weakref.ref[LayerBlocks]] = {}  # by id: hashing a dataclass hashes its tensors


def block_fields(blocks: LayerBlocks) -> tuple[int, ...]:
    """Return the fields of the C struct ``Blocks``."""
    _, heads, size, dim = blocks.hot.k.shape
    return (
        *tier_fields(blocks.sink), *tier_fields(blocks.hot), *tier_fields(blocks.k8v8),
        *tier_fields(blocks.k8v4), *tier_fields(blocks.k4v4),
        heads, dim, size, blocks.sink_tokens, DTYPES[blocks.hot.k.dtype],
    )  # fmt: skip


def tier_fields(tier: TierBlocks) -> tuple[int, ...]:
    """Return the fields of the C struct ``TierBlocks``."""
    parts = (tier.k, tier.v, tier.k_scale, tier.k_zero, tier.v_scale, tier.v_zero)
    return (*[0 if x is None else x.data_ptr() for x in parts], tier.num_blocks)


def check_layer(blocks: LayerBlocks) -> None:
    """Check every tensor of a layer, once: it is remembered for as long as the layer lives."""
    seen = _checked.get(id(blocks))
    if seen is not None and seen() is blocks:
        return
    op = "paged_attention"
    form = _format(op, blocks.hot, blocks.sink_tokens)
    for tier in Tier:
        _check_tier(op, f"{tier.name} blocks", blocks.tier(tier), form, tier)
    key = id(blocks)
    _checked[key] = weakref.ref(blocks, lambda _: _checked.pop(key, None))


def check_append(dst: TierBlocks, slot_mapping: torch.Tensor) -> None:
    """Check that ``dst`` holds contiguous floats, of hot blocks or sink pages."""
    _check_float("append_kv", dst.k)
    for part in ("k", "v"):
        _check_tensor("append_kv", f"dst.{part}", getattr(dst, part), dst.k.shape, dst.k.dtype)
    check_on_cpu("append_kv", slot_mapping=slot_mapping)


def check_convert(
    src: TierBlocks,
    dst: TierBlocks,
    src_tier: Tier,
    dst_tier: Tier,
    src_ids: torch.Tensor,
    dst_ids: torch.Tensor,
) -> None:
    """Check that ``src`` and ``dst`` hold blocks of their tiers, of one format."""
    op = "convert_blocks"
    if src_tier == Tier.HOT:
        form = _format(op, src, 0)
    else:  # of 8-bit keys, so that a row of codes has as many bytes as channels
        _, heads, size, dim = src.k.shape
        form = BlockFormat(size, 0, heads, dim, torch.float32)
    _check_tier(op, "src", src, form, src_tier)
    _check_tier(op, "dst", dst, form, dst_tier)
    check_on_cpu(op, src_ids=src_ids, dst_ids=dst_ids)


def check_copy(blocks: TierBlocks, src_ids: torch.Tensor, dst_ids: torch.Tensor) -> None:
    """Check that every part of the blocks is contiguous and has as many blocks as the keys."""
    for part, x in blocks.tensors().items():
        shape = (blocks.num_blocks, *x.shape[1:])
        _check_tensor("copy_blocks", f"blocks.{part}", x, shape, x.dtype)
    check_on_cpu("copy_blocks", src_ids=src_ids, dst_ids=dst_ids)


def _format(op: str, hot: TierBlocks, sink_tokens: int) -> BlockFormat:
    _check_float(op, hot.k)
    _, heads, size, dim = hot.k.shape
    return BlockFormat(size, sink_tokens, heads, dim, hot.k.dtype)


def _check_float(op: str, x: torch.Tensor) -> None:
    if x.dtype not in FLOATS:
        raise ValueError(describe(op, "blocks", "float16, bfloat16 or float32", f"{x.dtype}"))


def _check_tier(op: str, name: str, tier: TierBlocks, form: BlockFormat, kind: Tier) -> None:
    for part, (shape, dtype) in form.parts(kind).items():
        _check_tensor(op, f"{name}.{part}", getattr(tier, part), (tier.num_blocks, *shape), dtype)


def _check_tensor(
    op: str, name: str, x: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    expected = f"contiguous {dtype} {tuple(shape)} on cpu"
    if x is None:
        raise ValueError(describe(op, name, expected, "None"))
    if x.dtype != dtype or x.shape != shape or not x.is_contiguous() or not x.is_cpu:
        got = f"{x.dtype} {tuple(x.shape)} with strides {x.stride()} on {x.device}"
        raise ValueError(describe(op, name, expected, got))


def check_on_cpu(op: str, **tensors: torch.Tensor | None) -> None:
    """Check where the tensors are; None is fine."""
    for name, x in tensors.items():
        if x is not None and not x.is_cpu:
            raise ValueError(describe(op, name, "on cpu", f"{x.device}"))
