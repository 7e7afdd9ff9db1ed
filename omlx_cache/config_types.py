"""The types of the fields of `CacheConfig`, and how a field is declared."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError


def _path_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _no_float(value: Any) -> Any:
    if isinstance(value, float):  # a Literal compares by ==, so that 8.0 would pass
        raise PydanticCustomError("no_float", "must not be a float")
    return value


Positive = Annotated[int, Field(ge=1)]
Bits = Annotated[Literal[4, 8, 16], BeforeValidator(_no_float)]
KVBits = Annotated[dict[Literal["k", "v"], Bits], Field(min_length=2)]
WeightBits = Annotated[Literal[2, 3, 4, 8, 16, 32], BeforeValidator(_no_float)]
Directory = Annotated[str, BeforeValidator(_path_text), Field(min_length=1)]


def key(section: str, default: Any, allowed: str, description: str, **limits: int) -> Any:
    """Declare a field.

    Args:
        section: the section of the YAML file that it belongs to.
        default: its default.
        allowed: what it accepts, in the words of an error message: "… must be {allowed}".
        description: what it does today, for the reference page.
        **limits: pydantic's constraints (ge, le, multiple_of).
    """
    extra = {"section": section, "allowed": allowed}
    return Field(default, description=description, json_schema_extra=extra, **limits)
