"""The README's quality numbers: the quality tool with its defaults, kept in ``bench/results/``.

    python bench/quality.py                    # 4096 tokens, bench/results/quality_4096.json
    python bench/quality.py --tokens 8192      # and every other option of omlx_cache.tools.quality

A run that was interrupted goes on; rows that are there are not measured again.
"""

from __future__ import annotations

import sys
from pathlib import Path

from omlx_cache.tools.quality import app

RESULTS = Path(__file__).parent / "results"


def main(arguments: list[str]) -> None:
    """Run the tool; without ``--results`` the file is named after the tokens."""
    tokens = "4096"
    if "--tokens" in arguments[:-1]:
        tokens = arguments[arguments.index("--tokens") + 1]
    if "--results" not in arguments:
        arguments = [*arguments, "--results", str(RESULTS / f"quality_{tokens}.json")]
    app(arguments, prog_name="bench/quality.py")


if __name__ == "__main__":
    main(sys.argv[1:])
