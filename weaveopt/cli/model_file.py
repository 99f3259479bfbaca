"""A model's configuration as its JSON says it, and the plans that transformers has for it: without importing either.

Impossible requests are refused with it within milliseconds. Values that JSON leaves to transformers' defaults are
checked again once transformers has built the configuration.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from weaveopt import presets
from weaveopt.errors import CaptureError, closest
from weaveopt.plain_json import JsonError, text_of

Fields = dict[str, object]
PLANS = ("base_model_tp_plan", "base_model_ep_plan")


@dataclass(frozen=True)
class ModelFile:
    """A configuration by name, as JSON."""

    name: str
    where: str
    """Source of the configuration, for messages: `preset llama-3.3-70b`, or the file."""
    fields: Fields

    @property
    def model_type(self) -> str:
        return str(self.fields["model_type"])

    def sketch(self) -> SimpleNamespace:
        """The text model's sizes and its plans as attributes; what is not known, plans included, is missing."""
        part = self.fields.get("text_config")
        fields = part if isinstance(part, dict) else self.fields
        model_type = str(fields.get("model_type", ""))
        sizes = {name: value for name, value in fields.items() if type(value) is int}
        return SimpleNamespace(**{**sizes, "model_type": model_type, **_plans(model_type)})


def find(model: str) -> ModelFile | None:
    """The file of a preset, a `config.json` or a directory that holds one; None for a hub id.

    Raises `CaptureError` for what is none of these, cannot be read, or is no transformers configuration.
    """
    if model in presets.names():
        return _parsed(model, f"preset {model}", presets.text(model))
    path = Path(model)
    # `os.path` says no, where `Path` raises, to names that are too long and places that one may not look at.
    if os.path.exists(path) or model.endswith(".json") or model.startswith((".", os.sep, "~")):
        file = path / "config.json" if os.path.isdir(path) else path
        try:
            text = text_of(file)
        except JsonError as error:
            raise CaptureError(f"{file} {error}; give a config.json or a directory that holds one") from None
        return _parsed(path.parent.name if path.name == "config.json" else path.stem, str(file), text)
    if "/" not in model:
        hint = closest(model, presets.names())
        raise CaptureError(f"{model!r} is no preset, file or directory: {hint} (a hub id has the form owner/name)")
    return None


def _parsed(name: str, where: str, text: str) -> ModelFile:
    try:
        data = json.loads(text, object_hook=_decoded)
    except json.JSONDecodeError as error:
        raise CaptureError(f"{where}: not JSON: {error.msg} at line {error.lineno} column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise CaptureError(f"{where}: not JSON that can be read: {first_line(error)}") from error
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        raise CaptureError(f"{where}: no 'model_type'; expected the config.json of a transformers model")
    return ModelFile(name, where, data)


def _decoded(fields: Fields) -> object:
    """The number that transformers writes as an object, as JSON has no infinite ones."""
    value = fields.get("__float__")
    return float(value) if len(fields) == 1 and isinstance(value, str) else fields


def _plans(model_type: str) -> Fields:
    """The sharding plans of a model type, from the source of its configuration class; nothing where they are unknown.

    A class without its own plan may inherit one, or be made of several models' configurations: nothing is known.
    """
    package = importlib.util.find_spec("transformers")
    if package is None or package.origin is None or not model_type.isidentifier():
        return {}
    folder = model_type.removesuffix("_text")
    file = Path(package.origin).parent / "models" / folder / f"configuration_{folder}.py"
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            values = _literals(node)
            if values.get("model_type") == model_type and not values.keys().isdisjoint(PLANS):
                return {name: values.get(name) for name in PLANS}
    return {}


def _literals(node: ast.ClassDef) -> Fields:
    """Names that the body of a class gives to literals."""
    found: Fields = {}
    for line in node.body:
        if isinstance(line, ast.Assign | ast.AnnAssign) and line.value is not None:
            target = line.target if isinstance(line, ast.AnnAssign) else line.targets[0]
            if isinstance(target, ast.Name):
                try:
                    found[target.id] = ast.literal_eval(line.value)
                except ValueError:
                    continue
    return found


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:240]}" if lines else type(error).__name__
