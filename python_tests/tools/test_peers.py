"""The comparison with other caches: its numbers against plain ones, its rows, resuming, errors."""

from __future__ import annotations

import json
import mmap
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_chat import save_tiny_chat_model, tiny_tokenizer
from typer.testing import CliRunner

import omlx_cache
from omlx_cache.compat import cache_name
from omlx_cache.tools.errors import WrongSettingError
from omlx_cache.tools.loading import load_model
from omlx_cache.tools.prepared import PreparationError
from omlx_cache.tools.progress import silent
from omlx_cache.tools.texts import part_text

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import peers
import peers_contenders
import peers_measures
import peers_run
import peers_worker
from peers_contenders import STOCK, Source, by_name, contenders
from peers_measures import Plan
from peers_run import Child, Results, measure_all
from render_peers import peers_table

OURS = "omlx_cache, 4 bits"
BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 2  # layers, K and V, heads, channels, bfloat16


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return Source(str(save_tiny_chat_model(tmp_path_factory.mktemp("tiny"))), None)


@pytest.fixture(scope="module")
def plan() -> Plan:
    ids = tiny_tokenizer()(part_text("quality")[:20_000])["input_ids"][:700]
    return Plan(ids, context=600, scored=50, memory=600, lengths=(64, 100), seconds=0)


def test_divergence_is_that_of_a_plain_computation(source, plan):
    found = peers_measures.quality(by_name(OURS), source, plan)
    model = load_model(source.checkpoint, dtype=torch.float32)
    text, scored = torch.tensor([plan.ids[:650]]), slice(600, 650)
    with torch.no_grad():
        p = model(text).logits[0, scored].double().log_softmax(-1)
        omlx_cache.patch(model, cache_bits=4)
        q = model(text, **{cache_name(type(model).forward): omlx_cache.PagedCache(model)})
    q = q.logits[0, scored].double().log_softmax(-1)
    kld = (p.exp() * (p - q)).sum(-1).mean().item()
    assert found["kld"] == pytest.approx(kld, rel=0.3), "chunks end elsewhere: not the same codes"
    assert found["kld"] > 1e-5
    assert peers_measures.quality(by_name(STOCK), source, plan)["kld"] == 0


def test_the_base_is_read_once(source, plan, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(peers_measures, "by_name", lambda n: opened.append(n) or by_name(n))
    shared = replace(plan, scratch=tmp_path)
    first = peers_measures.quality(by_name(OURS), source, shared)
    again = peers_measures.quality(by_name(OURS), source, shared)
    assert opened == [STOCK]
    assert first == again


def test_bytes_are_those_of_the_tensors(source, plan):
    stock = peers_measures.memory(by_name(STOCK), source, plan)
    assert stock["cache_bytes"] == (600 + peers_measures.TURN) * BYTES_PER_TOKEN
    fp8 = peers_measures.memory(by_name("transformers, QuantizedCache fp8"), source, plan)
    assert fp8["cache_bytes"] == pytest.approx(stock["cache_bytes"] / 2, rel=0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peak_counts_what_is_freed_again():
    before = peers_measures._reset_peak()
    if before is None:
        pytest.skip("the peak can't be reset here: /proc/self/clear_refs is not writable")
    with mmap.mmap(-1, 64 << 20) as mapped:  # a tensor might lie in what malloc still holds
        for start in range(0, len(mapped), mmap.PAGESIZE):
            mapped[start] = 1
    assert peers_measures._resident("VmHWM") - before > 50 << 20
    assert peers_measures._resident("VmRSS") - before < 50 << 20


def test_speed_is_beside_the_stock_model(source, plan):
    found = peers_measures.speed(by_name(OURS), source, plan)
    assert list(found) == ["64", "100"]
    for row in found.values():
        assert row["ratio"] == pytest.approx(row["tokens_per_s"] / row["stock_tokens_per_s"])
        assert row["cache_bytes"] > 0
        assert row["disturbance"] >= 1
    assert peers_measures.speed(by_name(STOCK), source, plan)["64"]["ratio"] == 1


def request(source: Source, plan: Plan, tmp_path: Path, **changes) -> dict:
    child = Child(source, 1, tmp_path)
    asked = {}

    def keep(module, arguments, *more) -> None:
        asked.update(json.loads(Path(arguments[0]).read_text()))
        Path(arguments[1]).write_text('{"found": {}, "versions": {}}')

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers_run, "run_child", keep)
        child.measure(by_name(OURS), "memory", plan, silent)
    return asked | changes


def test_the_worker_answers_a_request(source, plan, tmp_path):
    threads = torch.get_num_threads()
    answer = peers_worker.answer(request(source, plan, tmp_path), silent)
    torch.set_num_threads(threads)
    assert answer["found"] == peers_measures.memory(by_name(OURS), source, plan) | {
        "peak_bytes": answer["found"]["peak_bytes"]
    }
    assert answer["versions"]["torch"] == torch.__version__


def test_what_is_not_installed_is_the_answer(source, plan, tmp_path):
    asked = request(source, plan, tmp_path, needs=["no-such-package"])
    assert peers_worker.answer(asked, silent)["found"] == {
        "error": "no-such-package is not installed"
    }


def test_what_fails_is_the_answer_with_what_may_be_why(source, plan, tmp_path, monkeypatch):
    wants = {"kvpress": ["transformers<5.3,>=4.56", "torch>=2", "fire; extra == 'eval'"]}
    monkeypatch.setattr(peers_worker.importlib.metadata, "requires", wants.get)
    monkeypatch.setattr(peers_worker, "_version", {"kvpress": "1", "transformers": "5.24"}.get)
    asked = request(source, plan, tmp_path, needs=["kvpress"], contender="llama.cpp, f16")
    error = peers_worker.answer(asked, silent)["found"]["error"]
    assert error.endswith("kvpress 1 wants transformers<5.3,>=4.56, not 5.24")
    assert "no GGUF file" in error or "llama_cpp" in error


def test_a_process_that_crashes_is_a_row(source, plan, tmp_path, monkeypatch):
    def crash(*arguments) -> None:
        raise PreparationError("peers_worker x failed (exit code -11); the whole log is y")

    monkeypatch.setattr(peers_run, "run_child", crash)
    found, _ = Child(source, 1, tmp_path).measure(by_name(OURS), "memory", plan, silent)
    assert found == {"error": "its process ended with exit code -11"}


def test_the_command_measures_in_a_process_and_goes_on(source, tmp_path, monkeypatch):
    path = tmp_path / "out.json"
    options = ["--model", source.checkpoint, "--results", str(path), "--context", "64"]
    options += ["--scored", "8", "--memory", "64", "--length", "64", "--threads", "1"]
    result = CliRunner().invoke(peers.app, [OURS, "--measure", "memory", *options])
    assert result.exit_code == 0, result.output
    row = json.loads(path.read_text())["results"][OURS]
    assert row["memory"]["cache_bytes"] > 0, row
    assert OURS in result.stdout

    ran = []
    monkeypatch.setattr(
        Child, "measure", lambda self, c, name, plan, p: ran.append((c.name, name)) or ({}, {})
    )
    result = CliRunner().invoke(
        peers.app, [OURS, "--measure", "memory", "--measure", "quality", *options]
    )
    assert result.exit_code == 0, result.output
    assert ran == [(OURS, "quality")]
    other = CliRunner().invoke(peers.app, [OURS, *options, "--memory", "100"])
    assert other.exit_code == 2
    assert "holds results with memory 64, asked for 100" in other.stderr


class FakeChild:
    """Answers at once, and keeps what it was asked."""

    def __init__(self, *answers) -> None:
        self.answers, self.asked = list(answers), []

    def measure(self, contender, name, plan, progress):
        self.asked.append((contender.name, name, plan.lengths))
        return self.answers.pop(0), {}


def test_errors_and_missing_lengths_are_measured_again(plan, tmp_path):
    contender, results = by_name(OURS), Results({}, tmp_path / "out.json")
    child = FakeChild({"error": "no"}, {"64": {"ratio": 1}})
    measure_all([contender], ["quality", "speed"], plan, child, results, silent)
    results = Results({}, tmp_path / "out.json")
    child = FakeChild({"kld": 1}, {"100": {"ratio": 2}})
    measure_all([contender], ["quality", "speed"], plan, child, results, silent)
    assert child.asked == [(OURS, "quality", (64, 100)), (OURS, "speed", (100,))]
    row = json.loads((tmp_path / "out.json").read_text())["results"][OURS]
    assert row["quality"] == {"kld": 1}
    assert row["speed"] == {"64": {"ratio": 1}, "100": {"ratio": 2}}
    changed = replace(contender, setting={"cache_bits": 8})
    assert results.missing(changed, "quality", plan) is not None
    assert results.missing(contender, "quality", plan) is None


def test_every_contender_is_in_the_table(plan, tmp_path):
    results = Results({"memory": 600}, tmp_path / "out.json")
    child = FakeChild(*({"error": f"why | {i % 2}"} for i in range(len(contenders()) - 1)))
    chosen = [c for c in contenders() if c.name != OURS]
    measure_all(chosen, ["quality"], plan, child, results, silent)
    results.add(by_name(OURS), "quality", {"kld": 0.5, "top1": 0.9}, {})
    table = peers_table(results.data)
    assert f"| **{OURS}** | 0.500000 | 90.00% |" in table
    assert "peak" not in table  # nobody's was measured
    for contender in contenders():
        assert contender.name in " ".join(table.split())
    assert table.count("`why | ") == 2


@pytest.mark.parametrize("content", ["{}", "no json", "[]"])
def test_a_file_of_something_else_is_not_overwritten(content, tmp_path):
    path = tmp_path / "out.json"
    path.write_text(content)
    with pytest.raises(WrongSettingError, match="must hold results of this tool"):
        Results({}, path)
    assert path.read_text() == content


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nobody*"], "there is no contender 'nobody*'"),
        (["--results", "/no/such/place/out.json"], "in a directory that exists"),
    ],
)
def test_wrong_arguments(arguments, message):
    result = CliRunner().invoke(peers.app, arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_the_list_says_what_is_needed():
    result = CliRunner().invoke(peers.app, ["--list"])
    assert result.stdout.count("\n") == len(contenders())
    for contender in contenders():
        assert all(need in result.stdout for need in contender.needs)
    assert "--measure speed" in " ".join(CliRunner().invoke(peers.app, ["--help"]).stdout.split())


def test_names_are_unique_and_bases_are_there():
    names = [c.name for c in contenders()]
    assert len(set(names)) == len(names)
    assert {c.base for c in contenders()} == {STOCK, peers_contenders.LLAMA} <= set(names)
