"""A web page in one file: no script, no font, no picture that would have to be fetched."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

CSS = """
:root { color-scheme: light; }
body { font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; color: #1d2939;
       background: #f5f6f8; margin: 0; }
main { max-width: 960px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 0 0 6px; }
p { margin: 6px 0 12px; } .quiet { color: #667085; }
section { background: #fff; border: 1px solid #e4e7ec; border-radius: 10px; padding: 18px 20px;
          margin: 18px 0; overflow-x: auto; }
svg { max-width: 100%; height: auto; display: block; margin: 4px auto; }
pre { background: #101828; color: #e6edf7; padding: 14px 16px; border-radius: 8px; overflow-x: auto;
      font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; margin: 8px 0; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: #475467; border-bottom: 2px solid #d0d5dd; }
th, td { padding: 5px 10px 5px 0; vertical-align: top; } td { border-bottom: 1px solid #eef0f3; }
th.n, td.n { text-align: right; white-space: nowrap; } tr.chosen td { background: #ecfdf3; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 12px; }
.card { background: #fff; border: 1px solid #e4e7ec; border-radius: 10px; padding: 12px 14px; }
.card b { display: block; font-size: 21px; } .card span { color: #667085; font-size: 13px; }
"""


def page(title: str, subtitle: str, parts: Sequence[str]) -> str:
    """Return a whole HTML document; ``parts`` are HTML already."""
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n"
        f'<h1>{escape(title)}</h1>\n<p class="quiet">{escape(subtitle)}</p>\n{body}\n'
        f"</main>\n</body>\n</html>\n"
    )


def section(title: str, *parts: str) -> str:
    """Return a section with a heading; ``parts`` are HTML already."""
    inner = "\n".join(parts)
    return f"<section>\n<h2>{escape(title)}</h2>\n{inner}\n</section>"


def paragraph(text: str) -> str:
    """Return a paragraph of explanation."""
    return f'<p class="quiet">{escape(text)}</p>'


def preformatted(text: str) -> str:
    """Return text as it is."""
    return f"<pre>{escape(text)}</pre>"


def cards(pairs: Sequence[tuple[str, str]]) -> str:
    """Return (value, what it is) pairs as a row of cards."""
    inner = "".join(
        f'<div class="card"><b>{escape(value)}</b><span>{escape(label)}</span></div>'
        for value, label in pairs
    )
    return f'<div class="cards">{inner}</div>'


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], numbers: int, chosen: int | None = None
) -> str:
    """Return a table.

    Args:
        header: the columns' names.
        rows: their texts.
        numbers: how many of the last columns are numbers, set to the right.
        chosen: the row to highlight.
    """
    first = len(header) - numbers

    def cells(tag: str, texts: Sequence[str]) -> str:
        return "".join(
            f'<{tag} class="n">{escape(t)}</{tag}>' if i >= first else f"<{tag}>{escape(t)}</{tag}>"
            for i, t in enumerate(texts)
        )

    lines = [
        f'<tr class="chosen">{cells("td", row)}</tr>'
        if i == chosen
        else f"<tr>{cells('td', row)}</tr>"
        for i, row in enumerate(rows)
    ]
    head, body = f"<tr>{cells('th', header)}</tr>", "".join(lines)
    return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"
