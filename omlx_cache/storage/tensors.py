"""Tensors of PyTorch as bytes, and back."""

from __future__ import annotations

import torch

from omlx_cache.storage.codec import RawTensor

DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.int64: "I64",
}
"""Names of dtypes in safetensors."""

DTYPE_OF = {name: dtype for dtype, name in DTYPES.items()}
"""The other way round."""


def to_raw(tensor: torch.Tensor) -> RawTensor:
    """Return a tensor's bytes; they share memory with a contiguous tensor on the CPU.

    Example:
        >>> to_raw(torch.tensor([[1.0], [-2.0]], dtype=torch.float16)).dtype
        'F16'
    """
    flat = tensor.detach().cpu().contiguous().flatten()
    return RawTensor(DTYPES[tensor.dtype], tuple(tensor.shape), flat.view(torch.uint8).numpy().data)


def from_raw(raw: RawTensor) -> torch.Tensor:
    """Return a new tensor on the CPU.

    Example:
        >>> from_raw(RawTensor("I8", (2, 1), b"\\x01\\xff"))
        tensor([[ 1],
                [-1]], dtype=torch.int8)
    """
    dtype = DTYPE_OF[raw.dtype]
    if not raw.num_bytes:
        return torch.empty(raw.shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw.data), dtype=dtype).reshape(raw.shape)
