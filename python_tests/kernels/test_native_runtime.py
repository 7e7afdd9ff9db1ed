"""Which implementation runs, what happens without the library, and threads, forks, forced ISAs."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from native_isas import ISAS, forced_isa
from strategies import make_case

from omlx_kernels import native, ops
from omlx_kernels.layout import Tier
from omlx_kernels.native import build, library

pytestmark = pytest.mark.skipif(not ISAS, reason="the native library is not built")


@pytest.fixture
def calls(monkeypatch):
    """Record the C functions that are called."""
    seen = []
    call = library.call
    monkeypatch.setattr(
        library, "call", lambda name, arguments: (seen.append(name), call(name, arguments))
    )
    return seen


def test_ops_on_a_cpu_run_natively(calls):
    case = make_case([300], [1])
    blocks = case.blocks
    ops.paged_attention(case.q, blocks, case.meta, sm_scale=0.1)
    k = torch.zeros(1, 1, 64)
    ops.append_kv(k, k, blocks.hot, torch.tensor([0]))
    ids = torch.zeros(1, dtype=torch.int32)
    ops.convert_blocks(blocks.hot, blocks.k8v8, Tier.HOT, Tier.K8V8, ids, ids)
    ops.copy_blocks(blocks.hot, ids, ids + 1)
    assert calls == [
        *("omlx_paged_attention", "omlx_append_kv", "omlx_convert_blocks", "omlx_copy_blocks"),
    ]


def test_many_queries_stay_in_cpp_up_to_the_limit(calls, monkeypatch):
    case = make_case([300, 300], [17, 1])
    monkeypatch.setattr(library, "max_queries", lambda: 17)
    ops.paged_attention(case.q, case.blocks, case.meta, sm_scale=0.1)
    assert calls == ["omlx_paged_attention"]
    monkeypatch.setattr(library, "max_queries", lambda: 16)
    ops.paged_attention(case.q, case.blocks, case.meta, sm_scale=0.1)
    assert calls[1] == "omlx_paged_attention"
    assert set(calls[2:]) == {"omlx_gather", "omlx_merge"}


@pytest.mark.parametrize("isa", ISAS)
def test_the_limit_follows_the_instruction_set(isa):
    flags = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
    with forced_isa(isa):
        wins = isa == "avx512" and not {"amx_bf16", "amx_tile"} <= set(flags.split())
        assert (library.max_queries() > 10**6) == wins


@pytest.fixture
def no_library(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "candidates", lambda: [tmp_path / "absent.so"])
    library.load.cache_clear()
    library.available.cache_clear()
    yield
    library.load.cache_clear()
    library.available.cache_clear()


@pytest.mark.usefixtures("no_library")
def test_without_the_library_one_warning_and_torch():
    with pytest.warns(RuntimeWarning, match=r"falls back to plain torch.*native\.build"):
        assert ops.implementation(torch.device("cpu")).__name__ == "omlx_kernels.vectorized"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ops.implementation(torch.device("cpu")).__name__ == "omlx_kernels.vectorized"
    case = make_case([20], [1])
    with ops.use_implementation("native"), pytest.raises(library.NotBuiltError):
        ops.paged_attention(case.q, case.blocks, case.meta, sm_scale=0.1)


def test_library_of_other_sources_is_refused(monkeypatch, no_library):
    monkeypatch.undo()
    monkeypatch.setattr(build, "source_hash", lambda: "0" * 16)
    with pytest.raises(library.NotBuiltError, match="was built from other sources"):
        library.load()


def test_no_compiler_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(build.BuildError, match=r"install g\+\+ or clang\+\+"):
        build.compile_library(tmp_path / "x.so")


@pytest.mark.parametrize("compiler", ["g++", "clang++"])
@pytest.mark.parametrize("isa", ["portable", *build.X86_ISAS])
def test_no_warnings(compiler, isa):
    if not shutil.which(compiler):
        pytest.skip(f"{compiler} is not installed")
    if isa != "portable" and platform.machine().lower() not in ("x86_64", "amd64"):
        pytest.skip(f"{isa} is of x86-64")
    names = [*(build.SHARED if isa == "portable" else ()), "kernels.cpp"]
    done = subprocess.run(
        [compiler, *build.FLAGS, *build.X86_ISAS.get(isa, ()), '-DOMLX_SOURCE_HASH=""']
        + ["-Wextra", "-Werror", "-fsyntax-only"]
        + [str(build.SOURCES / name) for name in names],
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stderr


def run_python(code: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], env=os.environ | env, capture_output=True, text=True
    )


@pytest.mark.parametrize("isa", ISAS)
def test_environment_forces_an_isa(isa):
    done = run_python("from omlx_kernels import native; print(native.isa())", OMLX_NATIVE_ISA=isa)
    assert done.stdout.strip() == isa, done.stderr


def test_unknown_isa_is_refused():
    done = run_python(
        "import torch; from omlx_kernels import ops; ops.implementation(torch.device('cpu'))",
        OMLX_NATIVE_ISA="sse9",
    )
    assert "ValueError: OMLX_NATIVE_ISA must be avx512, avx2 or portable, got 'sse9'" in done.stderr
    with pytest.raises(ValueError, match="got 'AVX2'"):
        library.choose_isa("AVX2")


def test_isas_agree():
    case = make_case([700, 90], [1, 1], num_q_heads=6, num_kv_heads=2, head_dim=128)
    outs = []
    for isa in ISAS:
        with forced_isa(isa):
            outs.append(native.paged_attention(case.q, case.blocks, case.meta, sm_scale=0.1))
    for out in outs[1:]:  # the same integers in another order of float additions
        torch.testing.assert_close(out, outs[0], rtol=0, atol=2e-5)


@pytest.fixture(params=["torch's OpenMP", "own pool"])
def _threads(request):
    openmp = library.torch_openmp()
    if request.param == "own pool":
        library.load().omlx_share_openmp(None)
    elif openmp is None:
        pytest.skip("this torch has no libgomp")
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)
    library.load().omlx_share_openmp(openmp)


def big_case():
    return make_case([4000], [1], num_q_heads=8, num_kv_heads=4, head_dim=128, block_size=256)


@pytest.mark.usefixtures("_threads")
def test_several_python_threads():
    case = big_case()
    want = native.paged_attention(case.q, case.blocks, case.meta, sm_scale=0.1)
    wrong = []

    def work():
        for _ in range(20):
            got = native.paged_attention(case.q, case.blocks, case.meta, sm_scale=0.1)
            if not torch.equal(got, want):
                wrong.append(got)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def thread_times() -> dict[str, int]:
    """Return the nanoseconds that each thread of this process has run."""
    times = {}
    for path in Path("/proc/self/task").iterdir():
        times[path.name] = int((path / "schedstat").read_text().split()[0])
    return times


@pytest.mark.usefixtures("_threads")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("threads", [1, 3, 4])
def test_one_head_of_one_sequence_is_shared_by_torchs_number_of_threads(threads):
    case = make_case([6000], [1], num_q_heads=1, head_dim=128, block_size=256)
    torch.set_num_threads(threads)
    native.paged_attention(case.q, case.blocks, case.meta, sm_scale=0.1)
    time.sleep(0.1)  # torch's own team waits awake for some milliseconds
    before = thread_times()
    for _ in range(400):
        native.paged_attention(case.q, case.blocks, case.meta, sm_scale=0.1)
    ran = [ns - before.get(name, 0) for name, ns in thread_times().items()]
    if threads == 1:  # a thread of the test runner may have woken to wait on
        assert sum(ns > max(ran) / 50 for ns in ran) == 1
        return
    # Who gets a core, and when, is up to the machine: all are woken, at least two do much of it.
    assert sum(ns > 0 for ns in ran) >= threads
    assert sum(ns > max(ran) / 50 for ns in ran) >= 2


@pytest.mark.usefixtures("_threads")
def test_threads_sleep_between_calls():
    case = big_case()
    for _ in range(5):
        native.paged_attention(case.q, case.blocks, case.meta, sm_scale=0.1)
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.03


@pytest.mark.usefixtures("_threads")
def test_mass_is_the_same_on_several_threads():
    case = big_case()
    masses = torch.zeros(2, len(case.meta.splits), 8)
    for mass, threads in zip(masses, (4, 1), strict=True):
        torch.set_num_threads(threads)
        ops.paged_attention(case.q, case.blocks, case.meta, sm_scale=0.1, split_mass=mass)
    assert torch.equal(*masses)
    torch.testing.assert_close(masses[0].sum(0), torch.ones(8))


@pytest.mark.usefixtures("_threads")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_after_fork():
    case = big_case()
    want = native.paged_attention(case.q, case.blocks, case.meta, sm_scale=0.1)
    child = os.fork()
    if not child:  # the parent's pool threads do not exist here
        got = native.paged_attention(case.q, case.blocks, case.meta, sm_scale=0.1)
        os._exit(0 if bytes(got.untyped_storage()) == bytes(want.untyped_storage()) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
