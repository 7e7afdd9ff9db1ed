"""Blocks that lie more than 2**31 elements into their tensors: no offset fits int32.

The pools are allocated, but only their last blocks are ever touched, so they take address space
and next to no memory. An offset that overflows reads far outside of the pool: it ends the process.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
import torch
from triton_device import DEVICE, INTERPRETED, needs_device

from omlx_kernels import ops
from omlx_kernels.layout import BLOCK_TIERS, BlockFormat, Tier, TierBlocks

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import op_checks  # it lies in bench/
from gpu_correctness import FAR

pytestmark = [
    needs_device,
    pytest.mark.skipif(not INTERPRETED, reason="bench/gpu_check.py does this on a GPU"),
]

CPU = torch.device(DEVICE)
HEADS = {"num_q_heads": 1, "num_kv_heads": 1, "head_dim": 64, "block_size": 64}


@pytest.fixture(autouse=True)
def _room(monkeypatch):
    """Skip where so much address space can't be had."""
    allocate = BlockFormat.allocate

    def try_to(self, tier, num_blocks, device):
        try:
            return allocate(self, tier, num_blocks, device)
        except RuntimeError as error:
            pytest.skip(f"no address space for {num_blocks} blocks of {tier.name}: {error}")

    monkeypatch.setattr(BlockFormat, "allocate", try_to)


@pytest.mark.parametrize("new", [1, 9])
@pytest.mark.parametrize("tier", BLOCK_TIERS)
def test_append_copy_and_attention(tier, new):
    with ops.use_implementation("triton"):
        op_checks.check_far(CPU, torch.float16, tier, new, FAR, HEADS)


@pytest.mark.parametrize("pair", list(itertools.combinations(BLOCK_TIERS, 2)), ids=str)
def test_convert(pair):
    with ops.use_implementation("triton"):
        op_checks.check_convert(CPU, torch.float16, 64, *pair, FAR)


def test_copy_between_ends():
    # It copies 32-bit words, of which the pools above have half as many.
    size = 64 * 64 * 2 // 4
    fmt = BlockFormat(64, 4, 1, 64, torch.float16)
    k = fmt.allocate(Tier.HOT, 2, CPU).k
    try:
        k = k.new_empty(2**31 // size + 4, *k.shape[1:])
    except RuntimeError as error:
        pytest.skip(f"no address space for {2**31} words: {error}")
    k[1].normal_()
    last = len(k) - 1
    ids = torch.tensor([1, last, last - 1], dtype=torch.int32)
    with ops.use_implementation("triton"):
        ops.copy_blocks(TierBlocks(k, k), ids[:1], ids[1:2])
        ops.copy_blocks(TierBlocks(k, k), ids[1:2], ids[2:])
    assert torch.equal(k[last], k[1])
    assert torch.equal(k[last - 1], k[1])
