"""Read with llama.cpp through llama-cpp-python's low-level interface, the cache of a given type.

The weights are those of the GGUF file, 4-bit as they lie, and the kernels are llama.cpp's own: its
logits are compared with its own f16 cache, not with PyTorch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from peers_contenders import Source

BATCH = 512
PADDING = 256  # llama.cpp rounds the length of a context up to this


class LlamaReader:
    """A GGUF model, and the type of its cache's numbers.

    Args:
        gguf: the file.
        kind: ``f16``, ``q8_0`` or ``q4_0``.

    Raises:
        RuntimeError: the file can't be loaded.
    """

    def __init__(self, gguf: str, kind: str) -> None:
        import llama_cpp

        self.api = llama_cpp
        self.type = getattr(llama_cpp, f"GGML_TYPE_{kind.upper()}")
        self._silence()
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(str(gguf).encode(), params)
        if not self.model:
            raise RuntimeError("llama.cpp can't load the GGUF file")

    def _silence(self) -> None:
        """Leave out its log; the callback must outlive the library's use of it."""
        self._log = self.api.llama_log_callback(lambda level, text, data: None)
        self.api.llama_log_set(self._log, None)

    def start(self, max_tokens: int) -> LlamaSession:
        """Return a session with an empty cache of ``max_tokens`` cells, rounded up."""
        params = self.api.llama_context_default_params()
        params.n_ctx = -(-max_tokens // PADDING) * PADDING
        params.n_batch = params.n_ubatch = BATCH
        params.n_threads = params.n_threads_batch = torch.get_num_threads()
        params.type_k = params.type_v = self.type
        params.flash_attn_type = self.api.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.no_perf = True
        context = self.api.llama_init_from_model(self.model, params)
        if not context:
            raise RuntimeError("llama.cpp can't make a context with this type of cache")
        return LlamaSession(self, context)


class LlamaSession:
    """A context of llama.cpp."""

    def __init__(self, reader: LlamaReader, context) -> None:
        self.reader, self.context, self.api = reader, context, reader.api
        self.vocabulary = self.api.llama_vocab_n_tokens(
            self.api.llama_model_get_vocab(reader.model)
        )
        self.batch = self.api.llama_batch_init(BATCH, 0, 1)
        self.seen = 0

    def feed(self, ids: Sequence[int], kept: int) -> torch.Tensor:
        """Read ids; return float32 logits [kept, vocabulary] after the last ``kept`` of them."""
        found = []
        for first in range(0, len(ids), BATCH):
            piece = ids[first : first + BATCH]
            asked = [first + i >= len(ids) - kept for i in range(len(piece))]
            self._decode(piece, asked)
            found += [self._logits(i) for i, is_asked in enumerate(asked) if is_asked]
        return torch.from_numpy(np.stack(found))

    def _decode(self, ids: Sequence[int], asked: Sequence[bool]) -> None:
        self.batch.n_tokens = len(ids)
        for i, (token, is_asked) in enumerate(zip(ids, asked, strict=True)):
            self.batch.token[i] = token
            self.batch.pos[i] = self.seen + i
            self.batch.n_seq_id[i] = 1
            self.batch.seq_id[i][0] = 0
            self.batch.logits[i] = is_asked
        code = self.api.llama_decode(self.context, self.batch)
        if code != 0:
            raise RuntimeError(f"llama_decode failed with code {code}")
        self.seen += len(ids)

    def _logits(self, column: int) -> np.ndarray:
        pointer = self.api.llama_get_logits_ith(self.context, column)
        return np.ctypeslib.as_array(pointer, shape=(self.vocabulary,)).copy()

    def num_bytes(self) -> int:
        """Return the bytes of the cells in use, as llama.cpp would save them."""
        return self.api.llama_state_seq_get_size(self.context, 0)

    def __del__(self) -> None:
        self.api.llama_batch_free(self.batch)
        self.api.llama_free(self.context)


def open_llama(kind: str, source: Source, dtype: torch.dtype) -> LlamaReader:
    """Return a reader of the GGUF file; llama.cpp chooses the dtype it computes in by itself.

    Raises:
        RuntimeError: there is no GGUF file of this model.
    """
    if source.gguf is None:
        raise RuntimeError("there is no GGUF file of this model; name one with --gguf")
    return LlamaReader(str(source.gguf), kind)
