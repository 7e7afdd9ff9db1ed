"""Hold ``make bench`` to ten minutes on two cores, and say in its results what they were run on.

Cases marked ``long`` wait for ``--long``. When ``--minutes`` are over, no further case starts: it
is skipped, with that as its reason. A case that runs then may still take a while.
"""

from __future__ import annotations

import os
import platform
import time

import pytest
import torch
from measuring import machine

DEFAULT_MINUTES = 9.0
STARTED = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the two options."""
    group = parser.getgroup("omlx_cache")
    group.addoption("--long", action="store_true", help="also run the cases that take long")
    group.addoption(
        "--minutes",
        type=float,
        default=None,
        help=f"start no case after this; default: {DEFAULT_MINUTES:g}, without end with --long",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", "long: a case that takes long; runs with --long")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out long cases, unless they are asked for; pytest counts them as deselected."""
    if config.getoption("--long"):
        return
    left_out = [item for item in items if item.get_closest_marker("long")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("long")]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start no case after the end."""
    minutes = item.config.getoption("--minutes")
    if minutes is None:
        minutes = float("inf") if item.config.getoption("--long") else DEFAULT_MINUTES
    if time.monotonic() - STARTED > minutes * 60:
        pytest.skip(f"{minutes:g} minutes are over; --minutes gives it more")


def pytest_benchmark_update_json(
    config: pytest.Config, benchmarks: list, output_json: dict
) -> None:
    """Replace pytest-benchmark's description of the machine, which names it, by our own."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    output_json["machine_info"] = machine(device) | {
        "system": platform.system(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    del output_json["commit_info"]
