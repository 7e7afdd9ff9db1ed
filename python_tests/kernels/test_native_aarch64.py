"""The native kernels on aarch64: cross-compiled, run in an emulator, compared with the oracle."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from unittest import mock

import pytest
import torch
from filelock import FileLock
from native_elsewhere import REPLAY, Elsewhere
from strategies import make_case

from omlx_kernels import native, reference
from omlx_kernels.layout import BLOCK_TIERS, BlockFormat, Tier
from omlx_kernels.native import build, library

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
MISSING = [name for name in (COMPILER, EMULATOR) if not shutil.which(name)]
pytestmark = pytest.mark.skipif(
    bool(MISSING),
    reason=f"not installed: {', '.join(MISSING)} (Debian: g++-aarch64-linux-gnu, qemu-user)",
)

STEP = {torch.float32: 0.0, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> tuple[list[str], Path]:
    """Build the library and native_replay, once for all workers; return its command and it."""
    base = tmp_path_factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "aarch64"
    directory.mkdir(exist_ok=True)
    target, program = directory / build.LIBRARY, directory / "native_replay"
    with FileLock(directory / "lock"):
        if not target.exists():
            with mock.patch.dict(os.environ, CXX=COMPILER):
                build.compile_library(target, ["-Wextra", "-Werror"])
            compile_program = [COMPILER, "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror"]
            subprocess.run([*compile_program, str(REPLAY), "-o", str(program), "-ldl"], check=True)
    libc = subprocess.run(
        [COMPILER, "-print-file-name=libc.so.6"], capture_output=True, text=True, check=True
    )
    sysroot = Path(libc.stdout.strip()).resolve().parents[1]
    return [EMULATOR, "-L", str(sysroot), str(program)], target


@pytest.fixture
def aarch64(built, tmp_path, monkeypatch) -> Elsewhere:
    """Send every call of the C ABI to the emulator."""
    elsewhere = Elsewhere(*built, tmp_path)
    monkeypatch.setattr(library, "call", elsewhere.call)
    monkeypatch.setattr(library, "max_queries", lambda: 16)  # as isa.cpp says for this machine
    yield elsewhere
    assert elsewhere.isas == {"portable"}


@pytest.mark.parametrize(
    ("dtype", "head_dim", "tiers", "call"),
    [
        (torch.float32, 64, BLOCK_TIERS[1:2], {}),
        (torch.bfloat16, 128, BLOCK_TIERS[1:], {"window_size": 150}),
        (torch.float16, 80, BLOCK_TIERS[2:3], {"softcap": 5.0}),
        (torch.float32, 40, BLOCK_TIERS[3:4], {"window_size": 90, "sink_q": True}),
    ],
)
@pytest.mark.parametrize("queries", [1, 5, 20])
def test_attention(aarch64, dtype, head_dim, tiers, call, queries):
    rotated = tiers != BLOCK_TIERS[1:2]
    case = make_case(
        [300, 70],
        [queries, 1],
        num_q_heads=6,
        num_kv_heads=2,
        head_dim=head_dim,
        dtype=dtype,
        cold_tiers=tiers,
        rotated_v=rotated,
        window_size=call.get("window_size"),
    )
    call = case.attention_kwargs() | call | {"rotated_v": rotated, "sink_logits": torch.randn(6)}
    if call.get("sink_q"):
        call["sink_q"] = torch.randn(case.q.shape, dtype=dtype)
    got = native.paged_attention(case.q, case.blocks, case.meta, **call)
    want = reference.paged_attention(case.q, case.blocks, case.meta, **call)
    # 20 queries are left to torch, which rounds weights to the dtype.
    atol = 2e-4 if queries <= 16 else max(2e-4, 2 * STEP[dtype])
    torch.testing.assert_close(got, want, rtol=STEP[dtype], atol=atol)
    assert ("omlx_gather" in aarch64.calls) == (queries > 16)


def test_threads(aarch64):
    case = make_case([2000], [1], num_q_heads=2, num_kv_heads=1, head_dim=128)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        got = native.paged_attention(case.q, case.blocks, case.meta, sm_scale=0.1)
    finally:
        torch.set_num_threads(before)
    want = reference.paged_attention(case.q, case.blocks, case.meta, sm_scale=0.1)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-4)


@pytest.mark.parametrize("dtype", list(STEP))
def test_append_convert_copy(aarch64, dtype):
    form = BlockFormat(64, 0, 2, 80, dtype)
    ids = [torch.tensor(x, dtype=torch.int32) for x in ([2, 0], [1, 3])]
    stored = []
    k, v = torch.randn(2, 150, 2, 80).to(dtype)
    slots = torch.randperm(4 * 64)[:150]
    for ops in (native, reference):
        blocks = {tier: form.allocate(tier, 4, "cpu") for tier in BLOCK_TIERS}
        for tier in blocks.values():
            for x in tier.tensors().values():
                x.zero_()
        ops.append_kv(k, v, blocks[Tier.HOT], slots)
        for source, target in ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)):
            tiers = BLOCK_TIERS[source], BLOCK_TIERS[target]
            ops.convert_blocks(*(blocks[t] for t in tiers), *tiers, *ids)
        ops.copy_blocks(blocks[Tier.K8V4], *(x.flip(0) for x in ids))
        stored.append({(t, n): x for t, b in blocks.items() for n, x in b.tensors().items()})
    for name, want in stored[1].items():
        torch.testing.assert_close(stored[0][name], want, rtol=0, atol=0, msg=str(name))
    assert set(aarch64.calls) == {"omlx_append_kv", "omlx_convert_blocks", "omlx_copy_blocks"}


@pytest.mark.usefixtures("aarch64")
def test_rotated_append():
    form = BlockFormat(64, 0, 2, 80, torch.float32)
    k, v = torch.randn(2, 64, 2, 80)
    got, want = (form.allocate(Tier.HOT, 1, "cpu") for _ in range(2))
    native.append_kv(k, v, got, torch.arange(64), rotate_v=True)
    reference.append_kv(k, v, want, torch.arange(64), rotate_v=True)
    torch.testing.assert_close(got.k, want.k, rtol=0, atol=0)
    torch.testing.assert_close(got.v, want.v, rtol=1e-6, atol=5e-6)


@pytest.mark.usefixtures("aarch64")
def test_errors_come_back():
    case = make_case([300], [1])
    case.meta.block_table[0, 0] = 10**6
    with pytest.raises(ValueError, match=r"paged_attention: block_table\[0, 0\] must be in"):
        native.paged_attention(case.q, case.blocks, case.meta, sm_scale=0.1)
