"""The registered ops: schema, fake implementation, and calls traced by `torch.compile`."""

from __future__ import annotations

import pytest
import torch
from strategies import make_case

from omlx_kernels import library, ops
from omlx_kernels.layout import BLOCK_TIERS, LayerBlocks, Tier, TierBlocks

CHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")


def case_of(new: int = 1, **kwargs):
    return make_case([400, 30], [new, new], num_kv_heads=2, cold_tiers=BLOCK_TIERS[1:], **kwargs)


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def finite(blocks: LayerBlocks) -> LayerBlocks:
    """Replace the poison, which opcheck would compare with itself and find unequal."""
    for tier in Tier:
        for tensor in blocks.tier(tier).tensors().values():
            tensor.nan_to_num_(0.0) if tensor.is_floating_point() else None
    return blocks


@pytest.mark.parametrize("rotate_v", [False, True])
def test_append_kv(rotate_v):
    hot = finite(case_of().blocks).hot
    k = torch.randn(3, 2, 64)
    args = (k, k + 1, library.parts_of(hot), torch.tensor([1, -1, 70]), rotate_v)
    torch.library.opcheck(library.append_kv, args, test_utils=CHECKS)


@pytest.mark.parametrize(("src", "dst"), [(Tier.HOT, Tier.K8V8), (Tier.K8V4, Tier.K4V4)])
def test_convert_blocks(src, dst):
    blocks = finite(case_of().blocks)
    parts = [library.parts_of(blocks.tier(tier)) for tier in (src, dst)]
    args = (*parts, int(src), int(dst), ids(0), ids(1))
    torch.library.opcheck(library.convert_blocks, args, test_utils=CHECKS)


@pytest.mark.parametrize("tier", list(Tier))
def test_copy_blocks(tier):
    with ops.use_implementation("vectorized"):
        args = (library.parts_of(finite(case_of().blocks).tier(tier)), ids(0), ids(1))
        torch.library.opcheck(library.copy_blocks, args, test_utils=CHECKS)


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("everything", [False, True])
def test_paged_attention(new, everything):
    case = case_of(new)
    tables = library.tables_of(case.meta)
    parts = library.layer_parts(finite(case.blocks))
    options = (None, True, False, None, None, None, None, None)
    if everything:
        mass, lse = torch.zeros(case.meta.splits.shape[0], 2), torch.zeros(len(case.q), 2)
        options = (100, True, True, torch.randn_like(case.q), 30.0, torch.randn(2), mass, lse)
    args = (case.q, parts, tables, case.meta.max_query_len, 0.125, *options)
    with ops.use_implementation("vectorized"):
        torch.library.opcheck(library.paged_attention, args, test_utils=CHECKS)


def test_parts_are_the_fields_in_order():
    blocks = case_of().blocks
    again = library._layer(library.layer_parts(blocks))
    for tier in Tier:
        mine, other = blocks.tier(tier).tensors(), again.tier(tier).tensors()
        assert list(mine) == list(other)
        assert all(mine[name] is other[name] for name in mine)


def test_a_traced_call_is_one_graph_and_the_same_numbers():
    case = case_of(3)
    blocks, meta = case.blocks, case.meta
    k = torch.randn(6, 2, 64)
    slots = torch.full((6,), -1)
    slots[0] = 5

    def step(hot: TierBlocks, q: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        ops.append_kv(k, k, hot, slots)
        ops.convert_blocks(hot, blocks.k8v8, Tier.HOT, Tier.K8V8, ids_hot, ids_cold)
        options = {"sm_scale": 0.125, "window_size": 90, "lse": lse}
        return ops.paged_attention(q, blocks, meta, **options) * lse[..., None]

    ids_hot, ids_cold = ids(0), ids(0)
    lses = torch.zeros(2, 6, 2)
    want = step(blocks.hot, case.q, lses[0])
    torch._dynamo.reset()
    traced = torch.compile(step, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(traced(blocks.hot, case.q, lses[1]), want)
    torch.testing.assert_close(*lses)
