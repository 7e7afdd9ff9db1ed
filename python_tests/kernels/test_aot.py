"""The compile proof: every kernel, through its launcher, for GPUs that are not here."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="no triton for this platform")
sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

aot = pytest.importorskip("aot")

pytestmark = pytest.mark.aot


def check(arch: int | str, workload: aot.Workload, launch: Callable, kernels: dict) -> None:
    """Compile what ``launch`` launches; fail with all that is wrong."""
    reports = aot.reports(arch, launch)
    assert Counter(r.name for r in reports) == kernels
    wrong = [(r.name, *aot.problems(r, workload)) for r in reports]
    assert not [w for w in wrong if len(w) > 1], wrong


def check_attention(arch: int | str, head_dim: int, dtype: str, heads: str = "gqa", **kw) -> None:
    """Check decode and extend over all tiers, by default with every option."""
    workload = aot.Workload(head_dim, dtype, heads, **({"options": True} | kw))
    names = ("_paged_decode_kernel", "_merge_splits_kernel", "_paged_extend_kernel")
    check(arch, workload, workload.attend, dict.fromkeys(names, 1))


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("arch", [86, 90])
def test_main_architectures(arch, head_dim, dtype):
    check_attention(arch, head_dim, dtype)


def test_without_options():
    check_attention(86, 128, "fp16", options=False)


@pytest.mark.parametrize("arch", [80, 89, 100, 120, "gfx942"])
def test_other_architectures(arch):
    check_attention(arch, 128, "fp16")


@pytest.mark.parametrize(("head_dim", "heads"), [(80, "mha"), (256, "gqa")])
def test_other_shapes(head_dim, heads):
    check_attention(80, head_dim, "fp16", heads)


@pytest.mark.parametrize(
    ("arch", "head_dim", "dtype"), [(80, 128, "fp16"), (86, 80, "bf16"), ("gfx942", 64, "fp32")]
)
def test_writing(arch, head_dim, dtype):
    workload = aot.Workload(head_dim, dtype)
    # Plain and rotating; every pair of tiers.
    kernels = {"_append_kv_kernel": 2, "_convert_blocks_kernel": 6}
    check(arch, workload, workload.write, kernels)
