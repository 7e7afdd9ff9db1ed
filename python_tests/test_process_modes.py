"""The two kinds of test process (see conftest.py) are what they claim to be."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="no triton for this platform")

from triton.runtime.interpreter import InterpretedFunction  # noqa: E402


def _kernel(x_ptr):
    pass


@pytest.mark.interpreter
def test_this_process_interprets():
    assert isinstance(triton.jit(_kernel), InterpretedFunction)


@pytest.mark.aot
def test_this_process_compiles():
    assert isinstance(triton.jit(_kernel), triton.JITFunction)


def test_compile_checks_refuse_an_interpreting_process():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "aot", __file__],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "unset the variable" in done.stderr
