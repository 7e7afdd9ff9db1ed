"""The measure of quality against what it says it is, on distributions small enough to write out."""

from __future__ import annotations

import math

import pytest
import torch

from omlx_cache.tools.divergence import compare


def test_equal_runs_do_not_diverge():
    logits = torch.randn(600, 7)
    agreement = compare(logits, logits, torch.randint(7, (1, 900)))
    assert (agreement.kld, agreement.top1, agreement.perplexity_ratio) == (0.0, 1.0, 0.0)


def test_numbers_by_hand():
    p, q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.5, 0.25])
    ids = torch.tensor([[2, 0, 0]])  # scored: what follows the first of two positions
    agreement = compare(p.log().expand(2, 3), q.log().expand(2, 3), ids)
    assert agreement.kld == pytest.approx(0.5 * math.log(2) - 0.25 * math.log(2))
    assert agreement.top1 == 0.0
    assert agreement.perplexity_ratio == pytest.approx(1.0)  # probability .25 where it was .5


def test_parts_of_256_are_added_up():
    a, b = torch.randn(300, 5), torch.randn(300, 5)
    ids = torch.randint(5, (1, 300))
    p, q = a.log_softmax(-1), b.log_softmax(-1)
    agreement = compare(a, b, ids)
    assert agreement.kld == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item(), rel=1e-5)
    truth = ids[0, 1:, None]
    loss = (p[:-1] - q[:-1]).gather(1, truth).mean().item()
    assert agreement.perplexity_ratio == pytest.approx(math.exp(loss) - 1, rel=1e-4)
