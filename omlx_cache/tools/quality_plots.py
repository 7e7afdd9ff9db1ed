"""The plots of the quality tool: what a setting costs against the bytes it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import log10
from pathlib import Path
from typing import TYPE_CHECKING

from omlx_cache.tools.page import page, paragraph, section, table
from omlx_cache.tools.plots import draw, svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS, PEER, FRONT = "#2e90fa", "#f04438", "#98a2b3"
LEAST_KLD = 1e-7
"""Below it a KL divergence of float32 logits is noise; plotted as this."""

HEADER = ("setting", "saved", "KL", "same top", "perplexity", "needle", "recall")

Rows = Mapping[str, dict]


def pareto(rows: Rows) -> list[str]:
    """Return the settings that no other beats in both bytes and KL divergence, by bytes.

    >>> pareto({"a": {"num_bytes": 1, "kld": 3}, "b": {"num_bytes": 2, "kld": 4},
    ...         "c": {"num_bytes": 3, "kld": 1}})
    ['a', 'c']
    """
    found: list[str] = []
    for name in sorted(rows, key=lambda n: (rows[n]["num_bytes"], rows[n]["kld"])):
        if not found or rows[name]["kld"] < rows[found[-1]]["kld"]:
            found.append(name)
    return found


def cells(name: str, row: dict) -> list[str]:
    """Return a row of the table as texts, in the order of `HEADER`."""
    if "error" in row:
        return [f"{name}: {row['error']}", *["-"] * (len(HEADER) - 1)]
    is_base = name == "unquantized"
    return [
        name,
        f"{row['saved']:.1%}",
        f"{row['kld']:.6f}",
        f"{row['top1']:.2%}",
        f"{row['perplexity']:.3f}" if is_base else f"{row['perplexity_ratio']:+.2%}",
        f"{row['needle']:.1%}",
        f"{row['recall']:.1%}" if "recall" in row else "-",
    ]


def measured(results: Rows) -> dict[str, dict]:
    """Return the rows that hold numbers."""
    return {name: row for name, row in results.items() if "error" not in row}


def paint_pareto(axes: Axes, results: Rows) -> None:
    """Paint KL divergence over bytes, the front as a line, numbers that the legend explains."""
    rows = {n: r for n, r in measured(results).items() if n != "unquantized"}
    full = measured(results)["unquantized"]["num_bytes"]
    place = {
        name: (row["num_bytes"] / full, max(row["kld"], LEAST_KLD)) for name, row in rows.items()
    }
    front = [place[name] for name in pareto(rows)]
    axes.plot(*zip(*front, strict=True), color=FRONT, ls="--", zorder=1, label="Pareto front")
    numbers: dict[tuple[float, float], list[str]] = {}
    for number, (name, row) in enumerate(rows.items(), 1):
        color, marker = (PEER, "s") if row["is_peer"] else (OURS, "o")
        axes.scatter(*place[name], color=color, marker=marker, s=150, zorder=2)
        numbers.setdefault(_rounded(place[name]), []).append(str(number))
        axes.plot([], [], color=color, marker=marker, ls="", label=f"{number}  {name}")
    for name in rows:  # points in one place share a label
        label = numbers.pop(_rounded(place[name]), None)
        if label:
            small = 8 if len(label) == 1 else 6
            text = ",".join(label)
            axes.annotate(
                text, place[name], ha="center", va="center", color="white", fontsize=small, zorder=3
            )
    axes.set_yscale("log")
    axes.margins(x=0.08, y=0.12)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
    axes.set_xlabel("bytes of the cache, of the unquantized one's")
    axes.set_ylabel("KL divergence, nats")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=9)


def _rounded(place: tuple[float, float]) -> tuple[float, float]:
    return round(place[0], 2), round(log10(place[1]), 1)


def paint_retrieval(axes: Axes, results: Rows) -> None:
    """Paint the shares of needles and messages that were retrieved, a pair of bars a setting."""
    rows = measured(results)
    parts = [p for p in ("needle", "recall") if all(p in row for row in rows.values())]
    names = list(rows)[::-1]
    height = 0.8 / len(parts)
    for i, part in enumerate(parts):
        centers = [y + 0.4 - (i + 0.5) * height for y in range(len(names))]
        values = [rows[name][part] for name in names]
        axes.barh(centers, values, height, color=(OURS, "#7a5af8")[i], label=part)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlim(0, 1)
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.grid(axis="y", visible=False)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
    axes.set_xlabel("tokens retrieved")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))


def save_plot(path: Path, results: Rows) -> None:
    """Write the Pareto plot as what the file's suffix says: svg, png, pdf."""
    figure = draw(partial(paint_pareto, results=results), 9.5, 4.2)
    figure.savefig(path, dpi=150)


def quality_page(data: dict, names: Sequence[str]) -> str:
    """Return the comparison as one HTML page.

    Args:
        data: of `quality_run.Results`.
        names: the rows to show, in their order.
    """
    rows = {name: data["results"][name] for name in names}
    setup, versions = data["setup"], data["versions"]
    subtitle = (
        f"{setup['model']}, {setup['dtype']}, {setup['tokens']:,} tokens of {setup['text']}, the "
        f"last {setup['scored']:,} scored"
    )
    count = len(measured(rows))
    return page(
        "Quality of KV cache settings",
        subtitle,
        [
            section(
                "Quality against bytes",
                paragraph(
                    "Lower and further left is better. Bytes are those of a 16-bit model, scales "
                    "and free blocks included. Squares are transformers' own caches. A KL "
                    f"divergence below {LEAST_KLD:g} is drawn there."
                ),
                svg(partial(paint_pareto, results=rows), "quality against bytes", 9.5, 4.2),
            ),
            section(
                "Retrieval",
                paragraph(
                    "needle: passages of the text, asked back at its end; recall: messages of a "
                    f"chat of {setup['turns']} turns, asked back at its end. Each token counts, "
                    "given the right ones before it."
                ),
                svg(partial(paint_retrieval, results=rows), "retrieval", 9.5, 1.2 + 0.45 * count),
            ),
            section(
                "Numbers",
                table(HEADER, [cells(name, row) for name, row in rows.items()], len(HEADER) - 1),
            ),
            section(
                "Measured on",
                paragraph(
                    f"{data['machine']['platform']}; "
                    + ", ".join(f"{k} {v}" for k, v in versions.items() if v)
                ),
            ),
        ],
    )
