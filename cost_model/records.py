"""Records to plain JSON values and back, by their fields' types alone. Nothing in a document is executed.

A tuple of records becomes a list, or an object where the field's metadata names the record's own key (`KEYED`);
a tuple of (name, value) pairs becomes an object; an enum its value. Fields that hold their default are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import TypeVar, cast, get_args, get_origin, get_type_hints

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
R = TypeVar("R")
KEYED = "keyed by"
NAMED = "named"
"""Metadata of a field: which field of its records is their key in the document; its own name there."""


@cache
def _hints(cls: type) -> dict[str, object]:
    return get_type_hints(cls)


def _name(field: Field[object]) -> str:
    return str(field.metadata.get(NAMED, field.name))


def to_document(record: object) -> dict[str, Json]:
    """The fields of a dataclass as JSON values: the plain ones first, then lists and records."""
    assert is_dataclass(record)
    document: dict[str, Json] = {}
    for field in sorted(fields(record), key=lambda field: _is_nested(getattr(record, field.name))):
        value = getattr(record, field.name)
        if field.default is MISSING or value != field.default:
            document[_name(field)] = _value(value, field.metadata.get(KEYED))
    return document


def _is_nested(value: object) -> bool:
    return isinstance(value, tuple) or is_dataclass(value)


def _value(value: object, key: str | None = None) -> Json:
    if isinstance(value, Enum):
        return cast(str, value.value)
    if is_dataclass(value):
        return to_document(value)
    if isinstance(value, tuple):
        if key is not None:
            return {str(_value(getattr(each, key))): _without(to_document(each), key) for each in value}
        if value and all(isinstance(each, tuple) for each in value):
            return {str(name): _value(inner) for name, inner in value}
        return [_value(each) for each in value]
    return cast(Json, value)


def _without(document: dict[str, Json], key: str) -> dict[str, Json]:
    return {name: value for name, value in document.items() if name != key}


def walk(record: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Every record within `record`, and itself, with its path in the document."""
    assert is_dataclass(record)
    yield path, record
    for field in fields(record):
        key, where = field.metadata.get(KEYED), f"{path}.{_name(field)}".removeprefix(".")
        value = getattr(record, field.name)
        if is_dataclass(value):
            yield from walk(value, where)
        elif isinstance(value, tuple):
            for index, each in enumerate(value):
                if is_dataclass(each):
                    yield from walk(each, f"{where}.{_value(getattr(each, key))}" if key else f"{where}[{index}]")


def from_document(cls: type[R], document: Mapping[str, object]) -> R:
    """The record that `to_document` made the document of; it must have been checked. Keys of objects are sorted."""
    hints = _hints(cast(type, cls))
    values: dict[str, object] = {}
    for field in fields(cls):  # type: ignore[arg-type]
        if _name(field) in document:
            values[field.name] = _read(hints[field.name], document[_name(field)], field.metadata.get(KEYED))
    return cls(**values)


def _read(kind: object, value: object, key: str | None = None) -> object:
    if get_origin(kind) is UnionType or type(None) in get_args(kind):
        kind = next(each for each in get_args(kind) if each is not NoneType)
    if get_origin(kind) is tuple:
        inner = get_args(kind)[0]
        if isinstance(value, Mapping):
            if key is not None:
                return tuple(_read(inner, {**each, key: name}) for name, each in sorted(value.items()))
            pair = get_args(inner)
            return tuple((name, _read(pair[1], each)) for name, each in sorted(value.items()))
        return tuple(_read(inner, each) for each in cast(list[object], value))
    if isinstance(kind, type) and is_dataclass(kind):
        return from_document(kind, cast(Mapping[str, object], value))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    return float(cast(float, value)) if kind is float else value
