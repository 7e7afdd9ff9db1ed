"""Every example in a docstring runs and gives what it shows."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for package in ("omlx_kernels", "omlx_cache")
    for path in sorted((ROOT / package).rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str):
    module = importlib.import_module(name)
    assert any(test.examples for test in doctest.DocTestFinder().find(module)), "none was found"
    assert doctest.testmod(module).failed == 0
