"""ABLATION, not part of the package: decode over 8-bit keys with a scale per *token*, as in vLLM.

One scale a (head, token) for keys as for values, symmetric, where this project scales keys per
channel. Everything else is the package's own decode kernel (the loads, the dots, the merge, the
splits), so the difference in time is the price of the finer scale. The accuracy per token is worse
(DESIGN, "Why this scheme"); no model is served with this.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import triton
import triton.language as tl
from problems import DTYPES, Step

from omlx_cache.tables import send
from omlx_kernels.launch import decode_config
from omlx_kernels.layout import QUANT_GROUP
from omlx_kernels.triton.codes import assemble, load_v8, planes_of
from omlx_kernels.triton.common import (
    current_target,
    mask_scores,
    narrow,
    online_softmax,
    rough_log2,
)
from omlx_kernels.triton.decode import _merge_splits_kernel
from omlx_kernels.triton.quantized import _add_planes, _dot_planes


@triton.jit(do_not_specialize=["stride_table"])
def _per_token_int8_kernel(
    q_ptr, partial_ptr, lse_ptr, k_ptr, k_scale_ptr, v_ptr, v_scale_ptr, block_table_ptr,
    block_starts_ptr, seq_lens_ptr, splits_ptr, stride_table, score_scale,
    KV_HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, QUANT_GROUP: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = tl.load(splits_ptr + split * 4)
    first = tl.load(splits_ptr + split * 4 + 2)
    last = tl.load(splits_ptr + split * 4 + 3)
    seq_len = tl.load(seq_lens_ptr + seq)
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, QUANT_GROUP)
    offs_d = tl.arange(0, HEAD_DIM)
    head = kv_head * GROUP_SIZE + offs_m
    q_row = (seq * (KV_HEADS * GROUP_SIZE) + head)[:, None] * HEAD_DIM + offs_d[None, :]
    q = tl.load(q_ptr + q_row, mask=(offs_m < GROUP_SIZE)[:, None], other=0.0)
    q_planes = planes_of(narrow(q.to(tl.float32), tl.float16), 8)
    row_pos = tl.full([BLOCK_M], 0, tl.int32) + seq_len - 1
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = planes_of(tl.zeros([BLOCK_M, HEAD_DIM], tl.float32), 8)
    TILES: tl.constexpr = BLOCK_SIZE // QUANT_GROUP
    for tile in tl.range(first * TILES, last * TILES):
        entry = seq * stride_table + tile // TILES
        group = tile % TILES
        block = tl.load(block_table_ptr + entry).to(tl.int64)
        key_pos = tl.load(block_starts_ptr + entry) + group * QUANT_GROUP + offs_n
        row = (block * KV_HEADS + kv_head) * BLOCK_SIZE + group * QUANT_GROUP
        wanted = key_pos < seq_len
        k = load_v8(k_ptr, row, wanted, HEAD_DIM, HEAD_DIM, tl.float16)
        k_scale = tl.load(k_scale_ptr + row + offs_n, mask=wanted, other=0.0).to(tl.float32)
        scores = _dot_planes(q_planes, k) * (k_scale * score_scale)[None, :]
        scores = mask_scores(scores, key_pos, row_pos, 2147483647, True)
        v_scale = tl.load(v_scale_ptr + row + offs_n, mask=wanted, other=1.0).to(tl.float32)
        weights = scores + rough_log2(v_scale)[None, :]
        p, alpha, m_i = online_softmax(scores, weights, m_i)
        l_i = l_i * alpha + tl.sum(p, 1)
        v = load_v8(v_ptr, row, wanted, HEAD_DIM, HEAD_DIM, tl.float16)
        acc = _add_planes(acc, alpha, narrow(p * v_scale[None, :], tl.float16), v)
    row = split * (KV_HEADS * GROUP_SIZE) + head
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    tl.store(lse_ptr + row, m_i + tl.log2(l_safe), mask=offs_m < GROUP_SIZE)
    out = assemble(acc, 8) * (1.0 / l_safe)[:, None]
    partial = partial_ptr + row[:, None] * HEAD_DIM + offs_d[None, :]
    tl.store(partial, out, mask=(offs_m < GROUP_SIZE)[:, None])


class PerTokenInt8:
    """A decode step over random 8-bit tokens, without sinks or a window.

    Args:
        step: its shape, dtype and lengths; mix "hot" without sinks, so that its tables list plain
            blocks. head_dim is a power of two.
        device: where.
    """

    def __init__(self, step: Step, device: torch.device | str) -> None:
        if step.mix != "hot" or step.sink_tokens or step.window_size or step.query_len != 1:
            raise ValueError(f"PerTokenInt8: step must be a plain decode of hot blocks, got {step}")
        self.step = step
        blocks = sum(map(len, step.rows))
        heads, dim, size = step.shape.num_kv_heads, step.shape.head_dim, step.block_size
        codes, scales = (blocks, heads, size, dim), (blocks, heads, size)
        self.k, self.v = (
            torch.empty(codes, dtype=torch.int8, device=device).random_(-127, 128) for _ in "kv"
        )
        self.k_scale, self.v_scale = (
            torch.empty(scales, dtype=torch.float16, device=device).uniform_(0.01, 0.03)
            for _ in "kv"
        )
        tables = send(step.tables(), torch.device(device))
        self.tables = {name: tables[name] for name in ("block_table", "block_starts", "seq_lens")}
        self.splits, self.split_starts = tables["splits"], tables["split_starts"]
        self.query_start_loc = tables["query_start_loc"]
        q_shape = (len(step.lengths), step.shape.num_q_heads, dim)
        self.q = torch.randn(q_shape, dtype=DTYPES[step.dtype], device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(t.nbytes for t in (self.k, self.v, self.k_scale, self.v_scale))

    def run(self) -> torch.Tensor:
        """Launch the two kernels."""
        seqs, q_heads, dim = self.q.shape
        kv_heads = self.step.shape.num_kv_heads
        group = q_heads // kv_heads
        config = decode_config(current_target(), dim, self.step.dtype, group)
        num_splits = len(self.splits)
        partial = torch.empty((num_splits, q_heads, dim), device=self.q.device)
        lse = torch.empty((num_splits, q_heads), device=self.q.device)
        out = torch.empty_like(self.q)
        _per_token_int8_kernel[(num_splits, kv_heads)](
            self.q, partial, lse, self.k, self.k_scale, self.v, self.v_scale,
            *self.tables.values(), self.splits, self.tables["block_table"].shape[1],
            dim**-0.5 * 1.4426950408889634, KV_HEADS=kv_heads, GROUP_SIZE=group,
            BLOCK_SIZE=self.step.block_size, HEAD_DIM=dim, BLOCK_M=max(config.block_m, group),
            QUANT_GROUP=QUANT_GROUP, num_warps=config.num_warps, num_stages=config.num_stages,
            enable_fp_fusion=True,
        )  # fmt: skip
        _merge_splits_kernel[(seqs, q_heads)](
            partial, lse, None, out, None, None, self.query_start_loc, self.split_starts,
            ROTATED=False, Q_HEADS=q_heads, HEAD_DIM=dim, BLOCK_D=dim, BLOCK_S=16, num_warps=4,
            enable_fp_fusion=True,
        )  # fmt: skip
        return out

    def check(self) -> None:
        """Compare with float64 on the same codes; allow twice the error of the model's dtype."""
        got = self.run().double().cpu()
        group = self.step.shape.num_q_heads // self.step.shape.num_kv_heads
        for seq, (length, row) in enumerate(zip(self.step.lengths, self.step.rows, strict=True)):
            ids = [block.index for block in row]
            k, v = (
                (codes[ids].double() * scale[ids].double()[..., None]).cpu()
                for codes, scale in ((self.k, self.k_scale), (self.v, self.v_scale))
            )
            k, v = (x.transpose(0, 1).flatten(1, 2)[:, :length] for x in (k, v))
            results = {}
            for dtype in (torch.float64, DTYPES[self.step.dtype]):
                q = self.q[seq].cpu().to(dtype).unflatten(0, (-1, group))
                scores = q @ k.to(dtype).transpose(1, 2) * q.shape[-1] ** -0.5
                results[dtype] = (torch.softmax(scores, -1) @ v.to(dtype)).flatten(0, 1).double()
            want, plain = results.values()
            allowed = 2 * (plain - want).abs().max() + torch.finfo(dtype).eps * want.abs().max()
            error = (got[seq] - want).abs().max()
            assert error <= allowed, f"per-token int8: error {error:.3g}, allowed {allowed:.3g}"
