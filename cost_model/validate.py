"""The text of a profile: JSON with finite numbers that keeps to the schema. `consistency` checks the rest."""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, cast

from weaveopt.errors import ProfileError
from weaveopt.plain_json import JsonError, read, shown

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import ValidationError

SCHEMA = 2
_FILE = Path(__file__).parent / "profile.schema.json"
_OLD = f"{SCHEMA}: schema 1 is no longer read, `weaveopt calibrate` measures the machine anew"
_NEEDED = "only shipped profiles can be read without the package {0}: pip install {0}"


@cache
def _validator() -> Draft202012Validator:
    from jsonschema import Draft202012Validator

    return Draft202012Validator(json.loads(_FILE.read_text(encoding="utf-8")))


def refuse(file: str, field: str, found: object, expected: str) -> NoReturn:
    """One line that names file, field, what was found and what is expected."""
    raise _misfit(file, field, found, expected)


def _misfit(file: str, field: str, found: object, expected: str) -> ProfileError:
    words = found if isinstance(found, str) and found.startswith("nothing") else shown(found)
    return ProfileError(f"profile {file}: field {field or '(whole file)'}: found {words}, expected {expected}")


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
        case "maxLength":
            return f"at most {limit} characters"
        case "pattern":
            return "no control characters"
        case "uniqueItems":
            return "every entry once"
        case "oneOf":
            return "either tiles with units, or rates"
    return str(error.message)


def _check_schema(file: str, document: object) -> None:
    try:
        from jsonschema.exceptions import best_match
    except ImportError:
        raise ProfileError(f"profile {file}: {_NEEDED.format('jsonschema')}") from None
    if isinstance(document, dict) and document.get("schema") == 1:
        refuse(file, "schema", 1, _OLD)
    error = best_match(_validator().iter_errors(document))
    if error is None:
        return
    field = error.json_path.removeprefix("$").removeprefix(".")
    if error.validator == "required" and isinstance(error.instance, dict):
        missing = next(name for name in cast(list[str], error.validator_value) if name not in error.instance)
        inner = cast(dict[str, dict[str, object]], cast(dict[str, object], error.schema).get("properties", {}))
        reference = str(inner.get(missing, {}).get("$ref", ""))
        expected = "a number > 0" if reference.endswith("positive") else "this field"
        refuse(file, f"{field}.{missing}".removeprefix("."), "nothing", expected)
    if error.validator == "additionalProperties" and isinstance(error.instance, dict):
        known = list(cast(dict[str, object], cast(dict[str, object], error.schema)["properties"]))
        unknown = next(name for name in error.instance if name not in known)
        expected = f"one of the fields {', '.join(known)}"
        refuse(file, f"{field}.{unknown}".removeprefix("."), error.instance[unknown], expected)
    refuse(file, field, error.instance, _expected(error))


def checked(file: str, text: str, shipped: bool = False) -> dict[str, object]:
    """The document in `text`, or a one-line `ProfileError` that names `file`, field, found and expected.

    A shipped file keeps to the schema (the tests see to it), so that it can be read without msgspec
    and jsonschema.
    """
    if shipped:
        return cast(dict[str, object], json.loads(text))
    try:
        document = read(text, partial(_misfit, file))
    except JsonError as error:
        raise ProfileError(f"profile {file}: {error}") from None
    except ImportError:
        raise ProfileError(f"profile {file}: {_NEEDED.format('msgspec')}") from None
    try:
        _check_schema(file, document)
    except RecursionError:
        raise ProfileError(f"profile {file}: not a profile: nested too deeply") from None
    return cast(dict[str, object], document)
