"""Constants of a call as text: an operator's schema has no records, so they are one string among its arguments.

`decode(kind, encode(call)) == call` for frozen dataclasses of text, numbers, booleans, enums, tuples of any length,
fields that may be None, and such dataclasses again. The text of equal calls is equal.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar, cast, get_args, get_origin, get_type_hints

from weaveopt.errors import WeaveError

if TYPE_CHECKING:
    from dataclasses import Field


class Constants(Protocol):
    """Any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[object]]]


C = TypeVar("C", bound=Constants)
_SHOWN = 2000


def encode(call: Constants) -> str:
    """Text of a call, in one line."""
    return json.dumps(_plain(call), separators=(",", ":"), sort_keys=True)


def decode(kind: type[C], text: str, operation: str) -> C:
    """The call of `kind` that `encode` made `text` from. Raises `WeaveError`, naming the operation, if it is none."""
    try:
        return cast(C, _record(json.loads(text), kind))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise WeaveError(f"not an encoded {operation} call: {text[:_SHOWN]!r}: {error}") from None


def _plain(value: object) -> object:
    if is_dataclass(value):
        return {name: _plain(inner) for name, inner in vars(value).items()}
    if isinstance(value, tuple):
        return [_plain(inner) for inner in value]
    return value.value if isinstance(value, Enum) else value


@cache
def _types(kind: type) -> dict[str, object]:
    hints = get_type_hints(kind)
    return {each.name: hints[each.name] for each in fields(kind)}


def _record(value: object, kind: type) -> object:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    types = _types(kind)
    if unknown := sorted(value.keys() - types.keys()):
        raise TypeError(f"{kind.__name__} has no field {unknown[0]!r}")
    return kind(**{name: _value(inner, types[name], name) for name, inner in value.items()})


def _value(value: object, kind: object, name: str) -> object:
    """`value` as the type of the field `name`. Raises `TypeError` or `ValueError` if it is of another one."""
    if isinstance(kind, UnionType):
        [inner] = [each for each in get_args(kind) if each is not NoneType]
        return None if value is None else _value(value, inner, name)
    if get_origin(kind) is tuple:
        return _tuple(value, get_args(kind), name)
    assert isinstance(kind, type), f"{name}: {kind} has no text"
    if is_dataclass(kind):
        return _record(value, kind)
    if issubclass(kind, Enum):
        return kind(value)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise TypeError(f"{name} is {value!r}, expected {kind.__name__}")
    return value


def _tuple(value: object, kinds: Sequence[object], name: str) -> tuple[object, ...]:
    if not isinstance(value, list):
        raise TypeError(f"{name} is {value!r}, expected a list")
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        kinds = [kinds[0]] * len(value)
    if len(value) != len(kinds):
        raise TypeError(f"{name} is {value!r}, expected {len(kinds)} values")
    return tuple(_value(inner, kind, name) for inner, kind in zip(value, kinds, strict=True))
