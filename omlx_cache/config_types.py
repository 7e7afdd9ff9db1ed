"""The types of the fields of `CacheConfig`, and how a field is declared."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError


def _path_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _no_float(value: Any) -> Any:
    if isinstance(value, float):  # a Literal compares by ==, so that 8.0 would pass
        raise PydanticCustomError("no_float", "must not be a float")
    return value


def _a_tiers_bits(value: dict[str, int]) -> dict[str, int]:
    if (value.get("k"), value.get("v")) not in ((8, 8), (8, 4), (4, 4)):
        raise PydanticCustomError("kv_bits", "must be the bits of a tier")
    return value


def _cooling(value: dict[str, int | None]) -> dict[str, int | None]:
    order = [name for name in ("k8v8", "k8v4", "k4v4") if name in value]
    ranges = list(value.values())
    if not ranges or list(value) != order or ranges[-1] is not None or None in ranges[:-1]:
        raise PydanticCustomError("tiers", "must get colder, and end with null")
    return value


Positive = Annotated[int, Field(ge=1)]
Bits = Annotated[Literal[4, 8, 16], BeforeValidator(_no_float)]
KVBits = Annotated[dict[Literal["k", "v"], Bits], AfterValidator(_a_tiers_bits)]
Tiers = Annotated[dict[Literal["k8v8", "k8v4", "k4v4"], Positive | None], AfterValidator(_cooling)]
WeightBits = Annotated[Literal[2, 3, 4, 8, 16, 32], BeforeValidator(_no_float)]
Directory = Annotated[str, BeforeValidator(_path_text), Field(min_length=1)]


def key(section: str, default: Any, allowed: str, description: str, **limits: float) -> Any:
    """Declare a field.

    Args:
        section: the section of the YAML file that it belongs to.
        default: its default.
        allowed: what it accepts, in the words of an error message: "… must be {allowed}".
        description: what it does today, for the reference page.
        **limits: pydantic's constraints (ge, le, gt, lt, multiple_of).
    """
    extra: dict[str, Any] = {"section": section, "allowed": allowed}
    keywords: dict[str, Any] = dict(limits)
    return Field(default, description=description, json_schema_extra=extra, **keywords)


def section_of(field: FieldInfo) -> str:
    """Return the section that a field was declared with."""
    return _declared(field)["section"]


def allowed_by(field: FieldInfo) -> str:
    """Return what a field accepts, in words."""
    return _declared(field)["allowed"]


def _declared(field: FieldInfo) -> dict[str, Any]:
    if not isinstance(field.json_schema_extra, dict):
        raise TypeError(f"a field of CacheConfig must be declared with key(), got {field!r}")
    return field.json_schema_extra
