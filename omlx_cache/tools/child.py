"""Run a slow, noisy job in a child process: pass on its progress, keep its noise in a file."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, cast

from omlx_cache.tools.prepared import PreparationError
from omlx_cache.tools.progress import Progress

ERROR_LINES = 12
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class ProgressLines:
    """The child's side: progress as JSON lines on standard output, and nothing else there.

    Mutates: what the process prints from here on goes to standard error.
    """

    def __init__(self) -> None:
        self._stream = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def __call__(self, step: str, done: int = 0, total: int | None = None) -> None:
        """Report that ``done`` of ``total`` parts (None: unknown) of ``step`` are finished."""
        line = json.dumps({"step": step, "done": done, "total": total})
        print(line, file=self._stream, flush=True)


def run_child(
    module: str,
    arguments: Sequence[str],
    log: Path,
    progress: Progress,
    environment: dict[str, str] | None = None,
    python: str = sys.executable,
) -> None:
    """Run ``python -m module arguments`` and pass on its JSON progress lines until it ends.

    Args:
        module: a module that writes ``{"step": ..., "done": ..., "total": ...}`` lines to standard
            output.
        arguments: its command-line arguments.
        log: file that takes its standard error; kept only if it fails.
        progress: told what the child says.
        environment: variables set for the child besides this process's own.
        python: the interpreter; one of another environment needs a ``PYTHONPATH`` of its own.

    Raises:
        PreparationError: the child failed; the message ends with the last lines of the log.
    """
    variables = (
        os.environ | {"PYTHONPATH": _search_path(), "PYTHONUNBUFFERED": "1"} | (environment or {})
    )
    command = [python, "-m", module, *arguments]
    with log.open("wb") as noise:
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=noise, env=variables, text=True
        )
        said = cast("IO[str]", child.stdout)  # it is a pipe
        try:
            for line in said:
                event = json.loads(line)
                progress(event["step"], event["done"], event["total"])
            code = child.wait()
        except BaseException:
            log.unlink()
            raise
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
            said.close()
    if code != 0:
        raise PreparationError(
            f"{module.rpartition('.')[2]} {arguments[0]} failed (exit code {code}); the whole log "
            f"is {log}; "
            f"its last lines:\n{_last_lines(log)}"
        )
    log.unlink(missing_ok=True)


def _search_path() -> str:
    """Let the child find what this process finds, whatever its working directory."""
    return os.pathsep.join(dict.fromkeys(os.path.abspath(entry) for entry in sys.path))


def _last_lines(log: Path) -> str:
    text = _ESCAPES.sub("", log.read_text(encoding="utf-8", errors="replace")).replace("\r", "\n")
    return "\n".join([line.rstrip() for line in text.splitlines() if line.strip()][-ERROR_LINES:])
