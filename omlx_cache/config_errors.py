"""Turn what is wrong in a configuration into one line: what, expected, got, where, remedy."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

from annotated_types import Ge, Le, MultipleOf
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from omlx_cache.config_types import allowed_by

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 60

_PYTHON = {"null": "None", "true": "True", "false": "False"}
_NUMBER = re.compile(r"([+-]?\d{1,18})[- ]?(bits?|tokens?|blocks?)?")
_YES, _NO = {"true", "yes", "on"}, {"false", "no", "off"}
_NULL = {"none", "null", "nil", "full", "all", "inf", "infinite", "unlimited", "unbounded"}


class ConfigError(ValueError):
    """A configuration that can't be used; `args` holds one line for each thing that is wrong."""

    def __init__(self, *problems: str):
        super().__init__(*problems)

    def __str__(self) -> str:
        return listed("errors", self.args)


@dataclass(frozen=True)
class Given:
    """One leaf key as its user gave it: value, path (kv_cache.block_size), and file and line."""

    value: Any
    path: str
    file: str = ""
    line: int = 0

    @property
    def place(self) -> str:
        """Say where in a file, ` (configs/chat.yaml:3)`; nothing for a value from Python."""
        return f" ({self.file}:{self.line})" if self.file else ""

    def shown(self) -> str:
        """Write the value in the language it came from: `true` from YAML, `True` from Python."""
        return spell(self.value, yaml=bool(self.file))


def listed(noun: str, lines: Sequence[str]) -> str:
    """Put one line behind `CacheConfig:`, several below their count."""
    if len(lines) == 1:
        return f"CacheConfig: {lines[0]}"
    return "\n".join([f"CacheConfig: {len(lines)} {noun}", *(f"  - {line}" for line in lines)])


def spell(value: Any, yaml: bool) -> str:
    """Return a short repr on one line; in YAML's own words for null, true and false."""
    if yaml and (value is None or isinstance(value, bool)):
        return {None: "null", True: "true", False: "false"}[value]
    return " ".join(_REPR.repr(value).split())  # reprlib survives a broken __repr__


def nearest(word: object, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the candidate most like `word` (the first of equals), None where none is alike."""
    plain = str(word).strip().lower().replace("-", "_").replace(" ", "_")
    scored = [(difflib.SequenceMatcher(None, plain, c).ratio(), c) for c in candidates]
    best = max(scored, key=lambda pair: pair[0], default=(0.0, ""))
    return best[1] if best[0] >= cutoff else None


def wrong_line(given: Given, field: FieldInfo) -> str:
    """Return the line for a value that its field doesn't accept.

    Args:
        given: the value.
        field: its field.
    """
    yaml = bool(given.file)
    allowed = allowed_by(field)
    if not yaml:
        allowed = re.sub(r"\b(null|true|false)\b", lambda word: _PYTHON[word[0]], allowed)
    kind = "" if given.value is None else f" ({type(given.value).__name__})"
    remedy = _remedy(given, field)
    line = f"{given.path} must be {allowed}, got {given.shown()}{kind}{given.place}"
    return f"{line}; {remedy}" if remedy else line


def _remedy(given: Given, field: FieldInfo) -> str:
    """Return what to write instead, or "" where the field's own words say it all."""
    value, yaml = given.value, bool(given.file)
    if value is None:
        return f"give a value, or delete the key for the default, {spell(field.default, yaml)}"
    if isinstance(value, str):
        text = value.strip().lower()
        number = _NUMBER.fullmatch(text.replace("_", ""))
        meant: list[Any] = [None] if text in _NULL else []
        meant += [text in _YES] if text in _YES | _NO else []
        meant += [int(number[1])] if number else []
        for candidate in meant:
            if _legal(candidate, field):
                word = spell(candidate, yaml)
                return f"write {word}" + (", without quotes" if word.lower() == text else "")
        like = nearest(text, [w for w in _literals(field.annotation) if isinstance(w, str)])
        return f"did you mean {like}?" if like else ""
    if isinstance(value, float) and value.is_integer() and _legal(int(value), field):
        return f"write {int(value)}"
    if type(value) is int and value in (0, 1) and _legal(bool(value), field):
        return f"write {spell(bool(value), yaml)}"
    if type(value) is int and (step := _constraint(field, MultipleOf, "multiple_of")):
        low, high = _constraint(field, Ge, "ge"), _constraint(field, Le, "le")
        return f"the nearest is {min(max(low, (value + step // 2) // step * step), high)}"
    return ""


def _legal(value: Any, field: FieldInfo) -> bool:
    annotated: Any = Annotated  # of a type that is known only now
    kind = annotated[(field.annotation, Field(), *field.metadata)]  # which needs one, at least
    try:
        TypeAdapter(kind, config=ConfigDict(strict=True)).validate_python(value)
    except ValidationError:
        return False
    return True


def _literals(annotation: Any) -> list[Any]:
    """Return the literal values of a type, or of a union's branches."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    branches = [b for b in get_args(annotation) if get_origin(b) is Literal]
    return [value for branch in branches for value in get_args(branch)]


def _constraint(field: FieldInfo, kind: type, name: str) -> Any:
    return next((getattr(m, name) for m in field.metadata if isinstance(m, kind)), None)
