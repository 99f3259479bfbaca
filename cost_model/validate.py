"""Checks of a profile: the JSON Schema, and what a schema cannot say (order, known origins, finite numbers)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, cast

from weaveopt.cost_model.document import CurveDocument, PointDocument, ProfileDocument
from weaveopt.errors import ProfileError

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import ValidationError

_SCHEMA = Path(__file__).parent / "profile.schema.json"
_LONGEST_SHOWN = 60


@cache
def _validator() -> Draft202012Validator:
    from jsonschema import Draft202012Validator

    return Draft202012Validator(json.loads(_SCHEMA.read_text(encoding="utf-8")))


def _refuse(file: str, field: str, found: object, expected: str) -> NoReturn:
    """One line that names file, field, what was found and what is expected."""
    shown = found if isinstance(found, str) and found.startswith("nothing") else json.dumps(found, default=str)
    if len(str(shown)) > _LONGEST_SHOWN:
        shown = f"{str(shown)[:_LONGEST_SHOWN]}..."
    raise ProfileError(f"profile {file}: field {field or '(whole file)'}: found {shown}, expected {expected}")


def _kind(name: str) -> str:
    article = "an" if name[0] in "aeio" else "a"
    return f"{article} {name}"


def _expected(error: ValidationError) -> str:
    """The broken rule in words."""
    limit, schema = error.validator_value, error.schema
    match error.validator:
        case "type":
            positive = isinstance(schema, dict) and schema.get("exclusiveMinimum") == 0
            return f"{_kind(str(limit))}{' > 0' if positive else ''}"
        case "exclusiveMinimum":
            return f"a number > {limit}"
        case "minimum":
            return f"a number >= {limit}"
        case "maximum":
            return f"a number <= {limit}"
        case "exclusiveMaximum":
            return f"a number < {limit}"
        case "enum":
            return f"one of {', '.join(map(str, cast(list[object], limit)))}"
        case "const":
            return str(limit)
        case "minItems" | "minProperties" | "minLength":
            return "at least one entry"
        case "uniqueItems":
            return "every entry once"
        case "oneOf":
            return "either tiles with units, or rates"
    return str(error.message)


def _check_schema(file: str, document: object) -> None:
    try:
        from jsonschema.exceptions import best_match
    except ImportError:
        needed = "only shipped profiles can be read without the package jsonschema: pip install jsonschema"
        raise ProfileError(f"profile {file}: {needed}") from None
    error = best_match(_validator().iter_errors(document))
    if error is None:
        return
    field = error.json_path.removeprefix("$").removeprefix(".")
    if error.validator == "required" and isinstance(error.instance, dict):
        missing = next(name for name in cast(list[str], error.validator_value) if name not in error.instance)
        inner = cast(dict[str, dict[str, object]], cast(dict[str, object], error.schema).get("properties", {}))
        reference = str(inner.get(missing, {}).get("$ref", ""))
        expected = "a number > 0" if reference.endswith("positive") else "this field"
        _refuse(file, f"{field}.{missing}".removeprefix("."), "nothing", expected)
    if error.validator == "additionalProperties" and isinstance(error.instance, dict):
        known = list(cast(dict[str, object], cast(dict[str, object], error.schema)["properties"]))
        unknown = next(name for name in error.instance if name not in known)
        expected = f"one of the fields {', '.join(known)}"
        _refuse(file, f"{field}.{unknown}".removeprefix("."), error.instance[unknown], expected)
    _refuse(file, field, error.instance, _expected(error))


def _curves_of(document: ProfileDocument) -> Iterator[tuple[str, CurveDocument]]:
    for name, fabric in document["fabrics"].items():
        lists: dict[str, Sequence[CurveDocument]] = {
            "all_reduce": fabric.get("all_reduce", []),
            "all_reduce_norm": fabric.get("all_reduce_norm", []),
            "all_gather": fabric.get("all_gather", []),
            "reduce_scatter": fabric.get("reduce_scatter", []),
            "all_to_all": fabric.get("all_to_all", []),
        }
        for kind, curves in lists.items():
            for index, curve in enumerate(curves):
                yield f"fabrics.{name}.{kind}[{index}]", curve


def _points_of(document: ProfileDocument) -> Iterator[tuple[str, list[PointDocument]]]:
    yield "memory.points", document["memory"].get("points", [])
    for index, norm in enumerate(document["memory"].get("norms", [])):
        yield f"memory.norms[{index}].points", norm["points"]
    for where, curve in _curves_of(document):
        yield f"{where}.points", curve["points"]


def _origins_of(document: ProfileDocument) -> Iterator[tuple[str, str]]:
    yield "memory.origin", document["memory"]["origin"]
    yield "inter_host.origin", document["inter_host"]["origin"]
    for dtype, products in document["products"].items():
        yield f"products.{dtype}.origin", products["origin"]
    for name, fabric in document["fabrics"].items():
        yield f"fabrics.{name}.link.origin", fabric["link"]["origin"]
    for where, curve in _curves_of(document):
        yield f"{where}.origin", curve["origin"]
    for block in ("attention", "contention", "copy_engine", "launch", "wiring"):
        if block in document:
            yield f"{block}.origin", document[block]["origin"]


def _check_points(file: str, document: ProfileDocument) -> None:
    for where, points in _points_of(document):
        for index in range(1, len(points)):
            before, point = points[index - 1], points[index]
            field = f"{where}[{index}]"
            if point["bytes"] <= before["bytes"]:
                _refuse(file, f"{field}.bytes", point["bytes"], f"more than the point before ({before['bytes']})")
            if point["us"] < before["us"]:
                _refuse(file, f"{field}.us", point["us"], f"no less than the smaller size before it ({before['us']})")


def _check_rates(file: str, document: ProfileDocument) -> None:
    for dtype, products in document["products"].items():
        rates = products.get("rates", [])
        for index in range(1, len(rates)):
            if rates[index]["m"] <= rates[index - 1]["m"]:
                expected = f"more than the row before ({rates[index - 1]['m']})"
                _refuse(file, f"products.{dtype}.rates[{index}].m", rates[index]["m"], expected)


def _check_samples(file: str, document: ProfileDocument) -> None:
    """The axes grow, and there is one time for each corner of the grid."""
    for dtype, products in document["products"].items():
        samples = products.get("samples")
        if samples is None:
            continue
        field, expected = f"products.{dtype}.samples", 1
        for name, axis in (("m", samples["m"]), ("n", samples["n"]), ("k", samples["k"])):
            expected *= len(axis)
            for index in range(1, len(axis)):
                if axis[index] <= axis[index - 1]:
                    _refuse(file, f"{field}.{name}[{index}]", axis[index], f"more than {axis[index - 1]} before it")
        if len(samples["us"]) != expected:
            _refuse(file, f"{field}.us", len(samples["us"]), f"{expected} times, one for each m, n and k")


def _check_finite(file: str, value: object, field: str = "") -> None:
    """A number too large for a float reads as infinity: refused like the words NaN and Infinity."""
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_finite(file, inner, f"{field}.{key}".removeprefix("."))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _check_finite(file, inner, f"{field}[{index}]")
    elif isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        _refuse(file, field, value, "a finite number")


def _check_fused(file: str, document: ProfileDocument) -> None:
    """Every fused curve is of a form that its algorithm has, and tells something that no other curve tells."""
    for name, fabric in document["fabrics"].items():
        seen: dict[tuple[object, ...], int] = {}
        for index, curve in enumerate(fabric.get("all_reduce_norm", [])):
            where = f"fabrics.{name}.all_reduce_norm[{index}]"
            if curve.get("form") == "bulk" and curve["algorithm"] != "two_shot":
                _refuse(file, f"{where}.algorithm", curve["algorithm"], "two_shot: bulk copies have no other")
            key = tuple(curve.get(part) for part in ("algorithm", "form", "ctas", "world", "hidden"))
            if key in seen:
                _refuse(file, where, " ".join(map(str, key)), f"another kernel than in row {seen[key]}")
            seen[key] = index


def checked(file: str, text: str, shipped: bool = False) -> ProfileDocument:
    """The profile in `text`, or a one-line `ProfileError` that names `file`, field, found and expected.

    A shipped file keeps to the schema (the tests see to it), so that it can be read without jsonschema.
    """
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ProfileError(f"profile {file}: {where}: not JSON: {error.msg}") from None
    except RecursionError:
        raise ProfileError(f"profile {file}: not a profile: nested too deeply") from None
    _check_finite(file, document)
    if not shipped:
        _check_schema(file, document)
    profile = cast(ProfileDocument, document)
    for field, origin in _origins_of(profile):
        if origin not in profile["origins"]:
            _refuse(file, field, origin, f"one of the origins {', '.join(profile['origins'])}")
    _check_points(file, profile)
    _check_rates(file, profile)
    _check_samples(file, profile)
    _check_fused(file, profile)
    return profile
