"""What `pruning: topk` ranks by: the attention that blocks have got lately."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from omlx_cache.block_mass import HALF_LIFE, StepMass, add_step
from omlx_cache.config import CacheConfig
from omlx_cache.policy.eviction import Candidate, EvictionPolicy
from omlx_cache.sequences import Sequence, StoredBlock
from omlx_kernels.layout import Tier


def candidate(start: int, *masses: float) -> Candidate:
    rows = [Sequence(mass={start: mass} if mass else {}) for mass in masses]
    return Candidate(StoredBlock(start, Tier.HOT, 0), rows)


def test_what_counts_is_the_most_of_any_head_and_layer():
    step = StepMass()
    assert step.collect() is None
    step.add(torch.tensor([[0.2, 0.4], [0.0, 1.0]]))
    step.add(torch.tensor([[0.1, 0.1], [0.5, 0.1]]))
    assert step.collect() == pytest.approx(np.array([0.4, 1.0]))


def test_a_mass_counts_half_after_the_half_life():
    row, still = Sequence(), Sequence()
    add_step([row, still], [1, 1], [(0, 4, 0.4), (1, 4, 0.4)])
    add_step([row, still], [HALF_LIFE, 0], [(0, 4, 0.1), (0, 68, 0.3)])
    assert row.mass == pytest.approx({4: 0.3, 68: 0.3})
    assert still.mass == pytest.approx({4: 0.4})  # no tokens, no time


def test_what_gets_least_goes_first_and_the_older_of_equals():
    policy = EvictionPolicy.from_config(CacheConfig(pruning="topk"))
    blocks = [candidate(4, 0.4), candidate(196, 0.1), candidate(68, 0.3), candidate(132, 0.1)]
    assert [c.block.start for c in policy.least_valuable(blocks, 3)] == [132, 196, 68]
    assert candidate(4, 0.1, 0.3).mass == 0.3  # the row that looks at it most
    assert candidate(4, 0.0).mass == 0
