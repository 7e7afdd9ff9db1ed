"""Read the sources of a configuration into leaf keys that remember where they stood.

A source is a YAML file or a mapping, of sections, leaf keys or both. Nothing here knows the fields:
`config.py` says which leaf key belongs to which section.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from omlx_cache.config_errors import ConfigError, Given, nearest, spell

SECTIONS = ("kv_cache", "quantization", "attention")
_MAX_BYTES = 1 << 20  # a configuration is a page of text; don't read a checkpoint given by mistake
# What PyYAML leaks for some malformed scalars (`!!int x`, a 13th month) and for 10,000 brackets.
_LEAKED = (RecursionError, ValueError, LookupError, AttributeError, TypeError)
_Lines = Mapping[tuple[Any, ...], int]


def read_yaml(path: str | os.PathLike[str]) -> tuple[Mapping[Any, Any], _Lines]:
    """Read one YAML mapping and the line of every key in it.

    Args:
        path: a UTF-8 text file.

    Returns:
        The mapping, and its lines, `{("kv_cache",): 1, ("kv_cache", "block_size"): 2, …}`.

    Raises:
        ConfigError: no text, no YAML, empty, no mapping, or a key written twice.
        OSError: the file can't be read (FileNotFoundError names the nearest file beside it).
    """
    text, name = _read_text(path), os.fspath(path)
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        twice = _duplicates(root, set())  # before construction, which flattens `<<` merges
        data = None if root is None else loader.construct_document(root)
        lines = _line_numbers(loader, root)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_syntax_line(name, error)) from None
    except (yaml.YAMLError, *_LEAKED) as error:
        raise ConfigError(f"{name} is not valid YAML: {_one_line(error)}") from None
    if twice:
        raise ConfigError(
            *(
                f"{name}:{b}: {key} is written twice, first on line {a}; keep one"
                for key, a, b in twice
            )
        )
    if data is None:
        raise ConfigError(
            f"{name} is empty; write at least one key, or give no configuration for the defaults"
        )
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"{name} must be a mapping of sections ({', '.join(SECTIONS)}) or keys, "
            f"got {spell(data, True)} ({type(data).__name__}); write lines of `key: value`"
        )
    return data, lines


def collect(
    data: Mapping[Any, Any],
    section_of: Mapping[str, str],
    file: str = "",
    lines: _Lines | None = None,
) -> tuple[dict[str, Given], list[str]]:
    """Flatten sections into leaf keys.

    Args:
        data: sections, leaf keys, or both.
        section_of: every known leaf key and the section it belongs to.
        file, lines: where `data` came from, for messages (see `read_yaml`).

    Returns:
        The known keys, and one line for each unknown, misplaced or twice-given one.
    """
    given: dict[str, Given] = {}
    problems: list[str] = []

    def entry(value: Any, *keys: Any) -> Given:
        line = (lines or {}).get(keys, 0)
        return Given(value, ".".join(map(str, keys)), file if line else "", line)

    def take(key: Any, section: str | None, new: Given) -> None:
        if not isinstance(key, str) or key not in section_of:
            problems.append(_unknown(key, section, new, section_of))
            return
        path = f"{section_of[key]}.{key}"
        old = given.get(key)
        if section not in (None, section_of[key]):
            problems.append(f"{new.path}{new.place} is in the wrong section; move it to {path}")
        elif old and (type(old.value) is not type(new.value) or old.value != new.value):
            problems.append(
                f"{path} is given twice with different values, {old.shown()}{old.place} "
                f"and {new.shown()}{new.place}; keep one"
            )
        else:
            given[key] = Given(new.value, path, new.file, new.line)

    for key, value in data.items():
        if key not in SECTIONS:
            take(key, None, entry(value, key))
        elif isinstance(value, Mapping):
            for leaf, leaf_value in value.items():
                take(leaf, key, entry(leaf_value, key, leaf))
        elif value is not None:  # a section with all its lines commented out is only empty
            new = entry(value, key)
            problems.append(
                f"{key} is a section and must hold keys ({_keys(key, section_of)}), "
                f"got {new.shown()} ({type(value).__name__}){new.place}"
            )
    return given, problems


def from_file(
    path: str | os.PathLike[str], section_of: Mapping[str, str]
) -> tuple[dict[str, Given], list[str]]:
    """Read a YAML file and flatten it; see `read_yaml` and `collect`."""
    data, lines = read_yaml(path)
    return collect(data, section_of, os.fspath(path), lines)


def from_keywords(
    leaf_keys: Mapping[str, Any], section_of: Mapping[str, str]
) -> tuple[dict[str, Given], list[str]]:
    """Take leaf keys alone, as `collect` does; a section is a problem."""
    leaves = {k: v for k, v in leaf_keys.items() if k not in SECTIONS}
    given, problems = collect(leaves, section_of)
    return given, problems + [
        f"{k} is a section, not a keyword; give its keys themselves, or use CacheConfig.from_dict"
        for k in leaf_keys
        if k in SECTIONS
    ]


def _unknown(key: Any, section: str | None, new: Given, section_of: Mapping[str, str]) -> str:
    if not isinstance(key, str):
        shown = spell(key, bool(new.file))
        return f"a key must be text, got {shown} ({type(key).__name__}){new.place}"
    if section is None and (name := nearest(key, SECTIONS, 0.75)):
        return f"unknown section {new.path}{new.place}; did you mean {name}?"
    tail = key.rpartition(".")[2]
    if section is None and tail in section_of:
        nested = f"{section_of[tail]}: {{{tail}: …}}"
        return f"unknown key {key}{new.place}; nest it, {nested}, or write {tail} alone"
    here = [k for k in section_of if section in (None, section_of[k])]
    if near := nearest(key, here) or nearest(key, section_of):
        return f"unknown key {new.path}{new.place}; did you mean {section_of[near]}.{near}?"
    return f"unknown key {new.path}{new.place}; known keys: {_keys(section, section_of)}"


def _keys(section: str | None, section_of: Mapping[str, str]) -> str:
    return ", ".join(k for k in section_of if section in (None, section_of[k]))


def _read_text(path: str | os.PathLike[str]) -> str:
    name = os.fspath(path)
    if not isinstance(name, str) or not name or "\n" in name or "\0" in name:
        raise ConfigError(
            f"the path of a YAML file is needed, got {spell(name, False)} ({type(name).__name__}); "
            "for YAML text use CacheConfig.from_dict(yaml.safe_load(text))"
        )
    try:
        with open(name, "rb") as stream:
            raw = stream.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise FileNotFoundError(f"CacheConfig: {name} does not exist; {_beside(name)}") from None
    except OSError as error:
        raise type(error)(
            f"CacheConfig: {name} can't be read ({error.strerror}); give the path of a YAML file"
        ) from None
    if len(raw) > _MAX_BYTES:
        raise ConfigError(f"{name} is no configuration, it is over 1 MiB; give a YAML file")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name} is not UTF-8 text (byte {error.start} is 0x{raw[error.start]:02x}); "
            "give a YAML file"
        ) from None


def _beside(name: str) -> str:
    folder = Path(name).parent
    if not folder.is_dir():
        return f"there is no folder {folder.absolute()}"
    near = nearest(Path(name).name, sorted(p.name for p in folder.glob("*.y*ml")))
    return f"did you mean {folder / near}?" if near else f"looked in {folder.absolute()}"


def _syntax_line(name: str, error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    spot = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
    text = _one_line(", ".join(part for part in (error.context, error.problem) if part))
    remedy = "; indent with spaces, not tabs" if "\\t" in text else ""
    return f"{spot}: not valid YAML: {text}{remedy}"


def _one_line(text: object) -> str:
    return " ".join(str(text).split())[:200] or type(text).__name__


def _duplicates(node: yaml.Node | None, seen: set[int]) -> list[tuple[str, int, int]]:
    """Return (key, first line, later line) for keys written twice in one mapping, at any depth."""
    if not isinstance(node, yaml.CollectionNode) or id(node) in seen:
        return []
    seen.add(id(node))
    found: list[tuple[str, int, int]] = []
    first: dict[tuple[str, str], int] = {}
    for item in node.value:
        key, child = item if isinstance(node, yaml.MappingNode) else (None, item)
        if isinstance(key, yaml.ScalarNode):
            line = key.start_mark.line + 1
            if (key.tag, key.value) in first:
                found.append((key.value, first[key.tag, key.value], line))
            first.setdefault((key.tag, key.value), line)
        found += _duplicates(child, seen)
    return found


def _line_numbers(loader: yaml.SafeLoader, root: yaml.Node | None) -> dict[tuple[Any, ...], int]:
    """Return the line of each key at the top and one level below, `<<` merges included."""
    lines: dict[tuple[Any, ...], int] = {}
    for key_node, node in root.value if isinstance(root, yaml.MappingNode) else ():
        key = loader.construct_object(key_node, deep=True)
        lines[(key,)] = key_node.start_mark.line + 1
        for leaf_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            leaf = loader.construct_object(leaf_node, deep=True)
            lines[key, leaf] = leaf_node.start_mark.line + 1
    return lines
