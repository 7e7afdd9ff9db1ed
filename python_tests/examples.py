"""The examples of the documents: fenced blocks, commands and paths, and where each one stands."""

from __future__ import annotations

import ast
import re
import runpy
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^ *```$", re.M | re.S)
_INLINE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_PATH = re.compile(r"[\w.-]+(/[\w.-]+)+/?|[\w-]+\.(py|md|toml|txt|yaml)")
_TOP = {p.name for p in ROOT.iterdir()} - {".venv"} | {"Makefile"}


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        language: the word behind the fence.
        text: what it holds, without its own indentation.
        line: the line of the document on which ``text`` begins.
    """

    language: str
    text: str
    line: int


def blocks(document: Path, *languages: str) -> Iterator[Block]:
    """Yield the fenced blocks in any of the languages."""
    text = document.read_text(encoding="utf-8")
    for match in _FENCE.finditer(text):
        if match["language"] in languages:
            indent = len(match["indent"])
            body = "".join(line[indent:] or "\n" for line in match["text"].splitlines(True))
            yield Block(match["language"], body, text[: match.start("text")].count("\n") + 1)


def commands(document: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield line and words of each command: of shell blocks, and of code within a sentence."""
    for block in blocks(document, "sh", "bash", "shell"):
        text = block.text.replace("\\\n", "  ")
        for offset, line in enumerate(text.splitlines()):
            words = shlex.split(line, comments=True)
            if words:
                yield block.line + offset, words
    prose = _FENCE.sub(lambda match: "\n" * match[0].count("\n"), document.read_text("utf-8"))
    for number, line in enumerate(prose.splitlines(), 1):
        for code in _INLINE.findall(line):
            if code.startswith(("make ", "python ", ".venv/bin/", "pip ", "torchrun ")):
                yield number, shlex.split(code)


def paths(document: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of code that names a file of the repository, and of links."""
    prose = _FENCE.sub(lambda match: "\n" * match[0].count("\n"), document.read_text("utf-8"))
    for number, line in enumerate(prose.splitlines(), 1):
        for code in _INLINE.findall(line):
            if _PATH.fullmatch(code) and code.split("/")[0] in _TOP:
                yield number, code
        for target in _LINK.findall(line):
            if not target.startswith(("http:", "https:", "#")):
                here = (document.parent / target.partition("#")[0]).resolve()
                yield number, str(here.relative_to(ROOT))


def faults(words: list[str]) -> list[str]:
    """Return what a command names and the repository doesn't have."""
    while words and re.fullmatch(r"\w+=.*", words[0]):  # variables before a command
        words = words[1:]
    if "&&" in words or "|" in words:
        at = next(i for i, word in enumerate(words) if word in ("&&", "|"))
        return faults(words[:at]) + faults(words[at + 1 :])
    if not words:
        return []
    name, rest = words[0].removeprefix(".venv/bin/"), words[1:]
    check = _CHECKS.get(name)
    if check is not None:
        return check(rest)
    if (ROOT / name).is_file():
        return []
    return [f"nobody checks the command {name!r}: teach python_tests/examples.py"]


def _python(rest: list[str]) -> list[str]:
    if rest[:1] == ["-m"]:
        module, rest = rest[1], rest[2:]
        if module.split(".")[0] not in ("omlx_cache", "omlx_kernels"):
            return [] if module in ("pip", "pytest", "venv") else [f"unknown module {module}"]
        script = ROOT / (module.replace(".", "/") + ".py")
    else:
        if "/" not in rest[0]:
            return []  # a file of the reader's own
        script, rest = ROOT / rest[0], rest[1:]
    if not script.is_file():
        return [f"there is no {script.relative_to(ROOT)}"]
    given = [word.partition("=")[0] for word in rest if word.startswith("--")]
    unknown = [f"{script.name} has no {word}" for word in given if word not in options(script)]
    configs = [w for w in rest if w.startswith("configs/") and "*" not in w]
    return unknown + [f"there is no {word}" for word in configs if not (ROOT / word).exists()]


@cache
def options(script: Path) -> frozenset[str]:
    """Return the options of a script's command line, read from its source.

    Scripts of argparse name them in strings; typer makes them of annotated or default parameters.
    """
    found = {"--help"}
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.update(re.findall(r"(?<![^\s/])--[\w-]+", node.value))
        if isinstance(node, ast.FunctionDef) and _is_command(node):
            found.update("--" + argument.arg.replace("_", "-") for argument in node.args.args)
    return frozenset(found)


def _is_command(node: ast.FunctionDef) -> bool:
    return "typer.Option" in ast.unparse(node.args)


def _make(rest: list[str]) -> list[str]:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):(?!=)", text, re.M))
    variables = set(re.findall(r"^([A-Z_]+) *[?:]?=", text, re.M)) | set(
        re.findall(r"\$\(([A-Z_]+)\)", text)
    )
    named = [word for word in rest if "=" not in word]
    set_ = [word.partition("=")[0] for word in rest if "=" in word]
    return [f"make has no target {word}" for word in named if word not in targets] + [
        f"the Makefile has no variable {word}"
        for word in set_
        if word not in variables and f"$(if $({word})" not in text
    ]


def _pip(rest: list[str]) -> list[str]:
    extras = set(_setup_extras())
    wanted = [e for word in rest for e in re.findall(r"(?:\.|omlx_cache)\[([\w,-]+)\]", word)]
    return [
        f"there is no extra {extra}"
        for group in wanted
        for extra in group.split(",")
        if extra not in extras
    ]


@cache
def _setup_extras() -> tuple[str, ...]:
    import setuptools

    seen: dict = {}
    original, setuptools.setup = setuptools.setup, lambda **kwargs: seen.update(kwargs)
    try:
        runpy.run_path(str(ROOT / "setup.py"))
    finally:
        setuptools.setup = original
    return tuple(seen["extras_require"])


def _pytest(rest: list[str]) -> list[str]:
    return [f"there is no {w}" for w in rest if "/" in w and not (ROOT / w.split("::")[0]).exists()]


def _torchrun(rest: list[str]) -> list[str]:
    from torch.distributed.run import get_args_parser

    known = {option for action in get_args_parser()._actions for option in action.option_strings}
    given = [word.partition("=")[0] for word in rest if word.startswith("--")]
    return [f"torchrun has no {word}" for word in given if word not in known]


def _fine(rest: list[str]) -> list[str]:
    return []


_CHECKS = {
    "python": _python,
    "python3": _python,
    "make": _make,
    "pip": _pip,
    "pytest": _pytest,
    "torchrun": _torchrun,
    "git": _fine,
    "cd": _fine,
    "curl": _fine,
    "cat": _fine,
}
