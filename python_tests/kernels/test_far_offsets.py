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
from omlx_kernels.layout import BLOCK_TIERS, BlockFormat

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
