"""Each way of generating text on each family: 16 bits, 8 bits, and with a window.

At 16 bits the text is that of the stock model in the same mode. At every setting the logits from
which a mode chose its tokens are those of a plain forward pass over the finished sequences: of the
stock model, or, with a window and pinned sinks, of the patched one (which other tests compare
with stock attention under a mask). Beams, drafts, crops and copies must not show.

The table in ``docs/generation.md`` is rendered from these results: ``make modes``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import pytest
import torch
from modes import MODES, Mode
from outcome import Outcome
from tiny import FAMILIES, tiny_model

import omlx_cache

PAGES = {"block_size": 64, "recent_tokens": 0, "prefill_chunk": 100}
SETTINGS = {
    "16 bits": PAGES | {"cache_bits": 16},
    "8 bits": PAGES | {"cache_bits": 8},
    "window": PAGES | {"cache_bits": 16, "window_size": 70},
}
EXACT, EIGHT_BITS, HALF = 1e-4, 0.08, 0.02
"""How far logits may be off: in means over the vocabulary, relative to their size.

A row, token or block that is mistaken for another is off by 1 or so.
"""

CORE_FAMILIES = ("llama", "gemma2")
CORE_MODES = ("beams", "draft model")
"""What `make test` runs: some families in all modes, and all families in some modes."""


@lru_cache(maxsize=2)
def model_of(family: str, dtype: torch.dtype):
    model = tiny_model(family).to(dtype)
    model.family = family
    return model


@lru_cache(maxsize=len(MODES))
def stock_text(family: str, title: str) -> torch.Tensor:
    mode = MODES[title]
    return seeded(mode.stock or mode.run, model_of(family, mode.dtype)).sequences


def seeded(run: Callable, model) -> Outcome:
    torch.manual_seed(3)
    return run(model)


@torch.no_grad()
def logits_at_once(model, outcome: Outcome) -> torch.Tensor:
    """Put the finished sequences through the model, without a cache."""
    positions = (outcome.mask.cumsum(-1) - 1).clamp(min=0)
    new = outcome.logits.shape[1]
    given = {"attention_mask": outcome.mask, "position_ids": positions, "use_cache": False}
    return model(outcome.sequences, **given).logits[:, -new - 1 : -1].float()


def off(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Return how far each token's logits are off."""
    return (got - want).abs().mean(-1) / want.abs().mean(-1)


def check(mode: Mode, family: str, setting: str, outcome: Outcome, model) -> None:
    """Compare logits: each token's, or, where a rounding may decide an attention, their mean."""
    assert outcome.logits.isfinite().all()
    want = logits_at_once(model, outcome)
    found, bound = off(outcome.logits, want).max(), EXACT
    if mode.dtype != torch.float32:  # twice the error of the stock model in that dtype
        exact = logits_at_once(model_of(family, torch.float32), outcome)
        found, bound = off(outcome.logits, exact).mean(), HALF + 2 * off(want, exact).mean()
        if setting == "window" or bound.isnan():
            return  # nothing to compare with: the stock Qwen2 with large keys is NaN in float16
    if setting == "8 bits":
        found, bound = off(outcome.logits, want).mean(), bound + EIGHT_BITS
    assert found < bound, f"logits are off by {found:.2%} of their size"


def cells() -> list:
    """Name every cell of the table; those outside of the core are marked ``matrix``."""
    return [
        pytest.param(
            family,
            title,
            setting,
            marks=() if family in CORE_FAMILIES or title in CORE_MODES else pytest.mark.matrix,
        )
        for family in FAMILIES
        for title in MODES
        for setting in SETTINGS
    ]


@pytest.mark.parametrize(("family", "title", "setting"), cells())
def test_mode(family, title, setting, record_property):
    for name, value in (("family", family), ("mode", title), ("setting", setting)):
        record_property(name, value)
    mode = MODES[title]
    model = model_of(family, mode.dtype)
    text = None
    if setting == "16 bits" and mode.dtype == torch.float32 and mode.has_stock_text:
        text = stock_text(family, title)
    with omlx_cache.patched(model, **SETTINGS[setting]):
        outcome = seeded(mode.run, model)
        if setting == "window":
            check(mode, family, setting, outcome, model)
    if text is not None:
        assert torch.equal(outcome.sequences, text)
    if setting != "window":
        check(mode, family, setting, outcome, model)
