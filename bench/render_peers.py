"""The table and the plot of the peers, from the results of ``bench/peers.py``."""

from __future__ import annotations

import textwrap

MIB = 2**20
WIDTH = 119
NOTHING = "–"


def peers_table(data: dict) -> str:
    """Return the results as Markdown: a row for each contender, and why who did not run didn't.

    What was measured for none of them has no column.
    """
    setup, rows = data["setup"], data["results"]
    lengths = sorted({int(n) for row in rows.values() for n in row.get("speed", {}) if n.isdigit()})
    head = [
        f"cache at {setup['memory']}",
        "peak",
        "KL divergence",
        "same top token",
        *(f"speed at {n}" for n in lengths),
    ]
    table: dict[str, list[str]] = {}
    failed: dict[str, list[str]] = {}
    for name, row in rows.items():
        for reason in dict.fromkeys(_errors(row)):
            failed.setdefault(reason, []).append(name)
        if any("error" not in row[m] for m in ("quality", "memory", "speed") if m in row):
            cells = [*_memory(row.get("memory", {})), *_quality(row.get("quality", {}))]
            cells += [_speed(row.get("speed", {}).get(str(n), {})) for n in lengths]
            table[f"**{name}**" if name.startswith("omlx_cache") else name] = cells
    measured = [i for i in range(len(head)) if any(row[i] != NOTHING for row in table.values())]
    lines = [f"| | {' | '.join(head[i] for i in measured)} |", "|---" * (len(measured) + 1) + "|"]
    lines += [
        f"| {label} | {' | '.join(cells[i] for i in measured)} |" for label, cells in table.items()
    ]
    if failed:
        lines += ["", "Did not run, or not all of it:", ""]
        for reason, names in failed.items():
            item = f"* {'; '.join(names)}: {_code(reason)}"
            lines += textwrap.wrap(item, WIDTH, subsequent_indent="  ", break_long_words=False)
    return "\n".join(lines)


def _errors(row: dict) -> list[str]:
    """Return the reasons why a row lacks something."""
    found = [row[m]["error"] for m in ("quality", "memory", "speed") if "error" in row.get(m, {})]
    return found


def _code(reason: str) -> str:
    """Quote a reason, which may hold what Markdown would read as markup."""
    return f"`{' '.join(reason.replace('`', chr(39)).split())}`"


def _memory(found: dict) -> list[str]:
    if "cache_bytes" not in found:
        return [NOTHING, NOTHING]
    peak = found["peak_bytes"]
    cells = [f"{found['cache_bytes'] / MIB:.1f} MiB"]
    return [*cells, NOTHING if peak is None else f"{peak / MIB:.0f} MiB"]


def _quality(found: dict) -> list[str]:
    if "kld" not in found:
        return [NOTHING, NOTHING]
    return [f"{found['kld']:.6f}", f"{found['top1']:.2%}"]


def _speed(found: dict) -> str:
    if "ratio" not in found:
        return NOTHING
    return f"{found['tokens_per_s']:.1f} ({found['ratio']:.2f}x)"


def has_points(data: dict) -> bool:
    """Return whether a contender has both bytes and a KL divergence above 0."""
    return any(
        row.get("quality", {}).get("kld", 0) > 0 and "cache_bytes" in row.get("memory", {})
        for row in data["results"].values()
    )


def paint_peers(axes, data: dict) -> None:
    """Draw KL divergence over the bytes of the cache, a point for each contender that has both."""
    for name, row in data["results"].items():
        kld, size = row.get("quality", {}).get("kld"), row.get("memory", {}).get("cache_bytes")
        if kld is None or size is None or kld <= 0:
            continue
        is_ours = name.startswith("omlx_cache")
        color = "#175cd3" if is_ours else "#667085"
        axes.plot(size / MIB, kld, "o", color=color, markersize=7 if is_ours else 5)
        axes.annotate(
            name, (size / MIB, kld), xytext=(6, 3), textcoords="offset points", color=color
        )
    axes.set_yscale("log")
    axes.set_xlim(left=0)
    axes.margins(x=0.25, y=0.15)
    axes.set_xlabel(f"cache after {data['setup']['memory']} tokens, MiB")
    axes.set_ylabel("KL divergence, nats")
