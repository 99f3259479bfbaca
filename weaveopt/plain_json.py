"""JSON files of users: read into plain values, and into records by their fields' types. Errors are one line with the
place.

msgspec reads it: numbers of thousands of digits and thousands of brackets are errors of its own, never Python's.
"""

from __future__ import annotations

import json
import math
import re
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

R = TypeVar("R")
Json = dict[str, "Json"] | list["Json"] | str | int | float | bool | None
MOST_DIGITS = 4300
"""Largest number of digits of an integer that Python converts; msgspec rejects longer ones without their position."""
_LONG = re.compile(rf"(?<![\d.])-?\d{{{MOST_DIGITS + 1},}}")
_SHOWN = 80
_WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_ERROR = re.compile(r"(?P<words>.*?)(?: - at `(?P<path>\$.*)`)?", re.DOTALL)


class JsonError(ValueError):
    """Text that is no JSON, or no JSON of what is expected: one line that names the place."""


def text_of(path: Path) -> str:
    """The text of a file. Raises `JsonError` for what cannot be read, and for a pipe or device, whose text may never
    begin or never end."""
    try:
        mode = path.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # of a directory the system says so
            raise JsonError("cannot be read: not a regular file")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise JsonError("cannot be read: not UTF-8 text") from None
    except OSError as error:
        raise JsonError(f"cannot be read: {error.strerror}") from None


def read(text: str, wrong: Callable[[str, object, str], Exception] | None = None) -> Json:
    """The plain values of the text; integers have at most 64 bits, floats are finite, names are unique in an object.

    `wrong` makes the error for a number that does not fit, of its path (`a.b[0]`), what was found and what is expected.
    Raises `JsonError`, and `ImportError` where msgspec is missing.
    """
    import msgspec

    try:
        value: Json = msgspec.json.Decoder(float_hook=float).decode(text)
        _check(value, "", wrong or _does_not_fit)
        # msgspec keeps the last of two fields with one name, which is a mistake.
        repeated = _repeated(json.loads(text, object_pairs_hook=_Object))
    except RecursionError:
        raise JsonError("not JSON that can be read: nested too deeply") from None
    except msgspec.ValidationError as error:
        raise JsonError(_long_number(text) or f"not JSON that can be read: {error}") from None
    except msgspec.DecodeError as error:
        raise JsonError(_malformed(text, str(error))) from None
    if repeated is not None:
        raise JsonError(f"not JSON that can be read: two fields {repeated.removeprefix('.')!r}")
    return value


def convert(value: Json, kind: type[R]) -> R:
    """The record of this type that the values are. Raises `JsonError` with the path of the first that does not fit."""
    import msgspec

    try:
        return msgspec.convert(value, kind)
    except RecursionError:
        raise JsonError("$: nested too deeply") from None
    except msgspec.ValidationError as error:
        raise JsonError(_misfit(value, str(error))) from None


def shown(value: object) -> str:
    """The value as JSON, as much of it as fits into a line."""
    try:
        text = json.dumps(value, default=str)
    except (ValueError, RecursionError):
        return f"{type(value).__name__} that cannot be shown"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _check(value: object, path: str, wrong: Callable[[str, object, str], Exception]) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            _check(inner, f"{path}.{key}".removeprefix("."), wrong)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _check(inner, f"{path}[{index}]", wrong)
    elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise wrong(path, value, "an integer of 64 bits")
    elif isinstance(value, float) and not math.isfinite(value):
        raise wrong(path, value, "a finite number")


def _does_not_fit(path: str, found: object, expected: str) -> JsonError:
    return JsonError(f"{f'$.{path}' if path else '$'}: found {shown(found)}, expected {expected}")


class _Object:
    """An object of a document: the path below it of the first field that another field of the same name follows."""

    def __init__(self, fields: list[tuple[str, object]]) -> None:
        self.repeated: str | None = None
        counts = Counter(name for name, _ in fields)
        for name, value in fields:
            below = "" if counts[name] > 1 else _repeated(value)
            if below is not None:
                self.repeated = f".{name}{below}"
                return


def _repeated(value: object) -> str | None:
    if isinstance(value, _Object):
        return value.repeated
    places = enumerate(value) if isinstance(value, list) else ()
    return next((f"[{index}]{below}" for index, each in places if (below := _repeated(each)) is not None), None)


def _place(text: str, at: int) -> str:
    before = text[:at]
    return f"line {before.count(chr(10)) + 1}, column {at - before.rfind(chr(10))}"


def _malformed(text: str, message: str) -> str:
    """msgspec counts bytes of UTF-8, and none where the text ends too early."""
    found = re.fullmatch(r"(?:JSON is malformed: )?(.*?)(?: \(byte (\d+)\))?", message, re.DOTALL)
    assert found is not None, message
    at = len(text) if found[2] is None else len(text.encode()[: int(found[2])].decode(errors="ignore"))
    return f"{_place(text, at)}: not JSON: {found[1]}"


def _long_number(text: str) -> str:
    found = _LONG.search(text)
    if found is None:
        return ""
    return f"{_place(text, found.start())}: found a number of {len(found[0])} digits, expected an integer of 64 bits"


def _misfit(value: Json, message: str) -> str:
    """msgspec's message in the words of this package, with what was found at the path."""
    found = _ERROR.fullmatch(message)
    assert found is not None, message
    words, path = found["words"], found["path"] or "$"
    if missing := re.fullmatch(r"Object missing required field `(.*)`", words):
        return f"{path}: no field {missing[1]!r}"
    if typed := re.fullmatch(r"Expected `(.*)`, got `.*`", words):
        return f"{path}: found {_at(value, path)}, expected {_named(typed[1])}"
    return f"{path}: found {_at(value, path)}, expected a value that this version knows"


def _named(kinds: str) -> str:
    return " or ".join(_WORDS.get(kind, kind) for kind in kinds.split(" | "))


def _at(value: Json, path: str) -> str:
    """Show the value at msgspec's path; a `[...]` in the path is a key of a table and is not followed."""
    for name, index in re.findall(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]", path):
        if index == "...":
            return "a wrong value"
        found = value[int(index)] if index and isinstance(value, list) else None
        value = value.get(name) if name and isinstance(value, dict) else found
    return shown(value)
