"""Render the table of ``docs/generation.md`` from the results of ``test_generation_modes.py``.

::

    make modes     # runs the tests with --junitxml=build/modes.xml, then this

A cell holds the settings whose test passed: 16 (bits), 8 (bits), w (window). A test that failed or
did not run leaves nothing.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

DOCUMENT = Path(__file__).with_name("generation.md")
BEGIN, END = "<!-- begin: make modes -->", "<!-- end: make modes -->"
SHORT = {"16 bits": "16", "8 bits": "8", "window": "w"}

Cell = tuple[str, str, str]


def read_results(path: Path) -> dict[Cell, bool]:
    """Return (mode, family, setting): whether its test passed, in the order of the tests."""
    results = {}
    for case in ElementTree.parse(path).iter("testcase"):
        properties = {p.get("name"): p.get("value") for p in case.iter("property")}
        if "mode" in properties:
            cell = properties["mode"], properties["family"], properties["setting"]
            results[cell] = not any(case.find(x) is not None for x in ("failure", "error"))
            results[cell] &= case.find("skipped") is None
    return results


def render(results: dict[Cell, bool]) -> str:
    """Return the table as Markdown: a row for each mode, a column for each family."""
    modes, families = (list(dict.fromkeys(cell[i] for cell in results)) for i in (0, 1))
    lines = ["| | " + " | ".join(families) + " |", "|---" * (len(families) + 1) + "|"]
    for mode in modes:
        cells = [
            " ".join(s for setting, s in SHORT.items() if results.get((mode, family, setting)))
            for family in families
        ]
        lines.append(f"| {mode} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def put(table: str, document: str) -> str:
    """Replace the table of the document."""
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python docs/render_modes.py RESULTS.xml")
    found = read_results(Path(sys.argv[1]))
    if not found:
        raise SystemExit(f"{sys.argv[1]} holds no result of test_generation_modes.py")
    DOCUMENT.write_text(put(render(found), DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    failed = [cell for cell, passed in found.items() if not passed]
    print(f"{DOCUMENT}: {len(found) - len(failed)} of {len(found)} cells passed")
    raise SystemExit(bool(failed))
