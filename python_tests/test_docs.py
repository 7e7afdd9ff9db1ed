"""Documents that are rendered say what the code and the tests have now."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
BENCH = Path(__file__).parents[1] / "bench"
RENDER = runpy.run_path(str(DOCS / "render_modes.py"))
CONFIGURATION = runpy.run_path(str(DOCS / "render_configuration.py"))


@pytest.fixture
def tests(monkeypatch):
    """The modules that define modes and families."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "models"))
    import modes
    import tiny

    yield modes.MODES, tiny.FAMILIES
    for name in ("modes", "tiny", "custom_loops"):
        sys.modules.pop(name, None)


def table() -> list[list[str]]:
    text = (DOCS / "generation.md").read_text(encoding="utf-8")
    lines = text.partition(RENDER["BEGIN"])[2].partition(RENDER["END"])[0].strip().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_table_of_modes_has_every_mode_and_family(tests):
    modes, families = tests
    head, _, *rows = table()
    assert head[1:] == list(families), "run make modes"
    assert [row[0] for row in rows] == list(modes), "run make modes"


def test_results_become_a_table(tmp_path):
    results = tmp_path / "results.xml"
    cases = "".join(
        f"<testcase><properties><property name='mode' value='beams'/>"
        f"<property name='family' value='{family}'/><property name='setting' value='{setting}'/>"
        f"</properties>{fault}</testcase>"
        for family, setting, fault in (
            ("llama", "16 bits", ""),
            ("llama", "8 bits", "<failure/>"),
            ("llama", "window", ""),
            ("gemma2", "8 bits", "<skipped/>"),
        )
    )
    results.write_text(f"<testsuite>{cases}<testcase/></testsuite>", encoding="utf-8")
    rendered = RENDER["render"](RENDER["read_results"](results))
    assert rendered.splitlines() == ["| | llama | gemma2 |", "|---|---|---|", "| beams | 16 w |  |"]
    begin, end = RENDER["BEGIN"], RENDER["END"]
    assert RENDER["put"]("new", f"a {begin}\nold\n{end} b") == f"a {begin}\nnew\n{end} b"


def test_the_configuration_reference_is_up_to_date():
    text = (DOCS / "configuration.md").read_text(encoding="utf-8")
    assert text == CONFIGURATION["render"](), "run python docs/render_configuration.py"


def test_the_tables_of_the_kernel_notes_are_up_to_date():
    pytest.importorskip("triton", reason="no triton for this platform")
    kernels = runpy.run_path(str(DOCS / "render_kernels.py"))
    text = (DOCS / "kernels.md").read_text(encoding="utf-8")
    assert text == kernels["render"](), "run python docs/render_kernels.py"


def test_the_tables_of_the_tuning_guide_are_up_to_date():
    tuning = runpy.run_path(str(DOCS / "render_tuning.py"))
    text = (DOCS / "tuning.md").read_text(encoding="utf-8")
    assert text == tuning["render"](), "run python docs/render_tuning.py"


def test_the_counted_bytes_are_those_of_the_code():
    results = json.loads((BENCH / "results" / "settings_bytes.json").read_text(encoding="utf-8"))
    settings = runpy.run_path(str(BENCH / "settings.py"))
    for name in ("cache_bits=4", "prefill_chunk=128"):
        report = settings["bytes_of"](settings["llama"](), 2048, **settings["parse"](name))
        found = {"bytes": report.total_bytes, "peak": report.peak_bytes}
        assert results[name]["2048"] | found == results[name]["2048"], (
            "run python bench/settings.py --json bench/results/settings_bytes.json, then "
            "python docs/render_tuning.py"
        )
