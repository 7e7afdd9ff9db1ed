"""`copy_blocks`: every tier, bit for bit, in every implementation."""

from __future__ import annotations

import pytest
import torch
from native_isas import ISAS
from strategies import make_case
from triton_device import needs_device, to_device

from omlx_kernels import ops
from omlx_kernels.layout import BLOCK_TIERS, Tier

IMPLEMENTATIONS = [
    *("reference", "vectorized"),
    pytest.param("native", marks=pytest.mark.skipif(not ISAS, reason="not built")),
    pytest.param("triton", marks=needs_device),
]


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tier", list(Tier))
def test_copies_every_part(tier, dtype, head_dim, implementation):
    case = make_case(
        [1300, 1300, 1], [1, 1, 1], head_dim=head_dim, num_kv_heads=2, cold_tiers=BLOCK_TIERS[1:],
        dtype=dtype, sink_tokens=3,
    )  # fmt: skip
    blocks = (to_device(case) if implementation == "triton" else case).blocks.tier(tier)
    before = {name: t.clone() for name, t in blocks.tensors().items()}
    with ops.use_implementation(implementation):
        device = blocks.k.device
        ops.copy_blocks(
            blocks, ids(0, 2, 0).to(device), ids(1, 3, blocks.num_blocks - 1).to(device)
        )
    for name, tensor in blocks.tensors().items():
        want = before[name].clone()
        for source, target in ((0, 1), (2, 3), (0, len(want) - 1)):
            want[target] = before[name][source]
        assert torch.equal(tensor.view(torch.uint8), want.view(torch.uint8)), name


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        (ids(0), ids(1).long(), r"dst_ids must be int32 \[num_blocks=1\], got int64"),
        (ids(0), ids(1, 2), r"dst_ids must be int32 \[num_blocks=1\]"),
        (ids(0).to("meta"), ids(1).to("meta"), "src_ids must be on cpu like the blocks, got meta"),
    ],
)
def test_refuses_by_name(src, dst, message):
    blocks = make_case([300], [1]).blocks.hot
    with pytest.raises(ValueError, match=message):
        ops.copy_blocks(blocks, src, dst)


def test_nothing_to_copy():
    blocks = make_case([300], [1]).blocks.hot
    before = blocks.k.clone()
    ops.copy_blocks(blocks, ids(), ids())
    assert torch.equal(blocks.k.view(torch.uint8), before.view(torch.uint8))
