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
    sink, hot, k8v8 = blocks.sink, blocks.hot, blocks.k8v8
    num_hot, heads, size, dim = hot.k.shape
    return (
        sink.k.data_ptr(), sink.v.data_ptr(), hot.k.data_ptr(), hot.v.data_ptr(),
        *quantized_fields(k8v8), sink.k.shape[0], num_hot, k8v8.k.shape[0],
        heads, dim, size, sink.k.shape[2], DTYPES[hot.k.dtype],
    )  # fmt: skip


def quantized_fields(k8v8: TierBlocks) -> tuple[int, ...]:
    """Return the pointers of a K8V8 tier, in the order of the C structs."""
    return (
        k8v8.k.data_ptr(), k8v8.k_scale.data_ptr(), k8v8.k_zero.data_ptr(),
        k8v8.v.data_ptr(), k8v8.v_scale.data_ptr(),
    )  # fmt: skip


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
    _check_on_cpu("append_kv", slot_mapping=slot_mapping)


def check_convert(
    src: TierBlocks, dst: TierBlocks, src_ids: torch.Tensor, dst_ids: torch.Tensor
) -> None:
    """Check that ``src`` holds hot and ``dst`` 8-bit blocks of one format."""
    form = _format("convert_blocks", src, 0)
    _check_tier("convert_blocks", "src", src, form, Tier.HOT)
    _check_tier("convert_blocks", "dst", dst, form, Tier.K8V8)
    _check_on_cpu("convert_blocks", src_ids=src_ids, dst_ids=dst_ids)


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


def _check_on_cpu(op: str, **tensors: torch.Tensor) -> None:
    for name, x in tensors.items():
        if not x.is_cpu:
            raise ValueError(describe(op, name, "on cpu", f"{x.device}"))
