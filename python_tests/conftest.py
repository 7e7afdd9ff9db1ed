"""Set up every test process: interpreter or compiler, no network, fixed seeds.

Triton decides when it is first imported whether ``@triton.jit`` interprets or compiles, and an
interpreting process cannot compile. So there are two kinds of test process, and this file picks
the kind before any test module is imported:

============================  ===================  ==========================
command                       Triton kernels       tests left out
============================  ===================  ==========================
``pytest``, no CUDA device    interpreted, on CPU  ``aot``
``TRITON_INTERPRET=1 pytest`` interpreted, on CPU  ``aot``
``pytest``, CUDA device       run on the GPU       ``aot``, ``interpreter``
``pytest -m aot``             only compiled        all but ``aot``
============================  ===================  ==========================

``make test`` runs the second and the fourth. Nothing is left out in silence: a test that was
selected but cannot run in the process at hand is skipped with the reason.
"""

import importlib.metadata
import os
import random
import re
import sys

import hypothesis
import numpy as np
import pytest
import torch

# Tests never reach a hub: models come from a package or are made on the spot. transformers reads
# this when it is imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# No deadline: one example under Triton's interpreter may take seconds. On CI the examples are the
# same every time.
hypothesis.settings.register_profile(
    "omlx", deadline=None, derandomize="CI" in os.environ, print_blob=True
)
hypothesis.settings.load_profile("omlx")


def pytest_configure(config: pytest.Config) -> None:
    """Choose between Triton's interpreter and its compiler for this process."""
    selects_aot = _selects_aot(config.option.markexpr)
    if "TRITON_INTERPRET" not in os.environ and not selects_aot and not torch.cuda.is_available():
        if "triton" in sys.modules:
            raise pytest.UsageError(
                "triton was imported before python_tests/conftest.py could choose its interpreter; "
                "run with TRITON_INTERPRET=1 in the environment"
            )
        os.environ["TRITON_INTERPRET"] = "1"
    if selects_aot and _interpreting():
        raise pytest.UsageError(
            "-m aot compiles kernels, which a process with TRITON_INTERPRET=1 cannot do; "
            "unset the variable (make aot does)"
        )


def pytest_report_header() -> list[str]:
    """Say what is tested: versions, device, and how Triton kernels run."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    triton = "interpreted (TRITON_INTERPRET=1)" if _interpreting() else "compiled"
    return [
        ", ".join(f"{name} {_version(name)}" for name in ("torch", "triton", "transformers")),
        f"device: {device}; {torch.get_num_threads()} CPU threads; Triton kernels: {triton}",
    ]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this process cannot run."""
    reasons = {}
    if not _selects_aot(config.option.markexpr):
        reasons["aot"] = "compile checks need a process of their own: pytest -m aot"
    if not _interpreting():
        reasons["interpreter"] = "needs TRITON_INTERPRET=1"
    for item in items:
        for marker, reason in reasons.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 -- libraries under test draw from the global generator
    torch.manual_seed(0)


def _selects_aot(markexpr: str) -> bool:
    """Whether a ``-m`` expression asks for the compile checks, rather than to leave them out."""
    return re.search(r"(?<!not )\baot\b", markexpr) is not None


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET", "").lower() in {"1", "true", "yes", "on", "y"}


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
