"""Every tensor argument of every native op, malformed in every way: an error, never a crash.

Run under AddressSanitizer too (`make sanitize`), so a malformed argument that gets through shows as
an access out of bounds. Values out of range are in test_native_arguments.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

import pytest
import torch
from native_isas import ISAS
from strategies import make_case

from omlx_kernels import ops
from omlx_kernels.layout import BLOCK_TIERS, Tier

pytestmark = pytest.mark.skipif(not ISAS, reason="the native library is not built")

Fault = Callable[[torch.Tensor], object]
REFUSED: dict[str, Fault] = {  # by a ValueError that says what is wrong
    "wider dtype": lambda x: x.double() if x.is_floating_point() else x.to(torch.int64),
    "other dtype": lambda x: x.to(torch.int16),
    "of bool": lambda x: x.bool(),
    "one row less": lambda x: x[:-1],
    "one column less": lambda x: x[..., :-1].contiguous(),
    "no rows": lambda x: x[:0],
    "no columns": lambda x: x[..., :0],
    "one dimension more": lambda x: x[None],
    "on meta": lambda x: x.to("meta"),
}
STRANGE: dict[str, Fault] = {  # by any exception, or served where strides are free
    "one dimension less": lambda x: x[0],
    "a scalar": lambda x: x.reshape(-1)[0],
    "turned over": lambda x: x.transpose(0, -1),
    "every other": lambda x: torch.stack([x, x], -1)[..., 0],
    "one row for all": lambda x: x[:1].expand_as(x),
    "sparse": lambda x: x.to_sparse(),
    "missing": lambda _: None,
    "a list": lambda x: x.tolist(),
}
DTYPES, COLUMNS = ("wider dtype", "other dtype", "of bool"), ("one column less", "no columns")


def legal(op: str, name: str, fault: str) -> bool:
    """Whether what is called a fault is none for this argument."""
    if op == "copy_blocks" and "." in name:  # whole blocks are copied, whatever they hold
        return fault in (*DTYPES, *COLUMNS)
    if name == "sink_logits":  # turned into float32
        return fault in DTYPES
    return name == "slot_mapping" and fault == "wider dtype"  # it is int64


CALLS = {
    "append_kv": ["k", "v", "dst.k", "dst.v", "slot_mapping"],
    "convert_blocks": [
        *("src.k", "src.v", "src.k_scale", "src.k_zero", "src.v_scale"),
        *("dst.k", "dst.v", "dst.k_scale", "dst.k_zero", "dst.v_scale", "dst.v_zero"),
        *("src_ids", "dst_ids"),
    ],
    "copy_blocks": [
        *("blocks.k", "blocks.v", "blocks.k_scale", "blocks.k_zero", "blocks.v_scale"),
        *("blocks.v_zero", "src_ids", "dst_ids"),
    ],
    "paged_attention": [
        *("q", "sink_q", "sink_logits", "split_mass"),
        *("meta.block_table", "meta.block_starts", "meta.tier_starts", "meta.sink_pages"),
        *("meta.seq_lens", "meta.query_start_loc", "meta.splits", "meta.split_starts"),
        *("blocks.sink.k", "blocks.sink.v", "blocks.hot.k", "blocks.hot.v"),
        *("blocks.k8v8.k", "blocks.k8v4.v", "blocks.k4v4.v_zero"),
    ],
}


def arguments(op: str) -> dict[str, object]:
    """Return well-formed arguments of an op, new ones each time."""
    case = make_case([400, 300], [1, 1], num_q_heads=4, num_kv_heads=2, cold_tiers=BLOCK_TIERS[1:])
    blocks = case.blocks
    ids = {name: torch.tensor([i], dtype=torch.int32) for i, name in enumerate(["src", "dst"])}
    ids = {f"{name}_ids": x for name, x in ids.items()}
    if op == "append_kv":
        k, v = torch.randn(2, 3, 2, 64)
        return {"k": k, "v": v, "dst": blocks.hot, "slot_mapping": torch.tensor([0, 5, -1])}
    if op == "convert_blocks":
        tiers = {"src_tier": Tier.K8V8, "dst_tier": Tier.K4V4}
        return {"src": blocks.k8v8, "dst": blocks.k4v4} | tiers | ids
    if op == "copy_blocks":
        return {"blocks": blocks.k4v4} | ids
    tensors = {"sink_q": torch.randn_like(case.q), "sink_logits": torch.randn(4)}
    tensors["split_mass"] = torch.zeros(len(case.meta.splits), 4)
    return {"q": case.q, "blocks": blocks, "meta": case.meta, "sm_scale": 0.1} | tensors


def replaced(value: object, path: list[str], fault: Fault) -> object:
    """Return ``value`` with the tensor at a path of attributes malformed."""
    if not path:
        return fault(value)
    part = replaced(getattr(value, path[0]), path[1:], fault)
    return dataclasses.replace(value, **{path[0]: part})


@pytest.mark.parametrize(
    ("op", "name"), [(op, name) for op, names in CALLS.items() for name in names]
)
def test_malformed(op, name):
    kwargs = arguments(op)
    first, *path = name.split(".")

    def call(fault: Fault) -> None:
        changed = kwargs | {first: replaced(kwargs[first], path, fault)}
        with ops.use_implementation("native"):
            getattr(ops, op)(**changed)

    for kind, fault in REFUSED.items():
        if legal(op, name, kind):
            call(fault)
            continue
        with pytest.raises(ValueError, match=r"must be .* got") as error:
            call(fault)
        names = (f"{op}: ", "AttentionMetadata: ", "BlockFormat: ")
        assert str(error.value).startswith(names), kind
    for fault in STRANGE.values():
        with contextlib.suppress(Exception):
            call(fault)
