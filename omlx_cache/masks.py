"""Read what callers hand to a cache about its batch: attention masks and indices of rows."""

from __future__ import annotations

import numpy as np
import torch


def read_mask(attention_mask: torch.Tensor, batch_size: int, past: int, columns: int) -> np.ndarray:
    """Return an attention mask as an array, bool, of the shape that it was given in.

    Args:
        attention_mask: 1 for tokens and 0 for padding, [batch_size, past + columns] or
            [batch_size, columns].
        batch_size: rows of the step.
        past: columns in the cache.
        columns: new ones.

    Raises:
        ValueError: for other shapes or values.
        NotImplementedError: for a mask that isn't 2-D.
    """
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() != 2:
        got = getattr(attention_mask, "shape", type(attention_mask).__name__)
        raise NotImplementedError(
            f"PagedCache: attention_mask must be a 2-D tensor [batch, columns], got {got}; "
            f"custom masks can't be served from a paged cache"
        )
    given = attention_mask.detach().cpu()
    if not ((given == 0) | (given == 1)).all():
        raise ValueError(
            "PagedCache: attention_mask must hold 1 for tokens and 0 for padding, got other "
            "values; an additive mask can't be served"
        )
    mask = given.bool().numpy()
    if mask.shape not in ((batch_size, past + columns), (batch_size, columns)):
        raise ValueError(
            f"PagedCache: attention_mask must be [{batch_size}, {past + columns}] (the "
            f"{past} columns in the cache and {columns} new ones), got {list(mask.shape)}"
        )
    return mask


def row_indices(indices: torch.Tensor, rows: int) -> list[int]:
    """Return which of a cache's rows are chosen.

    Args:
        indices: [*] integers between -rows and rows - 1, or [rows] bool.
        rows: how many there are.

    Raises:
        ValueError: for a mask of another length, or an index out of range.
    """
    indices = torch.as_tensor(indices)
    if indices.dtype == torch.bool:
        if indices.shape != (rows,):
            raise ValueError(
                f"PagedCache: a mask of rows must be [{rows}], got {list(indices.shape)}"
            )
        indices = indices.nonzero().flatten()
    chosen = indices.tolist()
    wrong = [i for i in chosen if not -rows <= i < rows]
    if wrong:
        raise ValueError(
            f"PagedCache: row indices must be below {rows}, got {wrong[0]} in {chosen}"
        )
    return chosen
