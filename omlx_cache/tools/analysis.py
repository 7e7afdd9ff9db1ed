"""The analysis behind `cache_analyzer`: read the text several times, and put the numbers together.

1. with an unquantized paged cache that forgets nothing within the trained length: the reference;
2. with the configuration at hand;
3. in a 16-bit dtype with the model's own attention and cache, which compute what the reference does
   and differ by the rounding of the dtype alone: no configuration can be told to be nearer;
4. with each change that the first two suggest.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

import omlx_cache
from omlx_cache.tools.attention_mass import MassTable
from omlx_cache.tools.divergence import compare
from omlx_cache.tools.machine import machine, versions
from omlx_cache.tools.memory import as_data
from omlx_cache.tools.progress import Progress
from omlx_cache.tools.reading import Reading, chunk_of, kld_by_layer, read, read_unpatched
from omlx_cache.tools.recommendation import (
    Candidate,
    Measured,
    candidates,
    choose,
    spelled,
    yaml_of,
)
from omlx_cache.tools.schedule import PROBE_TOKENS, pieces

TOP_BLOCKS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Plan:
    """What is asked for.

    Attributes:
        config: to analyze.
        decode: tokens at the end that come one at a time, and whose attention is observed.
        scored: last positions whose next-token distributions are compared.
        sparsity_mass: the share of the attention that defines sparsity.
        max_kld: bound on the KL divergence of a recommendation, in nats.
        try_changes: whether to read the text again with each candidate.
    """

    config: omlx_cache.CacheConfig
    decode: int = 32
    scored: int = 512
    sparsity_mass: float = 0.05
    max_kld: float = 0.01
    try_changes: bool = True


def analyze(model, ids: torch.Tensor, plan: Plan, progress: Progress) -> dict:
    """Read a text and return every number as plain data; see the keys below.

    Args:
        model: a causal language model, unpatched.
        ids: [1, num_tokens].
        plan: what is asked for.
        progress: told how far each reading is.

    Raises:
        OutOfBlocksError: the configuration's pool is too small for the text.
        NotImplementedError, ValueError: as `omlx_cache.patch`.
    """
    config = plan.config
    cut = pieces(ids.shape[1], chunk_of(model, config), plan.decode)

    def reading(name: str, of: omlx_cache.CacheConfig, inside: bool = False) -> Reading:
        return read(
            model, ids, of, cut, plan.scored, inside=inside, progress=progress, step_name=name
        )

    reference = reading("reading, unquantized", reference_of(config), inside=True)
    own = reading("reading, this configuration", config, inside=True)
    (_, reference_mass), (_, own_mass) = reference.inside, own.inside
    agreement = compare(reference.logits, own.logits, ids)
    rounding = None
    if model.dtype.itemsize <= 2:
        plain = read_unpatched(
            model, ids, cut, plan.scored, progress=progress, step_name="reading, unpatched"
        )
        rounding = asdict(compare(reference.logits, plain, ids))
    measured = Measured(own.report.total_bytes, agreement.kld, agreement.top1)
    tried: list[tuple[Candidate, Measured]] = []
    if plan.try_changes:
        for candidate in candidates(
            config, measured, reference_mass, own.report.block_utilization, plan.max_kld
        ):
            if candidate.goes_on and tried and tried[-1][1].kld > plan.max_kld:
                continue
            other = reading(f"trying {spelled(candidate.change)}", candidate.apply(config))
            result = compare(reference.logits, other.logits, ids)
            tried.append((candidate, Measured(other.report.total_bytes, result.kld, result.top1)))
    chosen = choose(measured, tried, plan.max_kld)
    best = config if chosen is None else tried[chosen][0].apply(config)
    return {
        "machine": machine(),
        "versions": versions(),
        "device": ids.device.type,
        "model": _model_data(model),
        "config": config.to_dict(),
        "text": {"tokens": ids.shape[1], "decode": plan.decode, "scored": plan.scored},
        "report": own.report.to_dict(),
        "memory": _memory_data(own),
        "attention": _attention_data(reference_mass, own_mass, plan.sparsity_mass),
        "quality": {
            **asdict(agreement),
            "rounding": rounding,
            "kld_by_layer": _by_layer(model, reference, own),
        },
        "speed": _speed_data(own),
        "recommendation": {
            "max_kld": plan.max_kld,
            "tried": [{"change": spelled(c.change), "why": c.why, **asdict(m)} for c, m in tried],
            "chosen": chosen,
            "yaml": yaml_of(best),
        },
    }


def reference_of(config: omlx_cache.CacheConfig) -> omlx_cache.CacheConfig:
    """Return the configuration of the unquantized cache, in blocks that begin where these do."""
    return omlx_cache.CacheConfig(
        cache_bits=16,
        block_size=config.block_size,
        sink_tokens=config.sink_tokens,
        prefill_chunk=config.prefill_chunk,
    )


def _by_layer(model, reference: Reading, own: Reading) -> list[float] | None:
    return kld_by_layer(model, reference.inside[0], own.inside[0])


def _model_data(model) -> dict:
    config = model.config.get_text_config()
    return {
        "class": type(model).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "layers": config.num_hidden_layers,
        "trained_length": getattr(config, "max_position_embeddings", None),
    }


def _memory_data(own: Reading) -> dict:
    return {
        **as_data(own.tiers, own.step),
        "prefill_peak": own.prefill_peak,
        "peak": own.report.peak_bytes,
        "steady": own.report.total_bytes,
        "unquantized": own.report.unquantized_bytes,
        "at_16_bits": own.bytes_16,
        "over_time": [{"tokens": m.tokens, **m.bytes_by_tier} for m in own.moments],
    }


def _attention_data(reference: MassTable, own: MassTable, threshold: float) -> dict:
    """Put together where attention goes: in full (the reference), and how sparse what is cached."""
    sparsity = own.sparsity(threshold)
    windows, size = [], int(reference.tokens.max())
    while size < reference.length:
        windows.append(size)
        size *= 2
    blocks = sum(start >= 0 for start in reference.starts)
    return {
        "sparsity": float(sparsity.mean()),
        "sparsity_by_layer": sparsity.tolist(),
        "sparsity_mass": threshold,
        "definition": (
            f"share of the cached tokens, in whole blocks, that together get less than "
            f"{threshold:.0%} of the attention; mean over the layers"
        ),
        "starts": reference.starts,
        "tokens": reference.tokens.tolist(),
        "mass": reference.mass.tolist(),
        "kept_by_sinks": reference.kept_by_sinks().tolist(),
        "kept_by_newest": {w: reference.kept_by_newest(w).tolist() for w in windows},
        "kept_by_top": {
            k: reference.kept_by_top(k).tolist() for k in TOP_BLOCKS if k < max(blocks, 2)
        },
    }


def _speed_data(own: Reading) -> list[dict]:
    """Return tokens/s and seconds to the first token at each length that was probed."""
    found, prompt, probes = [], 0.0, []
    for moment in own.moments:
        if moment.kind == "prefill":
            prompt += moment.seconds
        elif moment.kind == "probe":  # not decode: observing takes time
            probes.append(moment)
        if len(probes) == PROBE_TOKENS:
            seconds = sorted(m.seconds for m in probes)[PROBE_TOKENS // 2]
            found.append(
                {
                    "tokens": probes[0].tokens - 1,
                    "tokens_per_s": 1 / seconds,
                    "first_token_s": prompt + probes[0].seconds,
                }
            )
            probes = []
    return found
