"""Typed reading of JSON: every access names the path, what was found and what is expected."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass

from weaveopt.errors import WeaveError
from weaveopt.records.candidate import Scalar, Values

Json = dict[str, "Json"] | list["Json"] | str | int | float | bool | None


@dataclass(frozen=True)
class Reader:
    """One JSON value and where it stands in the document."""

    value: object
    path: str = "$"

    @classmethod
    def of(cls, text: str) -> Reader:
        try:
            return cls(json.loads(text))
        except json.JSONDecodeError as error:
            raise WeaveError(f"not JSON: {error.msg} at line {error.lineno} column {error.colno}") from error
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
            raise WeaveError(f"not JSON that can be read: {str(error).splitlines()[0]}") from error

    def __getitem__(self, key: str) -> Reader:
        if not isinstance(self.value, dict):
            raise self._wrong("an object")
        if key not in self.value:
            raise WeaveError(f"{self.path}: no field {key!r}")
        return Reader(self.value[key], f"{self.path}.{key}")

    def optional(self, key: str) -> Reader:
        """The field, or null where it is not there: reports are older than some fields."""
        if not isinstance(self.value, dict):
            raise self._wrong("an object")
        return Reader(self.value.get(key), f"{self.path}.{key}")

    def optional_list(self, key: str) -> Iterator[Reader]:
        """The items of the field, or none where it is not there."""
        found = self.optional(key)
        return iter(()) if found.missing else iter(found)

    def __iter__(self) -> Iterator[Reader]:
        if not isinstance(self.value, list):
            raise self._wrong("a list")
        return iter([Reader(item, f"{self.path}[{i}]") for i, item in enumerate(self.value)])

    @property
    def missing(self) -> bool:
        return self.value is None

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self._wrong("text")
        return self.value

    def texts(self) -> tuple[str, ...]:
        return tuple(item.text() for item in self)

    def flag(self) -> bool:
        if not isinstance(self.value, bool):
            raise self._wrong("true or false")
        return self.value

    def integer(self) -> int:
        if isinstance(self.value, bool) or not isinstance(self.value, int):
            raise self._wrong("an integer")
        if abs(self.value) >= 1 << 63:
            raise self._wrong("an integer of 64 bits")
        return self.value

    def number(self) -> float:
        if isinstance(self.value, bool) or not isinstance(self.value, int | float):
            raise self._wrong("a number")
        if isinstance(self.value, int):
            return self.integer()
        if not math.isfinite(self.value):
            raise self._wrong("a finite number")
        return self.value

    def values(self) -> Values:
        """An object of plain values, in its order."""
        if not isinstance(self.value, dict):
            raise self._wrong("an object")
        return tuple((key, Reader(value, f"{self.path}.{key}")._scalar()) for key, value in self.value.items())

    def _scalar(self) -> Scalar:
        if not isinstance(self.value, bool | int | float | str):
            raise self._wrong("a plain value")
        return self.value

    def _wrong(self, expected: str) -> WeaveError:
        return WeaveError(f"{self.path}: found {json.dumps(self.value)[:80]}, expected {expected}")
