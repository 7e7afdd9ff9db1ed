"""Measure contenders one by one, each in a child process; what is there is not measured again."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from peers_contenders import Contender, Source
from peers_measures import Plan

from omlx_cache.tools.child import run_child
from omlx_cache.tools.errors import WrongSettingError
from omlx_cache.tools.machine import versions
from omlx_cache.tools.output import write_text
from omlx_cache.tools.prepared import PreparationError
from omlx_cache.tools.progress import Progress

WORKER = "peers_worker"
ROOT = Path(__file__).parents[1]
FEATURES = {"avx2": "AVX2", "avx512_vnni": "AVX-512 VNNI", "amx_int8": "AMX"}


class Results:
    """The results file: what was read, on what machine, and a row for each contender.

    A row holds ``setting``, ``base``, ``versions``, and each measure's numbers, or ``{"error":
    why}`` in their place.

    Args:
        setup: what must be the same for rows to be comparable, as plain data.
        path: a JSON file, read where it exists and written after each measure.

    Raises:
        WrongSettingError: the file is no such file, or of another setup.
    """

    def __init__(self, setup: dict, path: Path) -> None:
        self.path = path
        self.data = {"setup": setup, "machine": machine(), "versions": versions(), "results": {}}
        if not path.exists():
            return
        try:
            there = json.loads(path.read_text(encoding="utf-8"))
            before, self.data["results"] = there["setup"], there["results"]
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise WrongSettingError(
                f"{path} must hold results of this tool, got something else; give another file"
            ) from error
        for key, value in setup.items():
            if before.get(key) != value:
                raise WrongSettingError(
                    f"{path} holds results with {key} {before.get(key)!r}, asked for {value!r}; "
                    f"give another file, or delete it"
                )

    def missing(self, contender: Contender, measure: str, plan: Plan) -> Plan | None:
        """Return what of a measure is not there yet, None where all is; errors are tried again."""
        row = self.data["results"].get(contender.name, {})
        there = row.get(measure, {}) if row.get("setting") == contender.setting else {}
        if measure == "speed":
            lengths = tuple(n for n in plan.lengths if str(n) not in there)
            return replace(plan, lengths=lengths) if lengths else None
        return plan if not there or "error" in there else None

    def add(self, contender: Contender, measure: str, found: dict, used: dict) -> None:
        """Add what a measure found, with the versions that it used, and write the file."""
        row = self.data["results"].setdefault(contender.name, {})
        if row.get("setting") != contender.setting:
            row.clear()
        before = row.get(measure, {})
        if measure == "speed" and "error" not in found and "error" not in before:
            found = dict(sorted((before | found).items(), key=lambda item: int(item[0])))
        row |= {
            "setting": contender.setting,
            "base": contender.base,
            "versions": used or row.get("versions", {}),
            measure: found,
        }
        self.write()

    def write(self) -> None:
        """Write the file, whole or not at all."""
        write_text(self.path, json.dumps(self.data, indent=1) + "\n")


@dataclass(frozen=True)
class Child:
    """How the child processes are run.

    Attributes:
        source: the model.
        threads: PyTorch's and llama.cpp's.
        scratch: a directory that all of them share.
        python: the interpreter; one of another environment finds only this repository here.
    """

    source: Source
    threads: int
    scratch: Path
    python: str = sys.executable

    def measure(
        self, contender: Contender, name: str, plan: Plan, progress: Progress
    ) -> tuple[dict, dict]:
        """Return what a measure found (or its ``error``), and the versions that it used."""
        gguf = self.source.gguf
        request = {
            "contender": contender.name,
            "measure": name,
            "needs": contender.needs,
            "plan": asdict(replace(plan, scratch=str(self.scratch))),
            "checkpoint": self.source.checkpoint,
            "gguf": None if gguf is None else str(gguf),
            "threads": self.threads,
        }
        environment = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        if self.python != sys.executable:
            environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "bench")])
        asked, answered = self.scratch / "request.json", self.scratch / "answer.json"
        asked.write_text(json.dumps(request), encoding="utf-8")
        arguments = [str(asked), str(answered)]
        try:
            run_child(WORKER, arguments, self.scratch / "log", progress, environment, self.python)
        except PreparationError as error:
            code = re.search(r"exit code (-?\d+)", str(error))
            return {"error": f"its process ended with exit code {code[1]}"}, {}
        answer = json.loads(answered.read_text(encoding="utf-8"))
        return answer["found"], answer["versions"]


def measure_all(
    contenders: Sequence[Contender],
    measures: Sequence[str],
    plan: Plan,
    child: Child,
    results: Results,
    progress: Progress,
) -> None:
    """Add each measure of each contender that the results don't have yet, one after another."""
    for measure in measures:
        for contender in contenders:
            left = results.missing(contender, measure, plan)
            if left is not None:
                found, used = child.measure(contender, measure, left, progress)
                results.add(contender, measure, found, used)


def machine() -> dict:
    """Return the system, the processor's features that matter here, and its cores."""
    try:
        known = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    except OSError:
        known = []
    return {
        "system": platform.system(),
        "processor": platform.machine(),
        "features": [words for flag, words in FEATURES.items() if flag in known],
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
