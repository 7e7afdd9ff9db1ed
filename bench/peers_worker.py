"""The process that measures one thing of one contender.

    python -m peers_worker REQUEST.json ANSWER.json

A process of its own, because these packages replace functions of transformers when they are
imported, start threads, and may crash; and because a peak of memory belongs to a whole process.
Standard output carries progress as JSON lines, what libraries print goes to standard error.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement

from omlx_cache.tools.child import ProgressLines
from omlx_cache.tools.loading import hushed


def answer(request: dict, progress: ProgressLines) -> dict:
    """Return ``found``, what the measure gives or ``{"error": why}``, and ``versions``."""
    needs = request["needs"]
    missing = [name for name in needs if _version(name) is None]
    if missing:
        return {"found": {"error": f"{missing[0]} is not installed"}, "versions": {}}
    try:
        found = _measure(request, progress)
    except Exception as error:  # whatever a foreign package raises is its row
        traceback.print_exc()
        words = str(error).strip().splitlines() or [""]
        reason = f"{type(error).__name__}: {words[0]}".rstrip(": ")
        found = {"error": "; ".join([reason, *conflicts(needs)])}
    return {"found": found, "versions": {name: _version(name) for name in _named(needs)}}


def _named(needs: Sequence[str]) -> list[str]:
    return ["torch", "transformers", *needs]


def _measure(request: dict, progress: ProgressLines) -> dict:
    import torch

    torch.set_num_threads(request["threads"])
    from peers_contenders import Source, by_name
    from peers_measures import MEASURES, Plan

    lengths, scratch = tuple(request["plan"]["lengths"]), Path(request["plan"]["scratch"])
    plan = Plan(**request["plan"] | {"lengths": lengths, "scratch": scratch})
    gguf = request["gguf"]
    source = Source(request["checkpoint"], Path(gguf) if gguf else None)
    with hushed():
        return MEASURES[request["measure"]](by_name(request["contender"]), source, plan, progress)


def conflicts(needs: Sequence[str]) -> list[str]:
    """Say which installed versions these distributions were not made for.

    >>> conflicts(["transformers"])
    []
    """
    found = []
    for name in needs:
        for text in importlib.metadata.requires(name) or ():
            wanted = Requirement(text)
            here = _version(wanted.name)
            if here is None or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
                continue
            if not wanted.specifier.contains(here, prereleases=True):
                version = _version(name)
                found.append(f"{name} {version} wants {wanted.name}{wanted.specifier}, not {here}")
    return found


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def main(arguments: list[str]) -> None:
    """Answer the request."""
    request, target = Path(arguments[0]), Path(arguments[1])
    progress = ProgressLines()
    found = answer(json.loads(request.read_text(encoding="utf-8")), progress)
    target.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
