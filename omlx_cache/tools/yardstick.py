"""Notice when other programs slow the machine down: time one fixed piece of work now and then.

Two runs that follow each other can only be compared if the machine did the same for both. A few
milliseconds of matrix products before and after each turn show whether it did.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

SIZE, PRODUCTS, REPEATS = 384, 10, 3
BUSY = 1.5


def yardstick() -> float:
    """Return the seconds that a fixed amount of CPU work takes now (the median of a few tries).

    >>> yardstick() > 0
    True
    """
    matrix = torch.full((SIZE, SIZE), 0.5)
    out = torch.empty_like(matrix)
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        for _ in range(PRODUCTS):
            torch.mm(matrix, matrix, out=out)
        seconds.append(time.perf_counter() - started)
    return sorted(seconds)[REPEATS // 2]


def disturbance(seconds: Sequence[float]) -> float:
    """Return how many times as long the work took at worst as at best, leaving out one outlier.

    >>> disturbance([1.0, 1.0, 1.2, 9.0])
    1.2
    """
    ordered = sorted(seconds)
    worst = ordered[-2] if len(ordered) > 2 else ordered[-1]
    return worst / ordered[0]
