"""Feed one text to a model under one configuration, and write down what happens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

import omlx_cache
from omlx_cache.cache_report import CacheReport
from omlx_cache.compat import cache_name
from omlx_cache.patch_state import state_of
from omlx_cache.tools.attention_mass import MassRecorder, MassTable
from omlx_cache.tools.memory import StepMemory, TierMemory, bytes_at_16_bits, step_memory
from omlx_cache.tools.memory import tier_memory as measure_tiers
from omlx_cache.tools.progress import Progress, silent
from omlx_cache.tools.schedule import Piece


@dataclass(frozen=True)
class Moment:
    """The state after a piece.

    Attributes:
        kind: of the piece.
        tokens: of the text, read so far.
        seconds: that the piece took.
        bytes_by_tier: as in `CacheReport`.
    """

    kind: str
    tokens: int
    seconds: float
    bytes_by_tier: dict[str, int]


@dataclass
class Reading:
    """One text, read under one configuration.

    Attributes:
        logits: [scored, vocabulary] float32, of the last positions of the text.
        hidden: [layers, decode tokens, hidden] float32, after each layer; None if not asked for.
        mass: attention of the decode tokens by block; None if not asked for.
        moments: after each piece.
        report: at the end.
        tiers: bytes at the end.
        step: of the first decoding step.
        prefill_peak: the most bytes that the blocks held up to the end of the prompt.
        bytes_16: what the blocks would take in a 16-bit model, at the end.
    """

    logits: torch.Tensor
    hidden: torch.Tensor | None
    mass: MassTable | None
    moments: list[Moment]
    report: CacheReport
    tiers: dict[str, TierMemory]
    step: StepMemory
    prefill_peak: int
    bytes_16: int

    @property
    def inside(self) -> tuple[torch.Tensor, MassTable]:
        """Hidden states and attention.

        Raises:
            ValueError: when they were not asked for.
        """
        if self.hidden is None or self.mass is None:
            raise ValueError("Reading.inside: the text must have been read with inside=True")
        return self.hidden, self.mass


@dataclass
class _Notes:
    logits: list[torch.Tensor] = field(default_factory=list)
    hidden: list[torch.Tensor] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)


@torch.no_grad()
def read(
    model,
    ids: torch.Tensor,
    config: omlx_cache.CacheConfig,
    pieces: Sequence[Piece],
    scored: int,
    *,
    inside: bool = False,
    progress: Progress = silent,
    step_name: str = "reading",
) -> Reading:
    """Read a text with a `PagedCache` of its own.

    Args:
        model: a causal language model; it is patched meanwhile.
        ids: [1, num_tokens].
        config: of the cache.
        pieces: how the text is cut; the last ones are decode pieces.
        scored: how many of the last positions' logits are kept.
        inside: whether to observe, in the decode pieces, hidden states and attention too.
        progress: told how far the text is.
        step_name: what to call it there.

    Raises:
        OutOfBlocksError: the configuration's pool is too small for the text.
        NotImplementedError, ValueError: as `omlx_cache.patch`.
    """
    notes, recorder = _Notes(), MassRecorder() if inside else None
    total = ids.shape[1]
    with omlx_cache.patched(model, config):
        cache = omlx_cache.PagedCache(model)
        prefill_peak, step = 0, None
        for piece in pieces:
            is_decode = piece.kind == "decode"
            if is_decode and step is None:
                prefill_peak = cache.report().peak_bytes
                step = step_memory(cache, model.config.get_text_config().num_attention_heads)
                cache.observe(recorder)
            keep = max(0, piece.last - max(piece.first, total - scored))
            started = time.perf_counter()
            output = model(
                ids[:, piece.first : piece.last],
                logits_to_keep=max(keep, 1),
                output_hidden_states=inside and is_decode,
                **{cache_name(type(model).forward): cache},
            )
            if ids.is_cuda:
                torch.cuda.synchronize()
            seconds = time.perf_counter() - started
            if keep:
                notes.logits.append(output.logits[0].float())
            if inside and is_decode:
                notes.hidden.append(torch.stack([h[0] for h in output.hidden_states[1:]]).float())
            held = cache.report().bytes_by_tier
            notes.moments.append(Moment(piece.kind, piece.last, seconds, held))
            progress(step_name, piece.last, total)
        if step is None:
            raise ValueError("read: the last pieces must be decode pieces, got none")
        config = cache.config
        return Reading(
            logits=torch.cat(notes.logits),
            hidden=torch.cat(notes.hidden, 1) if inside else None,
            mass=(
                None if recorder is None else recorder.table(config.block_size, config.sink_tokens)
            ),
            moments=notes.moments,
            report=cache.report(),
            tiers=measure_tiers(cache),
            step=step,
            prefill_peak=prefill_peak,
            bytes_16=bytes_at_16_bits(cache),
        )


@torch.no_grad()
def read_unpatched(
    model,
    ids: torch.Tensor,
    pieces: Sequence[Piece],
    scored: int,
    *,
    progress: Progress = silent,
    step_name: str = "reading",
) -> torch.Tensor:
    """Read a text with the model's own attention and cache.

    Args:
        model: a causal language model, unpatched.
        ids: [1, num_tokens].
        pieces: how the text is cut.
        scored: how many of the last positions' logits are kept.
        progress: told how far the text is.
        step_name: what to call it there.

    Returns:
        [scored, vocabulary] float32.
    """
    name, total, cache = cache_name(type(model).forward), ids.shape[1], None
    logits = []
    for piece in pieces:
        keep = max(0, piece.last - max(piece.first, total - scored))
        output = model(
            ids[:, piece.first : piece.last],
            logits_to_keep=max(keep, 1),
            use_cache=True,
            **{name: cache},
        )
        cache = getattr(output, name)
        if keep:
            logits.append(output.logits[0].float())
        progress(step_name, piece.last, total)
    return torch.cat(logits)


def chunk_of(model, config: omlx_cache.CacheConfig) -> int | None:
    """Return how many prompt tokens the model takes at a time under a configuration; None: all.

    Raises:
        NotImplementedError, ValueError: as `omlx_cache.patch`.
    """
    with omlx_cache.patched(model, config):
        return config.prefill_chunk if state_of(model).spec.chunkable else None


@torch.no_grad()
def kld_by_layer(model, reference: torch.Tensor, candidate: torch.Tensor) -> list[float] | None:
    """Return after each layer how far the two readings are apart, in nats.

    The hidden state after a layer is read by the model's own final norm and output head, as if the
    layer were the last; this is the mean KL(reference || candidate) of the two distributions.

    Args:
        model: unpatched or patched, which doesn't matter here.
        reference, candidate: [layers, tokens, hidden] of `Reading.hidden`.

    Returns:
        One number a layer; None for a model whose final norm is not where it is usually.
    """
    decoder = model.get_decoder()
    norm, head = getattr(decoder, "norm", None), model.get_output_embeddings()
    if norm is None or head is None:
        return None
    found = []
    last = reference.shape[0] - 1
    for layer, pair in enumerate(zip(reference, candidate, strict=True)):
        # What transformers calls the last hidden state is normed already.
        normed = [x.to(head.weight.dtype) for x in pair]
        normed = [x if layer == last else norm(x) for x in normed]
        p, q = (head(x).float().log_softmax(-1) for x in normed)
        found.append((p.exp() * (p - q)).sum(-1).mean().item())
    return found
