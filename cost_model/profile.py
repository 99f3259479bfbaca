"""Profiles: JSON files with a machine's constants, checked and turned into records. Nothing is executed."""

from __future__ import annotations

import json
import os
import re
import textwrap
from dataclasses import replace
from functools import cache
from pathlib import Path

from weaveopt.cost_model.consistency import check
from weaveopt.cost_model.machine import FORMS, FabricCosts, Machine
from weaveopt.cost_model.records import from_document, to_document
from weaveopt.cost_model.validate import checked
from weaveopt.errors import ProfileError, closest
from weaveopt.records.candidate import Algorithm, Fabric, Form

_PROFILES = Path(__file__).parent / "profiles"
SCHEMA = 1


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
    path = Path(text).expanduser()
    if path.suffix != ".json" and os.sep not in text and not path.is_file():
        raise ProfileError(f"machine {text!r}: neither a shipped profile nor a JSON file; {closest(text, names())}")
    return _machine(path, shipped=False)


@cache
def _shipped(name: str) -> Machine:
    return _machine(_PROFILES / f"{name}.json", shipped=True)


def dumps(machine: Machine) -> str:
    """The profile of `machine` as JSON text: `load` gives the same machine back."""
    text = json.dumps({"schema": SCHEMA, **to_document(machine)}, indent=2)
    # Innermost objects (points, tiles, links, origins) go on one line each, and lists of numbers on few.
    text = re.sub(r"\{[^{}\[\]]*\}", lambda leaf: " ".join(leaf.group().split()), text)
    return re.sub(r"\[[^{}\[\]]*\]", lambda leaf: _filled(leaf.group()), text) + "\n"


def _filled(numbers: str) -> str:
    text = " ".join(numbers[1:-1].split())
    lines = textwrap.wrap(text, 110)
    return f"[{text}]" if len(lines) < 2 else "[\n" + "\n".join(lines) + "\n]"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ProfileError(f"profile {path}: cannot be read: not UTF-8 text") from None
    except OSError as error:
        raise ProfileError(f"profile {path}: cannot be read: {error.strerror}") from None


def _machine(path: Path, shipped: bool) -> Machine:
    machine = from_document(Machine, checked(str(path), _read(path), shipped))
    check(str(path), machine)
    return replace(machine, fabric_costs=tuple(map(_with_forms, machine.fabric_costs)))


def _with_forms(costs: FabricCosts) -> FabricCosts:
    """Fused curves that do not tell their form: profiles were written before there were several."""
    fused = tuple(
        replace(curve, form=_default_form(costs.fabric, curve.algorithm)) if curve.form is Form.SEGMENT else curve
        for curve in costs.all_reduce_norm
    )
    return replace(costs, all_reduce_norm=fused)


def _default_form(fabric: Fabric, algorithm: Algorithm) -> Form:
    if fabric is Fabric.PEER:
        return Form.MAIL if algorithm is Algorithm.ONE_SHOT else Form.BULK
    return next(iter(FORMS[fabric]), Form.SEGMENT)
