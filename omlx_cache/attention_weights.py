"""The weights of paged attention, for those who look at them (``output_attentions=True``).

The kernels never hold them, so they are computed a second time, in float64 and row by row, from the
same blocks. That is slow, and their size is quadratic: for analysis, not for chats.
"""

from __future__ import annotations

import numpy as np
import torch

from omlx_cache.paged_layer import PagedLayer
from omlx_kernels.reference import attention_probabilities


def attention_weights(
    layer: PagedLayer,
    valid: np.ndarray,
    query: torch.Tensor,
    sm_scale: float,
    *,
    softcap: float | None,
    sink_logits: torch.Tensor | None,
) -> torch.Tensor:
    """Compute the weights of the step in progress, after `PagedLayer.attend`.

    Args:
        layer: the layer that has attended.
        valid: [batch, past + columns] bool, which columns are real tokens.
        query: [batch, num_q_heads, columns, head_dim], rotated.
        sm_scale, softcap, sink_logits: as `PagedLayer.attend` takes them.

    Returns:
        [batch, num_q_heads, columns, past + columns] in query's dtype. Columns that hold padding,
        or that a window has left behind, are 0. A row of weights adds up to 1, or to less where
        learned sinks take their share; that of a padding column is 0.
    """
    batch, heads, columns, _ = query.shape
    weights = query.new_zeros(batch, heads, columns, valid.shape[1])
    operands, sight = layer.operands(query)
    found = attention_probabilities(
        *operands, **sight, sm_scale=sm_scale, softcap=softcap, sink_logits=sink_logits
    )
    real = torch.from_numpy(valid).to(query.device)
    for row, (probabilities, _, key_positions, _) in enumerate(found):
        column_of = real[row].nonzero().flatten()  # of each token
        asked = real[row, -columns:].nonzero().flatten()
        keys = column_of[key_positions.to(query.device)]
        weights[row][:, asked[:, None], keys] = probabilities.to(weights)
    return weights
