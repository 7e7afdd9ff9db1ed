"""The compile proof: every kernel, through its launcher, for GPUs that are not here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="no triton for this platform")
sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

pytestmark = pytest.mark.aot

KERNELS = [
    "_append_kv_kernel",
    "_convert_k8v8_kernel",
    "_paged_decode_kernel",
    "_merge_splits_kernel",
    "_paged_extend_kernel",
]


def check(arch: int | str, head_dim: int, dtype: str, heads: str) -> None:
    """Compile a workload; fail with all that is wrong."""
    import aot

    workload = aot.Workload(head_dim, dtype, heads)
    reports = aot.reports(arch, workload)
    assert [r.name for r in reports] == KERNELS
    wrong = {r.name: list(aot.problems(r, workload)) for r in reports}
    assert not any(wrong.values()), wrong


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("arch", [80, 86, 89, 90])
def test_main_architectures(arch, head_dim, dtype):
    check(arch, head_dim, dtype, "gqa")


@pytest.mark.parametrize("arch", [100, 120, "gfx942"])
def test_other_architectures(arch):
    check(arch, 128, "fp16", "gqa")


@pytest.mark.parametrize(("head_dim", "heads"), [(80, "mha"), (256, "gqa"), (128, "mha")])
def test_other_shapes(head_dim, heads):
    check(86, head_dim, "fp16", heads)
