"""Compare greedy answers fairly: given the same text before, would the model choose the same token?

Two answers that differ at one token are two different texts after it, so counting equal tokens of
free-running answers says little. Instead, from the first difference on, the reference answer is fed
to the model and its choice at each position is compared:

    reference   The  rule  is  that  try    runs  first
    own answer  The  rule  is  to    catch  ...          free-running, as shown on the screen
    compared     =    =    =    x     =      =     =     6 of 7; the first 3 are identical

In 16-bit formats the order of summation alone tips near-ties, even without any change to the cache.
`check_own_answer` measures how often: the stock model against itself, token by token and in one go.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from omlx_cache.compat import cache_name


@dataclass(frozen=True)
class Agreement:
    """How many of ``tokens`` choices are the reference's, and how many before the first other."""

    same: int
    identical: int
    tokens: int


def follow_reference(
    model, cache, prompt: Sequence[int], own: Sequence[int], reference: Sequence[int]
) -> Agreement | None:
    """Compare an answer to the reference and leave the reference in the cache in its place.

    Args:
        model: the model that gave the answer.
        cache: its cache: the prompt, and the answer without its last token (never fed to it).
        prompt: the ids of the chat before the answer.
        own: the answer's ids.
        reference: the ids of the reference answer.

    Returns:
        The agreement, or None where the cache can't be rewound; it is then unchanged.

    Mutates: ``cache``, unless the answers are the same.
    """
    identical = shared_prefix(own, reference)
    if identical == len(reference) == len(own):
        return Agreement(identical, identical, identical)
    start = len(prompt) + identical
    if not _rewind(cache, start):
        return None
    choices = _choices(model, cache, [*prompt, *reference], start)
    later = sum(map(int.__eq__, choices, reference[identical + 1 :]))
    return Agreement(identical + later, identical, len(reference))


def check_own_answer(model, cache, prompt: Sequence[int], own: Sequence[int]) -> Agreement | None:
    """Compare an answer to what the same model chooses when it computes the answer in one pass.

    Args:
        model, cache, prompt, own: as for `follow_reference`; ``cache`` is copied, not changed.

    Returns:
        The agreement, or None where the cache can't be rewound.
    """
    trial = copy.deepcopy(cache)
    start = len(prompt) - 1
    if not _rewind(trial, start):
        return None
    choices = _choices(model, trial, [*prompt, *own], start)
    same = sum(map(int.__eq__, choices, own))
    return Agreement(same, shared_prefix(choices, own), len(own))


def shared_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Count the tokens that two answers have in common before they first differ.

    >>> shared_prefix([5, 6, 7], [5, 6, 8, 9])
    2
    """
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def _rewind(cache, length: int) -> bool:
    """Cut the cache to ``length`` tokens if it can be; say whether it was."""
    surplus = cache.get_seq_length() - length
    if surplus <= 0:
        return True
    try:
        cache.crop(-surplus)
    except (NotImplementedError, ValueError):
        return False
    return True


@torch.no_grad()
def _choices(model, cache, sequence: list[int], start: int) -> list[int]:
    """Feed ``sequence[start:-1]`` behind what the cache holds; return the choice after each."""
    fed = sequence[start:-1]
    if not fed:
        return []
    device = next(model.parameters()).device
    logits = model(
        input_ids=torch.tensor([fed], device=device),
        attention_mask=torch.ones(1, len(sequence) - 1, dtype=torch.long, device=device),
        use_cache=True,
        **{cache_name(type(model).forward): cache},
    ).logits
    return logits[0].argmax(-1).tolist()
