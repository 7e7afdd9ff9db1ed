"""Render the README's tables and the plots in ``docs/`` from the files in ``bench/results/``.

    python bench/render.py            # write what changed
    python bench/render.py --check    # change nothing; exit code 1 where something differs

A block of the README lies between two comments that name this script and the block; a plot says
in its first line what data it was drawn from.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from render_peers import has_points, paint_peers, peers_table
from render_readme import (
    attention_block,
    extend_block,
    generate_block,
    paint_generate,
    quality_block,
)

ROOT = Path(__file__).parents[1]
README, RESULTS, PLOTS = ROOT / "README.md", ROOT / "bench" / "results", ROOT / "docs"


@dataclass(frozen=True)
class Block:
    """A block of the README: the results it comes from, and what makes it of them."""

    results: str
    render: Callable[[dict], str]


@dataclass(frozen=True)
class Plot:
    """A plot: the results it comes from, what draws it on axes, what it shows, its size, and
    whether there is something to draw."""

    results: str
    paint: Callable
    label: str
    height: float = 3.6
    is_ready: Callable[[dict], bool] = bool


BLOCKS = {
    "generate": Block("generate_cpu.json", generate_block),
    "attention": Block("paged_attention_cpu.json", attention_block),
    "extend": Block("extend_cpu.json", extend_block),
    "quality": Block("quality_4096.json", quality_block),
    "peers": Block("peers.json", peers_table),
}
PLOTS_BY_NAME = {
    "speed.svg": Plot(
        "generate_cpu.json", paint_generate, "Tokens per second over the length of the text"
    ),
    "peers.svg": Plot(
        "peers.json", paint_peers, "KL divergence over bytes, by contender", 4.8, has_points
    ),
}


def comments(name: str) -> tuple[str, str]:
    """Return the comments around a block.

    >>> comments("quality")[0]
    '<!-- begin: bench/render.py quality -->'
    """
    return f"<!-- begin: bench/render.py {name} -->", f"<!-- end: bench/render.py {name} -->"


def put(name: str, block: str, document: str) -> str:
    """Replace a block of the document.

    Raises:
        ValueError: the document doesn't hold the block's two comments once each, in this order.
    """
    begin, end = comments(name)
    before, found, rest = document.partition(begin)
    _, ended, after = rest.partition(end)
    if not (found and ended) or begin in rest or end in after:
        raise ValueError(
            f"the README must hold the block {name} once: put {begin} and {end} around it"
        )
    return f"{before}{begin}\n{block}\n{end}{after}"


def rendered_readme(document: str) -> str:
    """Return the document with every block that has results rendered from them."""
    for name, block in BLOCKS.items():
        data = read(block.results)
        if data is not None:
            document = put(name, block.render(data), document)
    return document


def read(results: str) -> dict | None:
    """Return the data of a results file, None where it does not exist."""
    path = RESULTS / results
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def fingerprint(data: dict) -> str:
    """Return the first line of a plot: a digest of the data, whatever their layout in the file."""
    text = json.dumps(data, sort_keys=True)
    return f"<!-- drawn from {hashlib.sha256(text.encode()).hexdigest()} by bench/render.py -->"


def draw(plot: Plot, data: dict) -> str:
    """Return the plot as an SVG document; needs matplotlib."""
    from omlx_cache.tools.plots import svg

    element = svg(lambda axes: plot.paint(axes, data), plot.label, height=plot.height)
    # Dark letters on a page that may be dark itself: the plot brings its own paper.
    element = element.replace(">", '>\n <rect width="100%" height="100%" fill="white"/>', 1)
    lines = [line.rstrip() for line in element.splitlines()]
    return "\n".join([fingerprint(data), *lines, ""])


def stale() -> dict[Path, Callable[[], str]]:
    """Return what is not as the results say, and how to render it."""
    found: dict[Path, Callable[[], str]] = {}
    before = README.read_text(encoding="utf-8")
    after = rendered_readme(before)
    if after != before:
        found[README] = lambda: after
    for name, plot in PLOTS_BY_NAME.items():
        data, path = read(plot.results), PLOTS / name
        if data is None or not plot.is_ready(data):
            continue
        drawn = path.read_text(encoding="utf-8").partition("\n")[0] if path.exists() else ""
        if drawn != fingerprint(data):
            found[path] = lambda plot=plot, data=data: draw(plot, data)
    return found


def main() -> None:
    """Write what is stale, or say so."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing, say what differs")
    check = parser.parse_args().check
    found = stale()
    for path, render in found.items():
        if not check:
            path.write_text(render(), encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {'differs from the results' if check else 'written'}")
    raise SystemExit(bool(found) and check)


if __name__ == "__main__":
    main()
