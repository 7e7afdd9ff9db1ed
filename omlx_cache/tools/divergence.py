"""How far a model's next-token distributions are from a reference's, over one text."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from omlx_cache.compat import cache_name


@dataclass(frozen=True)
class Agreement:
    """Two runs over one text, compared over the scored positions.

    Attributes:
        kld: mean KL(reference || candidate) of the next-token distributions, in nats.
        top1: share of positions at which both find the same token most likely.
        perplexity_ratio: candidate's perplexity over the reference's, minus 1.
    """

    kld: float
    top1: float
    perplexity_ratio: float


@torch.no_grad()
def teacher_forced(model, ids: torch.Tensor, scored: int, cache=None) -> torch.Tensor:
    """Return the float32 logits of the last ``scored`` positions of ids, [scored, vocabulary].

    Args:
        model: a causal language model.
        ids: [1, num_tokens].
        scored: how many positions count.
        cache: the cache to fill; None leaves it to the model.
    """
    kwargs = {} if cache is None else {cache_name(type(model).forward): cache}
    return model(ids, logits_to_keep=scored, **kwargs).logits[0].float()


def compare(reference: torch.Tensor, candidate: torch.Tensor, ids: torch.Tensor) -> Agreement:
    """Compare logits [scored, vocabulary] that belong to the last positions of ``ids``."""
    kld = top1 = loss = 0.0
    targets = ids[0, -reference.shape[0] + 1 :]
    for a, b, rows in zip(
        reference.split(256), candidate.split(256), _rows(reference), strict=True
    ):
        p, q = a.log_softmax(-1), b.log_softmax(-1)
        kld += (p.exp() * (p - q)).sum().item()
        top1 += (a.argmax(-1) == b.argmax(-1)).sum().item()
        truth = targets[rows]
        index = truth[:, None]
        n = len(truth)
        loss += (p[:n].gather(1, index) - q[:n].gather(1, index)).sum().item()
    count = reference.shape[0]
    ratio = torch.tensor(loss / (count - 1)).exp().item() - 1
    return Agreement(kld / count, top1 / count, ratio)


def _rows(reference: torch.Tensor) -> list[slice]:
    return [slice(i, i + 256) for i in range(0, reference.shape[0], 256)]
