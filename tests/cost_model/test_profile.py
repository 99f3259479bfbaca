"""Profiles: what is shipped loads, what is broken is refused in one line that names the field."""

from __future__ import annotations

import ast
import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from weaveopt import cost_model
from weaveopt.decision import Algorithm, Fabric, Workload
from weaveopt.errors import ProfileError

FOLDER = Path(cost_model.__file__).parent
SHIPPED = (
    "a100x4-slingshot",
    "a800x4",
    "b200x8",
    "cpu",
    "gb200-nvl72",
    "gh200-infiniband",
    "h100x8",
    "h200x4",
    "h200x8",
)
Broken = Callable[[dict], None]


def _document() -> dict:
    return json.loads((FOLDER / "profiles" / "h200x4.json").read_text())


def _refusal(tmp_path: Path, text: str) -> str:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ProfileError) as caught:
        cost_model.load(str(path))
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"profile {path}: ")
    return message.removeprefix(f"profile {path}: ")


def test_shipped_names() -> None:
    assert cost_model.names() == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_profile_is_named_by_its_file(name: str) -> None:
    assert cost_model.load(name).name == name


@pytest.mark.parametrize("name", SHIPPED)
def test_round_trip(name: str, tmp_path: Path) -> None:
    machine = cost_model.load(name)
    path = tmp_path / "again.json"
    path.write_text(cost_model.dumps(machine))
    again = cost_model.load(str(path))
    assert again == machine
    for tokens in (1, 77, 4096):
        work = Workload(tokens, tokens, 8192, "bfloat16", 2)
        assert cost_model.estimate_unfused(again, work) == cost_model.estimate_unfused(machine, work)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_origin_is_used_and_summarized(name: str) -> None:
    machine = cost_model.load(name)
    shown = {text for _, text in machine.summary().origins}
    assert shown == {str(origin) for _, origin in machine.origins}


def test_measured_only_if_all_of_it_is(tmp_path: Path) -> None:
    """One block from a datasheet is enough to say so."""
    document = _document()
    kinds = {origin["kind"] for origin in document["origins"].values()}
    assert kinds == {"measured", "datasheet"}
    machine = cost_model.load("h200x4")
    assert not machine.summary().measured
    assert not machine.summary(hosts=1).measured
    assert machine.summary(dtypes=("bfloat16",), hosts=1).measured
    for origin in document["origins"].values():
        origin["kind"] = "measured"
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(document))
    assert cost_model.load(str(path)).summary().measured


def _set(path: str, value: object) -> Broken:
    """Sets `a.b[0].c`; `...` as the value takes the field away."""

    def breaks(document: dict) -> None:
        *steps, last = path.replace("[", ".").replace("]", "").split(".")
        inside = document
        for step in steps:
            inside = inside[int(step)] if isinstance(inside, list) else inside[step]
        if value is ...:
            del inside[last]
        else:
            inside[last] = value

    return breaks


CURVE = "fabrics.library.all_reduce[0].points[2]"
CASES = [
    (f"{CURVE}.us", -3, f"field {CURVE}.us: found -3, expected a number > 0"),
    (f"{CURVE}.us", 0, f"field {CURVE}.us: found 0, expected a number > 0"),
    (f"{CURVE}.us", "3", f'field {CURVE}.us: found "3", expected a number > 0'),
    (f"{CURVE}.us", None, f"field {CURVE}.us: found null, expected a number > 0"),
    (f"{CURVE}.us", True, f"field {CURVE}.us: found true, expected a number > 0"),
    (f"{CURVE}.us", ..., f"field {CURVE}.us: found nothing, expected a number > 0"),
    (f"{CURVE}.bytes", 16384, f"field {CURVE}.bytes: found 16384, expected more than the point before (131072)"),
    (f"{CURVE}.us", 14.0, f"field {CURVE}.us: found 14.0, expected no less than the smaller size before it (14.4)"),
    ("memory.bytes_per_s", ..., "field memory.bytes_per_s: found nothing, expected a number > 0"),
    ("memory.floor_us", float("nan"), "field memory.floor_us: found NaN, expected a finite number"),
    ("memory.floor_us", float("inf"), "field memory.floor_us: found Infinity, expected a finite number"),
    ("ranks_per_host", 0, "field ranks_per_host: found 0, expected a number >= 1"),
    ("ranks_per_host", 2.5, "field ranks_per_host: found 2.5, expected an integer"),
    ("relative_error", 1.0, "field relative_error: found 1.0, expected a number < 1"),
    ("device", "tpu", 'field device: found "tpu", expected one of cpu, cuda'),
    ("schema", 2, "field schema: found 2, expected 1"),
    ("products.bfloat16.tiles", ..., "expected either tiles with units, or rates"),
    ("products.float32", ..., "field products.float32: found nothing, expected this field"),
    ("products.bfloat16.origin", "nowhere", 'bfloat16.origin: found "nowhere", expected one of the origins'),
    ("fabrics.library", ..., "field fabrics.library: found nothing, expected this field"),
    ("fabrics.library.all_reduce[0].points", [], "found [], expected at least one entry"),
    ("fabrics.ethernet", {}, "field fabrics.ethernet: found {}, expected one of the fields library"),
    ("colour", "red", 'field colour: found "red", expected one of the fields schema'),
    ("origins.nccl.kind", "guess", 'field origins.nccl.kind: found "guess", expected one of measured, datasheet'),
]


@pytest.mark.parametrize(("path", "value", "expected"), CASES, ids=[f"{case[0]}={case[1]}" for case in CASES])
def test_refused(path: str, value: object, expected: str, tmp_path: Path) -> None:
    document = copy.deepcopy(_document())
    _set(path, value)(document)
    assert expected in _refusal(tmp_path, json.dumps(document))


def test_not_json(tmp_path: Path) -> None:
    assert _refusal(tmp_path, '{"schema": 1,').startswith("line 1, column 14: not JSON: ")


def test_not_an_object(tmp_path: Path) -> None:
    assert _refusal(tmp_path, "[1, 2]") == "field (whole file): found [1, 2], expected an object"


def test_falling_rates_rows(tmp_path: Path) -> None:
    document = json.loads((FOLDER / "profiles" / "cpu.json").read_text())
    document["products"]["float32"]["rates"][1]["m"] = 1
    expected = "field products.float32.rates[1].m: found 1, expected more than the row before (1)"
    assert _refusal(tmp_path, json.dumps(document)) == expected


def test_unreadable(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="cannot be read: No such file"):
        cost_model.load(str(tmp_path / "missing.json"))
    with pytest.raises(ProfileError, match="cannot be read: Is a directory"):
        cost_model.load(f"{tmp_path}/")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProfileError, match="not UTF-8"):
        cost_model.load(str(tmp_path / "binary.json"))


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ProfileError, match="did you mean 'h100x8'"):
        cost_model.load("h100-x8")


def test_absent_fabric_is_named() -> None:
    with pytest.raises(ProfileError, match="'h200x4' has no fabric 'multimem'; it has: library, peer"):
        cost_model.all_reduce_us(cost_model.load("h200x4"), Fabric.MULTIMEM, Algorithm.TWO_SHOT, 1024, 4)


def test_imports_nothing_but_records_and_errors() -> None:
    """No torch and no device: a profile can be read, and a decision be made, anywhere."""
    allowed = {"weaveopt.cost_model", "weaveopt.decision", "weaveopt.errors"}
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert not name.startswith(("torch", "numpy")), f"{path.name} imports {name}"
                if name.startswith("weaveopt"):
                    assert any(name == each or name.startswith(f"{each}.") for each in allowed), f"{path.name}: {name}"
