"""A block goes through a file and into another place of the pools, bit for bit."""

from __future__ import annotations

import pytest
import torch

from omlx_cache.block_pool import LayerPool, MemoryMeter
from omlx_cache.storage.block_files import BlockFiles
from omlx_cache.storage.block_tensors import block_to_raw, raw_to_block
from omlx_kernels.layout import BlockFormat, Tier

CPU = torch.device("cpu")


def pools_of_noise(heads=(2, 2, 1), blocks: int = 3) -> list[LayerPool]:
    """Return the pools of layers of which one has another format; every byte is random."""
    pools = []
    for num_heads in heads:
        pool = LayerPool(BlockFormat(64, 4, num_heads, 64, torch.bfloat16), CPU, MemoryMeter())
        pool.fit(dict.fromkeys(Tier, blocks))
        for tier in Tier:
            for tensor in pool.blocks.tier(tier).tensors().values():
                tensor.view(torch.uint8).random_(256)
        pools.append(pool)
    return pools


@pytest.mark.parametrize("tier", Tier, ids=lambda tier: tier.name)
def test_a_block_goes_to_disk_and_back(tier, tmp_path):
    source, target = pools_of_noise(), pools_of_noise()
    files = BlockFiles(tmp_path, b"fingerprint")
    assert files.put(b"key", block_to_raw(source, tier, 2), {"tier": tier.name})
    found = files.get(b"key")
    assert found.metadata == {"tier": tier.name}
    kept = [{n: t.clone() for n, t in pool.blocks.tier(tier).tensors().items()} for pool in target]
    raw_to_block(found.tensors, target, tier, 0)
    for before, old, new in zip(source, kept, target, strict=True):
        for name, tensor in new.blocks.tier(tier).tensors().items():
            stored = before.blocks.tier(tier).tensors()[name][2]
            assert torch.equal(tensor[0].view(torch.uint8), stored.view(torch.uint8))
            assert torch.equal(tensor[1:].view(torch.uint8), old[name][1:].view(torch.uint8))


def test_another_formats_block_is_refused():
    raw = block_to_raw(pools_of_noise(), Tier.K8V8, 0)
    for pools, tier in (
        (pools_of_noise(), Tier.K8V4),
        (pools_of_noise((2, 2)), Tier.K8V8),
        (pools_of_noise((2, 1, 1)), Tier.K8V8),
    ):
        kept = pools[0].blocks.tier(tier).k.clone()
        with pytest.raises(ValueError, match="raw_to_block: the tensors must be those of a K8V"):
            raw_to_block(raw, pools, tier, 0)
        assert torch.equal(pools[0].blocks.tier(tier).k, kept)
