"""Which implementation and which kernel runs: one test a branch."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest
import torch
from strategies import make_case
from triton_device import Spy, needs_device, to_device

from omlx_kernels import ops
from omlx_kernels.layout import Tier
from omlx_kernels.triton import decode

KERNELS = {
    "_append_kv_kernel": "append_kv",
    "_convert_blocks_kernel": "convert_blocks",
    "_copy_blocks_kernel": "copy_blocks",
    "_paged_decode_kernel": "decode",
    "_merge_splits_kernel": "decode",
    "_paged_extend_kernel": "extend",
}
DECODE = ["_paged_decode_kernel", "_merge_splits_kernel"]
EXTEND = ["_paged_extend_kernel"]


@pytest.mark.parametrize(
    ("device", "name"),
    [("cuda", "triton"), ("meta", "vectorized"), ("mps", "vectorized"), ("xpu", "vectorized")],
)
def test_the_device_chooses(device, name):
    # CPUs: test_native_runtime.
    assert ops.implementation(torch.device(device)).__name__ == f"omlx_kernels.{name}"


@pytest.mark.parametrize("name", ops.IMPLEMENTATIONS)
def test_a_forced_implementation_serves_every_device(name):
    with ops.use_implementation(name) as module:
        for device in ("cpu", "cuda"):
            assert ops.implementation(torch.device(device)) is module
        assert module.__name__ == f"omlx_kernels.{name}"
    assert ops.implementation(torch.device("cuda")).__name__ == "omlx_kernels.triton"


def test_an_unknown_implementation_is_refused():
    with (
        pytest.raises(ValueError, match="one of triton, native, vectorized, reference, got 'cud"),
        ops.use_implementation("cuda"),
    ):
        pass


@pytest.fixture
def ran(monkeypatch):
    """Note the Triton kernels that are launched, and force the Triton implementation."""
    launched: list[str] = []
    for name, file in KERNELS.items():
        module = import_module(f"omlx_kernels.triton.{file}")
        monkeypatch.setattr(module, name, Spy(getattr(module, name), name, launched))
    with ops.use_implementation("triton"):
        yield launched


@needs_device
@pytest.mark.parametrize(
    ("lens", "new", "mass", "want"),
    [
        ([70, 9], [1, 1], False, DECODE),
        ([70, 9], [1, 0], False, DECODE),
        ([70, 9], [1, 1], True, DECODE),
        ([70, 9], [2, 1], False, EXTEND),
        ([70, 9], [2, 1], True, [*DECODE, *EXTEND]),  # the mass of the newest query
        ([0, 0], [0, 0], False, []),
    ],
)
def test_attention(lens, new, mass, want, ran):
    case = to_device(make_case(lens, new, head_dim=32))
    masses = torch.empty(len(case.meta.splits), 2, device=case.q.device) if mass else None
    ops.paged_attention(case.q, case.blocks, case.meta, sm_scale=0.1, split_mass=masses)
    assert ran == want


@needs_device
def test_decode_without_a_split_only_merges(ran):
    case = to_device(make_case([70], [1], head_dim=32, blocks_per_split=9))
    case.meta.split_starts.zero_()
    meta = type(case.meta)(**(vars(case.meta) | {"splits": case.meta.splits[:0]}))
    out = ops.paged_attention(case.q, case.blocks, meta, sm_scale=0.1)
    assert ran == ["_merge_splits_kernel"]
    assert not out.any()


@needs_device
def test_writers(ran):
    blocks = to_device(make_case([200], [1], head_dim=32)).blocks
    k = torch.zeros(2, 1, 32, device=blocks.hot.k.device)
    ids = to_device(torch.zeros(1, dtype=torch.int32))
    ops.append_kv(k, k, blocks.hot, to_device(torch.tensor([0, 1])))
    ops.convert_blocks(blocks.hot, blocks.k8v8, Tier.HOT, Tier.K8V8, ids, ids)
    ops.copy_blocks(blocks.hot, ids, ids + 1)
    assert ran == ["_append_kv_kernel", "_convert_blocks_kernel", *2 * ["_copy_blocks_kernel"]]


WAITS = {"item", "tolist", "cpu", "numpy", "nonzero", "synchronize", "unique"}
"""Methods that wait for the device."""


@pytest.mark.parametrize(
    "path", sorted(Path(decode.__file__).parent.glob("*.py")), ids=lambda p: p.stem
)
def test_a_launch_never_waits_for_the_device(path):
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    names = {call.func.attr for call in calls if isinstance(call.func, ast.Attribute)}
    assert not names & WAITS
