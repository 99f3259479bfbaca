"""Profiles: JSON files with a machine's constants, checked and turned into records. Nothing is executed."""

from __future__ import annotations

import json
import os
import re
import textwrap
from functools import cache, lru_cache
from pathlib import Path

from weaveopt.cost_model.consistency import check
from weaveopt.cost_model.machine import Machine
from weaveopt.cost_model.records import from_document, to_document
from weaveopt.cost_model.validate import SCHEMA, checked
from weaveopt.errors import ProfileError, closest
from weaveopt.plain_json import JsonError, text_of

_PROFILES = Path(__file__).parent / "profiles"
_LINE = 110
"""Columns of a line of numbers or points."""


@cache
def names() -> tuple[str, ...]:
    """The shipped profiles, sorted."""
    return tuple(sorted(path.stem for path in _PROFILES.glob("*.json")))


def load(name_or_path: str) -> Machine:
    """The machine of a shipped profile's name, or of a JSON file.

    Raises `ProfileError`, one line: file, field, what was found and what is expected.
    """
    text = os.fspath(name_or_path)
    if text in names():
        return _shipped(text)
    path = Path(os.path.expanduser(text))  # which keeps a `~` without such a user, and `isfile` raises nothing
    if path.suffix != ".json" and os.sep not in text and not os.path.isfile(path):
        raise ProfileError(f"machine {text!r}: neither a shipped profile nor a JSON file; {closest(text, names())}")
    return _machine(path, shipped=False)


@cache
def _shipped(name: str) -> Machine:
    return _machine(_PROFILES / f"{name}.json", shipped=True)


def dumps(machine: Machine) -> str:
    """The profile of `machine` as JSON text, of today's schema: `load` gives the same machine back."""
    text = json.dumps({"schema": SCHEMA, **to_document(machine)}, indent=2)
    # Innermost objects (points, tiles, links, origins) go on one line each, and lists of numbers or points on few.
    text = re.sub(r"\{[^{}\[\]]*\}", lambda leaf: " ".join(leaf.group().split()), text)
    text = re.sub(r"\[(\s*)(\{[^{}\[\]]*\},?\s*)+\]", _filled_objects, text)
    return re.sub(r"\[[^{}\[\]]*\]", lambda leaf: _filled_numbers(leaf.group()), text) + "\n"


def _filled_objects(found: re.Match[str]) -> str:
    """As many objects on a line as fit."""
    indent = found[1].removeprefix("\n")
    lines = [indent]
    for each in re.findall(r"\{[^{}]*\},?", found[0]):
        if lines[-1] != indent and len(lines[-1]) + 1 + len(each) > _LINE:
            lines.append(indent)
        lines[-1] += each if lines[-1] == indent else f" {each}"
    return "[\n" + "\n".join(lines) + f"\n{indent[:-2]}]"


def _filled_numbers(numbers: str) -> str:
    text = " ".join(numbers[1:-1].split())
    lines = textwrap.wrap(text, _LINE)
    return f"[{text}]" if len(lines) < 2 else "[\n" + "\n".join(lines) + "\n]"


def _read(path: Path) -> str:
    try:
        return text_of(path)
    except JsonError as error:
        raise ProfileError(f"profile {path}: {error}") from None


def _machine(path: Path, shipped: bool) -> Machine:
    return _parsed(path, _read(path), shipped)


@lru_cache(maxsize=8)  # every graph asks for its machine
def _parsed(path: Path, text: str, shipped: bool) -> Machine:
    document = checked(str(path), text, shipped)
    try:
        machine = from_document(Machine, document)
    except ValueError as error:
        raise ProfileError(f"profile {path}: {error}") from None
    check(str(path), machine)
    return machine
