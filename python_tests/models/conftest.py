"""The real model for tests marked ``real_model``: prepared once, in the cache of the demo.

The first use on a machine takes minutes (the float checkpoint some 20 s, quantizing one to four
minutes on two cores) and shows how far it is; later sessions find both where the first put them.
A model that can't be prepared is an error, not a skipped test: leave these tests out with
``-m "not real_model"``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

# omlx_cache is imported in the fixtures: this file may be read before python_tests/conftest.py
# has decided how Triton runs, and importing transformers can import triton.


@pytest.fixture(scope="session")
def smollm2_path(request: pytest.FixtureRequest) -> Path:
    """SmolLM2-135M-Instruct in float32: a directory for ``load_model``."""
    from omlx_cache.tools.smollm2 import smollm2_checkpoint

    return _prepare(request, smollm2_checkpoint)


@pytest.fixture(scope="session")
def smollm2_gptq_path(request: pytest.FixtureRequest) -> Path:
    """SmolLM2-135M-Instruct, GPTQ 4-bit in groups of 64: a directory for ``load_model``."""
    from omlx_cache.tools.smollm2 import smollm2_gptq_checkpoint

    return _prepare(request, smollm2_gptq_checkpoint)


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_path: Path):
    """The tokenizer of both, with its chat template."""
    from omlx_cache.tools.loading import load_tokenizer

    return load_tokenizer(smollm2_path)


def _prepare(request: pytest.FixtureRequest, make: Callable[..., Path]) -> Path:
    """Make the model while its progress goes to the terminal, not into pytest's capture."""
    from rich.console import Console

    from omlx_cache.tools.progress import ConsoleProgress

    capture = request.config.pluginmanager.getplugin("capturemanager")
    shown = nullcontext() if capture is None else capture.global_and_fixture_disabled()
    with shown, ConsoleProgress(Console()) as progress:
        return make(progress=progress)
