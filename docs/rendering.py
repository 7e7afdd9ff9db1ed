"""Tables of the documents that are rendered from code or results, between two comments."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def put(document: str, name: str, table: str) -> str:
    """Return the text of a document with the table ``name`` replaced.

    Raises:
        ValueError: when the document has no place for it.
    """
    begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
    before, found, rest = document.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"the document must hold {begin} and {end}")
    return f"{before}{begin}\n{table}\n{end}{after}"


def update(path: Path, tables: dict[str, str]) -> str:
    """Return the text of a document with its tables as they should be now."""
    text = path.read_text(encoding="utf-8")
    for name, table in tables.items():
        text = put(text, name, table)
    return text
