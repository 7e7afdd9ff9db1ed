"""README and plots say what the committed results say, and `make bench` holds its time."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import render  # noqa: E402 -- lies in bench/
from render_readme import attention_block, extend_block, generate_block, quality_block  # noqa: E402


def test_the_readme_and_the_plots_are_as_the_results_say():
    assert not render.stale(), "run python bench/render.py"


@pytest.mark.parametrize("name", render.BLOCKS)
def test_each_block_is_in_the_readme_once(name):
    text = render.README.read_text(encoding="utf-8")
    there = render.read(render.BLOCKS[name].results) is not None
    assert [text.count(comment) for comment in render.comments(name)] == [there, there]


@pytest.mark.parametrize(
    ("block", "keys"),
    [
        (generate_block, ("results", "8192", "8-bit", "tokens_per_s")),
        (generate_block, ("results", "8192", "stock", "first_token_s")),
        (generate_block, ("results", "8192", "window 1024", "cache_bytes")),
        (attention_block, ("decode_8192_ms", "2 threads", "9/3/64", "mixed")),
        (extend_block, ("extend", "9/3/64", "8-bit", "ratio")),
        (quality_block, ("results", "4 bits", "kld")),
    ],
)
def test_a_number_that_changes_changes_the_block(block, keys):
    results = next(b.results for b in render.BLOCKS.values() if b.render is block)
    data = render.read(results)
    before = block(data)
    place = data
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] *= 1.5
    assert block(data) != before


def test_a_block_goes_between_its_comments():
    begin, end = render.comments("x")
    assert render.put("x", "new", f"a\n{begin}\nold\n{end}\nb") == f"a\n{begin}\nnew\n{end}\nb"
    for document in ("", begin, f"{end}{begin}", f"{begin}{end}" * 2):
        with pytest.raises(ValueError, match="must hold the block x once"):
            render.put("x", "new", document)


@pytest.fixture
def copy(tmp_path, monkeypatch) -> Path:
    """A place with results of two kinds, a README for them, and nothing rendered yet."""
    (tmp_path / "docs").mkdir()
    for name in ("quality_4096.json", "generate_cpu.json"):
        (tmp_path / name).write_text(json.dumps(render.read(name)))
    blocks = ("generate", "quality")
    text = "".join("{}\n{}\n".format(*render.comments(name)) for name in blocks)
    (tmp_path / "README.md").write_text(text)
    monkeypatch.setattr(render, "README", tmp_path / "README.md")
    monkeypatch.setattr(render, "RESULTS", tmp_path)
    monkeypatch.setattr(render, "PLOTS", tmp_path / "docs")
    monkeypatch.setattr(render, "ROOT", tmp_path)
    return tmp_path


def run(monkeypatch, *arguments: str) -> bool:
    monkeypatch.setattr(sys, "argv", ["render.py", *arguments])
    with pytest.raises(SystemExit) as exit_:
        render.main()
    return bool(exit_.value.code)


def test_drift_is_noticed_and_repaired(copy, monkeypatch, capsys):
    assert run(monkeypatch, "--check"), "nothing is rendered yet"
    assert not (copy / "docs" / "speed.svg").exists()
    assert not run(monkeypatch)
    assert capsys.readouterr().out.count("written") == 2
    assert "tokens per second" in (copy / "docs" / "speed.svg").read_text().lower()
    assert not run(monkeypatch, "--check")
    data = json.loads((copy / "quality_4096.json").read_text())
    data["results"]["4 bits"]["kld"] = 0.123456
    (copy / "quality_4096.json").write_text(json.dumps(data))
    assert run(monkeypatch, "--check")
    assert not run(monkeypatch)
    assert "0.123456" in (copy / "README.md").read_text()


CONFTEST = runpy.run_path(str(BENCH / "conftest.py"))


def options(**values):
    config = SimpleNamespace(getoption=lambda name: values.get(name.strip("-")), dropped=[])
    config.hook = SimpleNamespace(pytest_deselected=lambda items: config.dropped.extend(items))
    return config


@pytest.mark.parametrize("with_long", [False, True])
def test_long_cases_wait_to_be_asked_for(with_long):
    long, short = (SimpleNamespace(get_closest_marker=lambda name, v=v: v) for v in (True, None))
    config, items = options(long=with_long), [long, short]
    CONFTEST["pytest_collection_modifyitems"](config, items)
    assert items == ([long, short] if with_long else [short])
    assert config.dropped == ([] if with_long else [long])


def test_no_case_starts_after_the_end():
    start = CONFTEST["pytest_runtest_setup"]
    start(SimpleNamespace(config=options(minutes=1e9)))
    start(SimpleNamespace(config=options(long=True)))
    with pytest.raises(pytest.skip.Exception, match=r"0 minutes are over; --minutes"):
        start(SimpleNamespace(config=options(minutes=0)))


def test_results_say_what_they_were_run_on_and_not_the_machines_name():
    output = {"machine_info": {"node": "secret"}, "commit_info": {"project": "secret"}}
    CONFTEST["pytest_benchmark_update_json"](None, [], output)
    assert "secret" not in str(output)
    assert {"torch", "triton", "transformers", "commit", "cores"} <= set(output["machine_info"])
