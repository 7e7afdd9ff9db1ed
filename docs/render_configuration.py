"""Render ``docs/configuration.md`` from the fields of `CacheConfig`.

::

    python docs/render_configuration.py

What a key accepts, its default and its meaning are written once, in ``config_fields.py``.
``python_tests/test_docs.py`` fails where the document says something else.
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from omlx_cache.config import CacheConfig
from omlx_cache.config_errors import spell
from omlx_cache.config_source import SECTIONS
from omlx_cache.config_types import allowed_by, section_of

DOCUMENT = Path(__file__).with_name("configuration.md")
WIDTH = 120

HEAD = """\
# Configuration reference

<!-- Written by docs/render_configuration.py from omlx_cache/config_fields.py: edit that. -->

A configuration comes from a YAML file, a dict or keywords. All three know the same keys:

```python
import omlx_cache

omlx_cache.patch(model, "configs/chat.yaml")  # a file
omlx_cache.patch(model, {"attention": {"window_size": 1024}})  # a dict, with or without sections
omlx_cache.patch(model, window_size=1024)  # keywords: keys without their sections
omlx_cache.patch(model, "configs/chat.yaml", window_size=1024)  # keywords win over the file
config = omlx_cache.CacheConfig.from_yaml("configs/default.yaml")
print(config.to_yaml())
```

An unknown key, a wrong value, or two keys that exclude each other raise `ConfigError` (a
`ValueError`), which names all that is wrong with file and line. None is ignored.

`cache_bits`, `tiers` and `target_saving` are three ways to say how older tokens are stored: at most
one of them may be given. `window_size` must be more than `sink_tokens`. [tuning.md](tuning.md) says
which values to choose.
"""


def render() -> str:
    """Return the document."""
    parts = [HEAD]
    for section in SECTIONS:
        parts.append(f"## `{section}`\n")
        for name, field in CacheConfig.model_fields.items():
            if section_of(field) == section:
                parts.append(_entry(name, field))
    return "\n".join(parts)


def _entry(name: str, field: Any) -> str:
    lines = [
        f"### `{name}`\n",
        "| | |",
        "|---|---|",
        f"| accepts | {allowed_by(field)} |",
        f"| default | `{_word(field.default)}` |",
    ]
    meaning = textwrap.fill(
        _code(field.description), WIDTH, break_on_hyphens=False, break_long_words=False
    )
    return "\n".join([*lines, "", meaning, ""])


def _word(value: Any) -> str:
    return spell(value, yaml=True).strip("'")


def _code(text: str) -> str:
    """Set names of keys, tiers and errors in the words of a description as code."""
    names = [n for n in CacheConfig.model_fields if "_" in n] + ["OutOfBlocksError", "ConfigError"]
    text = re.sub(r"\{[^{}]+\}", lambda match: f"`{match[0]}`", text)
    return re.sub(rf"(?<![`\w])({'|'.join(names)})(?![\w`])", r"`\1`", text)


if __name__ == "__main__":
    DOCUMENT.write_text(render(), encoding="utf-8")
    print(f"{DOCUMENT}: {len(CacheConfig.model_fields)} keys")
