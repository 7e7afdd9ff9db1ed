"""Copy whole blocks of one tier: what a holder of a shared block does before it writes to it.

Grid: (blocks, chunks of a block), one launch a part (codes, scales). Parts are copied as 32-bit
words, so dtypes don't matter; every part of a block is a whole number of them (`BlockFormat`: at
least 64 tokens, an even number of channels; a sink page may be odd in tokens, its channels are a
multiple of 8). Moves: each byte is read once and written once, plus 8 bytes of ids a program.
Contract: `omlx_kernels.ops.copy_blocks`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from omlx_kernels.layout import TierBlocks

WORDS = 4096
"""32-bit words that a program copies: 16 KiB, 8 in flight a thread as two 128-bit loads."""


@triton.jit
def _copy_blocks_kernel(ptr, src_ptr, dst_ptr, BLOCK_WORDS: tl.constexpr, WORDS: tl.constexpr):
    src = tl.load(src_ptr + tl.program_id(0)).to(tl.int64)
    dst = tl.load(dst_ptr + tl.program_id(0)).to(tl.int64)
    offs = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    mask = offs < BLOCK_WORDS
    words = tl.load(ptr + src * BLOCK_WORDS + offs, mask=mask, other=0)
    tl.store(ptr + dst * BLOCK_WORDS + offs, words, mask=mask)


def copy_blocks(blocks: TierBlocks, src_ids: torch.Tensor, dst_ids: torch.Tensor) -> None:
    """Copy blocks part by part; see `omlx_kernels.ops.copy_blocks`."""
    src_ids, dst_ids = src_ids.contiguous(), dst_ids.contiguous()
    with torch.cuda.device_of(blocks.k):
        for tensor in blocks.tensors().values():
            words = tensor.flatten(1).view(torch.int32)
            if not words.shape[1]:
                continue  # a sink page without tokens
            grid = (src_ids.numel(), triton.cdiv(words.shape[1], WORDS))
            _copy_blocks_kernel[grid](
                words, src_ids, dst_ids, BLOCK_WORDS=words.shape[1], WORDS=WORDS, num_warps=8
            )
