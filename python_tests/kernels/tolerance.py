"""How far a kernel may be from the oracle: twice as far as plain PyTorch in the same precision.

Both see the same stored codes. Plain PyTorch dequantizes them, rounds keys and values to the
model's dtype and computes attention eagerly in it, so the bound follows from the case and no number
is picked by hand. Added are one unit of rounding of the largest output, for cases that plain
PyTorch happens to compute exactly, and one unit of float32 rounding of the largest value, for the
order in which an accumulator adds.
"""

from __future__ import annotations

import torch
from strategies import Case

from omlx_kernels import reference
from omlx_kernels.quantization import hadamard


def oracle(case: Case, **kwargs) -> torch.Tensor:
    """Return attention in float64, not rounded to the model's dtype."""
    return reference.paged_attention(case.q.double(), case.blocks, case.meta, **kwargs)


def plain(
    case: Case,
    *,
    sm_scale: float,
    window_size: int | None = None,
    keep_sinks: bool = True,
    rotated_v: bool = False,
    sink_q: torch.Tensor | None = None,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention as plain PyTorch computes it in the model's dtype."""
    q, meta, blocks = case.q, case.meta, case.blocks
    out = torch.zeros_like(q)
    for seq in range(meta.num_seqs):
        first, last = (int(i) for i in meta.query_start_loc[seq : seq + 2])
        keys, values, key_pos = reference.read_sequence(blocks, meta, seq)
        length = int(meta.seq_lens[seq])
        distance = torch.arange(length - (last - first), length)[:, None] - key_pos
        visible = distance >= 0
        is_sink = key_pos < blocks.sink_tokens
        if window_size is not None:
            visible &= (distance < window_size) | (is_sink & keep_sinks)
        group = q.shape[1] // keys.shape[0]
        for head in range(q.shape[1]):
            k, v = (x[head // group].to(q.dtype) for x in (keys, values))
            rows = q[first:last, head]
            scores = rows @ k.T * sm_scale
            if sink_q is not None and window_size is not None:
                capped = sink_q[first:last, head] @ k.T * sm_scale
                scores = torch.where(is_sink & (distance >= window_size), capped, scores)
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill(~visible, float("-inf"))
            if sink_logits is not None:
                logit = sink_logits[head].to(scores).expand(len(scores), 1)
                scores = torch.cat([scores, logit], 1)
            probs = torch.softmax(scores, -1)
            result = probs.nan_to_num(0.0)[:, : len(key_pos)] @ v
            out[first:last, head] = hadamard(result) if rotated_v else result
    return out


def assert_as_exact_as_plain(got: torch.Tensor, case: Case, **kwargs) -> None:
    """Check ``got`` against the oracle within twice plain PyTorch's own error."""
    want = oracle(case, **kwargs)
    got = got.cpu().double()
    assert got.shape == want.shape
    assert bool(got.isfinite().all()), "poison came through"
    if not want.numel():
        return
    error = (got - want).abs().max()
    allowed = 2 * (plain(case, **kwargs).double() - want).abs().max()
    allowed += torch.finfo(case.q.dtype).eps * want.abs().max()
    allowed += torch.finfo(torch.float32).eps * max(v.abs().max() for v in case.values if v.numel())
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"
