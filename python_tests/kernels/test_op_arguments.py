"""`append_kv` and `convert_blocks` name what is wrong with their arguments, and write nothing."""

from __future__ import annotations

import pytest
import torch

from omlx_kernels import ops
from omlx_kernels.layout import BLOCK_TIERS, BlockFormat, Tier

FORMAT = BlockFormat(64, 4, 2, 64, torch.float16)
SLOTS = torch.zeros(3, dtype=torch.int64)
IDS = torch.zeros(1, dtype=torch.int32)


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": half(3, 2, 32)}, r"k must be float16 \[num_tokens, kv_heads=2, head_dim=64\]"),
        ({"v": torch.zeros(3, 2, 64)}, r"v must be float16 .*, got float32 \(3, 2, 64\)"),
        ({"v": half(4, 2, 64)}, r"v must be shaped like k \(3, 2, 64\)"),
        ({"k": half(3, 2, 64).to("meta")}, "k must be on cpu, got meta"),
        ({"slot_mapping": SLOTS.int()}, r"slot_mapping must be int64 \[num_tokens=3\], got int32"),
        ({"slot_mapping": SLOTS[:2]}, r"slot_mapping must be int64 \[num_tokens=3\]"),
        ({"slot_mapping": SLOTS.to("meta")}, "slot_mapping must be on cpu like the blocks"),
    ],
)
def test_append_refuses_by_name(change, message):
    hot = FORMAT.allocate(Tier.HOT, 2, "cpu")
    hot.k.fill_(7)
    kwargs = {"k": half(3, 2, 64), "v": half(3, 2, 64), "dst": hot, "slot_mapping": SLOTS}
    with pytest.raises(ValueError, match=f"append_kv: {message}"):
        ops.append_kv(**(kwargs | change))
    assert (hot.k == 7).all()


@pytest.mark.parametrize("source", list(Tier))
@pytest.mark.parametrize("target", list(Tier))
def test_convert_takes_any_tier_of_blocks_to_any_colder_one(source, target):
    blocks = {tier: FORMAT.allocate(tier, 1, "cpu") for tier in Tier}
    for tensor in blocks[source].tensors().values():
        tensor.fill_(1)
    args = (blocks[source], blocks[target], source, target, IDS, IDS)
    if source in BLOCK_TIERS and source < target:
        ops.convert_blocks(*args)
        return
    with pytest.raises(ValueError, match="two of HOT, K8V8, K8V4, K4V4, the second a colder one"):
        ops.convert_blocks(*args)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"src": FORMAT.allocate(Tier.K8V8, 1, "cpu")}, "src must be HOT blocks with the parts k"),
        ({"dst": FORMAT.allocate(Tier.K8V8, 1, "cpu")}, "dst must be K8V4 blocks .* v_zero"),
        (
            {"dst": BlockFormat(64, 4, 2, 128, torch.float16).allocate(Tier.K8V4, 1, "cpu")},
            "dst must be blocks of the same layer as src",
        ),
        (
            {"dst": BlockFormat(128, 4, 2, 64, torch.float16).allocate(Tier.K8V4, 1, "cpu")},
            "dst must be blocks of the same layer as src",
        ),
        ({"src_ids": IDS.long()}, r"src_ids must be int32 \[num_blocks=1\], got int64"),
        ({"dst_ids": torch.zeros(2, dtype=torch.int32)}, r"dst_ids must be int32 \[num_blocks=1\]"),
        ({"dst_ids": IDS.to("meta")}, "dst_ids must be on cpu like the blocks, got meta"),
    ],
)
def test_convert_refuses_by_name(change, message):
    kwargs = {
        "src": FORMAT.allocate(Tier.HOT, 1, "cpu"),
        "dst": FORMAT.allocate(Tier.K8V4, 1, "cpu"),
        "src_tier": Tier.HOT,
        "dst_tier": Tier.K8V4,
        "src_ids": IDS,
        "dst_ids": IDS,
    }
    with pytest.raises(ValueError, match=f"convert_blocks: {message}"):
        ops.convert_blocks(**(kwargs | change))
