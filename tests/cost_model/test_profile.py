"""Profiles: what is shipped loads, what is broken is refused in one line that names the field."""

from __future__ import annotations

import ast
import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from weaveopt import cost_model
from weaveopt.cli.main import main
from weaveopt.cost_model.collectives import fabric_costs
from weaveopt.cost_model.kernel_curve import kernel_curve_us
from weaveopt.cost_model.validate import checked
from weaveopt.errors import ProfileError
from weaveopt.records.candidate import Fabric

FOLDER = Path(cost_model.__file__).parent
SHIPPED = (
    "a100x4-slingshot",
    "a800x4",
    "b200x8",
    "cpu",
    "gb200-nvl72",
    "gh200-infiniband",
    "h100x2",
    "h100x2-no-peer",
    "h100x8",
    "h200x2-no-peer",
    "h200x4",
    "h200x8",
    "l40sx4",
    "l40sx8",
    "rtx4090x4",
    "rtx4090x8",
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
    for size in (1, 77 << 10, 4096 << 10):
        times = {cost_model.collective_us(each, "all_reduce", size, 2) for each in (again, machine)}
        assert len(times) == 1


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
    assert not machine.summary().measured, "the link to another host is not"
    assert machine.summary(hosts=1).measured
    for origin in document["origins"].values():
        origin["kind"] = "measured"
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(document))
    assert cost_model.load(str(path)).summary().measured


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_profile_keeps_to_the_schema(name: str) -> None:
    """They are loaded without the schema's check."""
    checked(name, (FOLDER / "profiles" / f"{name}.json").read_text())


@pytest.mark.parametrize("package", ["jsonschema", "msgspec"])
def test_only_shipped_profiles_load_without_what_checks_files(package: str, tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_text(json.dumps(_document()))
    code = f"""
import sys
sys.modules[{package!r}] = sys.modules[{package + ".exceptions"!r}] = None
from weaveopt import cost_model
from weaveopt.cli.main import main
from weaveopt.errors import ProfileError
for name in cost_model.names():
    cost_model.load(name)
try:
    cost_model.load({str(path)!r})
except ProfileError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.count("\n") == 1
    assert done.stdout.startswith(f"profile {path}: ") and f"pip install {package}" in done.stdout


def _place(op: str, words: str = "", fabric: str = "peer") -> str:
    """The field of the first curve of an operation whose variant holds the words."""
    curves = _document()["fabrics"][fabric]["curves"]
    index = next(i for i, curve in enumerate(curves) if curve["op"] == op and words in curve["variant"])
    return f"fabrics.{fabric}.curves[{index}]"


def test_a_curve_tells_operation_variant_row_and_range(tmp_path: Path) -> None:
    document = _document()
    curve = {"origin": "fused", "op": "all_reduce_norm", "world": 2, "points": [{"bytes": 16384, "us": 5.0}]}
    document["fabrics"]["peer"]["transfers"] = ["ll_packet", "bulk", "direct"]
    document["fabrics"]["peer"]["curves"] = [
        {**curve, "variant": "two_shot ll_packet", "row": 4096, "first_bytes": 4096, "last_bytes": 16384},
        {**curve, "variant": "two_shot bulk ctas=64"},
        {**curve, "op": "gemm_reduce_scatter", "variant": "waves=3"},
    ]
    document["kernels"] = [
        {
            "origin": "attention", "op": "attention", "variant": "paged heads=8", "counts": "keys",
            "points": [{"size": 1, "us": 2.0}, {"size": 100, "us": 20.0}],
        }
    ]  # fmt: skip
    path = tmp_path / "x.json"
    path.write_text(json.dumps(document))
    machine = cost_model.load(str(path))
    costs = fabric_costs(machine, Fabric.PEER)
    found = [(c.variant, c.row, c.first_bytes, c.last_bytes) for c in costs.curves_of("all_reduce_norm")]
    assert found == [("two_shot ll_packet", 4096, 4096, 16384), ("two_shot bulk ctas=64", 0, 0, None)]
    assert [c.covers(size) for c in costs.curves[:2] for size in (4095, 4096, 16384, 16385)] == [
        *(False, True, True, False),
        *(True, True, True, True),
    ]
    assert len(costs.curves_of("gemm_reduce_scatter", "waves=3")) == 1 and not costs.curves_of("all_reduce_norm", "x")
    assert costs.transfers == ("ll_packet", "bulk", "direct")
    assert kernel_curve_us(machine, machine.kernels[0], 10) == pytest.approx(40.0**0.5)
    lines = dict(machine.summary().origins)
    assert {"fabrics.peer.all_reduce_norm.two_shot.bulk.world2", "kernels.attention.paged"} <= set(lines)
    path.write_text(cost_model.dumps(machine))
    assert cost_model.load(str(path)) == machine


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


BULK, OF_LIBRARY = _place("all_reduce_norm", "bulk"), _place("all_reduce", fabric="library")
CURVE = f"{OF_LIBRARY}.points[2]"
LL_PACKET = _place("all_reduce_norm", "ll_packet")
KERNEL = {
    "origin": "attention", "op": "attention", "variant": "paged", "counts": "keys", "points": [{"size": 1, "us": 2.0}],
}  # fmt: skip
CASES = [
    (f"{CURVE}.us", -3, f"field {CURVE}.us: found -3, expected a number > 0"),
    (f"{CURVE}.us", 0, f"field {CURVE}.us: found 0, expected a number > 0"),
    (f"{CURVE}.us", "3", f'field {CURVE}.us: found "3", expected a number > 0'),
    (f"{CURVE}.us", None, f"field {CURVE}.us: found null, expected a number > 0"),
    (f"{CURVE}.us", True, f"field {CURVE}.us: found true, expected a number > 0"),
    (f"{CURVE}.us", ..., f"field {CURVE}.us: found nothing, expected a number > 0"),
    (f"{CURVE}.bytes", 7, f"field {CURVE}.bytes: found 7, expected more than the point before (4096)"),
    (f"{CURVE}.us", 0.5, f"field {CURVE}.us: found 0.5, expected no less than the smaller size before it ("),
    ("gemms.bfloat16.samples.us", [1.0], "samples.us: found 1, expected 2760 times, one for each m, n and k"),
    ("gemms.bfloat16.samples.m", [1, 1], "samples.m[1]: found 1, expected more than 1 before it"),
    ("name", "a\x1b[31m", 'field name: found "a\\u001b[31m", expected no control characters'),
    ("name", "x" * 256, "expected at most 255 characters"),
    ("gemms.bfloat16.last_wave", 1.5, "gemms.bfloat16.last_wave: found 1.5, expected a number <= 1"),
    ("attention.step_us", -1.0, "field attention.step_us: found -1.0, expected a number > 0"),
    ("attention.origin", "nowhere", 'field attention.origin: found "nowhere", expected one of the origins'),
    ("contention.rows[0].gemm", 0.5, "field contention.rows[0].gemm: found 0.5, expected a number >= 1"),
    ("memory.norms[0].points[1].us", 0.1, "field memory.norms[0].points[1].us: found 0.1, expected no less than"),
    (f"{OF_LIBRARY}.points", [], "found [], expected at least one entry"),
    ("origins.nccl.spread", -0.1, "field origins.nccl.spread: found -0.1, expected a number >= 0"),
    ("memory.bytes_per_s", ..., "field memory.bytes_per_s: found nothing, expected a number > 0"),
    ("memory.floor_us", float("nan"), ": not JSON: invalid character"),
    ("memory.floor_us", float("inf"), ": not JSON: invalid character"),
    ("ranks_per_host", 10**400, "field ranks_per_host: found 1000000000"),
    ("ranks_per_host", 1 << 63, "field ranks_per_host: found 9223372036854775808, expected an integer of 64 bits"),
    ("colour", [-(10**4000)], "field colour[0]: found -1000000000"),
    ("compiled.grouped[0].rows[1].rows", 1, "grouped[0].rows[1].rows: found 1, expected more than the row before (1)"),
    ("compiled.grouped[0].rows[0].times", 0, "compiled.grouped[0].rows[0].times: found 0, expected a number > 0"),
    ("compiled.grouped", 1.25, "field compiled.grouped: found 1.25, expected an array"),
    ("compiled.grouped_rows", [], "field compiled.grouped_rows: found [], expected one of the fields origin, host_us"),
    ("ranks_per_host", 0, "field ranks_per_host: found 0, expected a number >= 1"),
    ("ranks_per_host", 2.5, "field ranks_per_host: found 2.5, expected an integer"),
    ("relative_error", 1.0, "field relative_error: found 1.0, expected a number < 1"),
    ("device", "tpu", 'field device: found "tpu", expected one of cpu, cuda'),
    ("schema", 3, "field schema: found 3, expected 2"),
    ("schema", "1", 'field schema: found "1", expected 2'),
    ("gemms.bfloat16.tiles", ..., "expected either tiles with units, or rates"),
    ("gemms.float32", ..., "field gemms.float32: found nothing, expected this field"),
    ("gemms.bfloat16.origin", "nowhere", 'bfloat16.origin: found "nowhere", expected one of the origins'),
    ("fabrics.library", ..., "field fabrics.library: found nothing, expected this field"),
    ("fabrics.ethernet", {}, "field fabrics.ethernet: found {}, expected one of the fields library"),
    (f"{BULK}.op", "", f'field {BULK}.op: found "", expected at least one entry'),
    (f"{BULK}.variant", ..., f"field {BULK}.variant: found nothing, expected this field"),
    (f"{BULK}.form", "bulk", f'field {BULK}.form: found "bulk", expected one of the fields origin, op, variant'),
    (f"{BULK}.world", 1, f"field {BULK}.world: found 1, expected a number >= 2"),
    (f"{BULK}.row", 0, f"field {BULK}.row: found 0, expected a number >= 1"),
    (f"{BULK}.origin", "nowhere", f'field {BULK}.origin: found "nowhere", expected one of the origins'),
    (f"{LL_PACKET}.first_bytes", 1 << 40, f"field {LL_PACKET}.last_bytes: found "),
    ("fabrics.peer.transfers", [], "field fabrics.peer.transfers: found [], expected at least one entry"),
    ("fabrics.peer.transfers", ["bulk", "bulk"], "expected every entry once"),
    ("kernels", [KERNEL, KERNEL], 'field kernels[1]: found "attention paged", expected another kernel than in row 0'),
    ("kernels", [{**KERNEL, "points": [{"size": 2, "us": 1.0}] * 2}], "field kernels[0].points[1].size: found 2"),
    ("kernels", [{**KERNEL, "origin": "nowhere"}], 'field kernels[0].origin: found "nowhere", expected one of'),
    ("colour", "red", 'field colour: found "red", expected one of the fields schema'),
    ("origins.nccl.kind", "guess", 'field origins.nccl.kind: found "guess", expected one of measured, datasheet'),
]


@pytest.mark.parametrize(("path", "value", "expected"), CASES, ids=[f"{case[0]}={str(case[1])[:24]}" for case in CASES])
def test_refused(path: str, value: object, expected: str, tmp_path: Path) -> None:
    document = copy.deepcopy(_document())
    _set(path, value)(document)
    assert expected in _refusal(tmp_path, json.dumps(document))


def test_two_curves_of_one_kernel(tmp_path: Path) -> None:
    document = _document()
    curves = document["fabrics"]["peer"]["curves"]
    curves.append(copy.deepcopy(curves[0]))
    where = f"field fabrics.peer.curves[{len(curves) - 1}]: found "
    assert _refusal(tmp_path, json.dumps(document)).startswith(where)


def test_a_profile_of_schema_1_is_refused_by_its_schema_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its other fields have names that schema 2 does not know; what to do is said first."""
    path = tmp_path / "old.json"
    path.write_text('{"schema": 1, "name": "old", "products": {}, "fabrics": {"peer": {"all_reduce_norm": []}}}')
    assert main(["explain", "llama-3.3-70b", "--tp", "8", "--machine", str(path)]) == 2
    expected = "expected 2: schema 1 is no longer read, `weaveopt calibrate` measures the machine anew"
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert f"profile {path}: field schema: found 1, {expected}" in captured.err


def test_not_json(tmp_path: Path) -> None:
    assert _refusal(tmp_path, '{"schema": 1,').startswith("line 1, column 14: not JSON: ")


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ('{"schema": 2, "name": "a", "name": "a"}', "name"),
        ('{"schema": 2, "fabrics": {"peer": {"curves": [{}, {"points": {"us": 1, "us": 2}}]}}, "name": "a"}',
         "fabrics.peer.curves[1].points.us"),
    ],
    ids=["top", "within"],
)  # fmt: skip
def test_two_fields_of_one_name(text: str, path: str, tmp_path: Path) -> None:
    """JSON parsers keep the last of them."""
    assert _refusal(tmp_path, text) == f"not JSON that can be read: two fields {path!r}"


FLOOR = '{"schema": 2,\n "memory": {"floor_us": VALUE}}'


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("9" * 5000, "line 2, column 25: found a number of 5000 digits, expected an integer of 64 bits"),
        ("-" + "9" * 4301, "line 2, column 25: found a number of 4302 digits, expected an integer of 64 bits"),
        ("9" * 4300, "field memory.floor_us: found 9999999999"),
        ("1e999", "field memory.floor_us: found Infinity, expected a finite number"),
        ("-1e999", "field memory.floor_us: found -Infinity, expected a finite number"),
        ("0." + "9" * 5000, "found nothing, expected "),
        ("[" * 990 + "]" * 990, "found "),
        ('{"a": ' * 990 + "1" + "}" * 990, "found "),
        ("[" * 100_000, "nested too deeply"),
    ],
    ids=lambda value: value[:12],
)
def test_numbers_and_nesting_beyond_any_use(value: str, words: str, tmp_path: Path) -> None:
    """One line. What still can be read is refused by the schema."""
    error = _refusal(tmp_path, FLOOR.replace("VALUE", value))
    assert words in error or (value[0] in "[{" and "nested too deeply" in error)
    assert len(error) < 300


def test_explain_refuses_such_a_file_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.json"
    path.write_text(FLOOR.replace("VALUE", "9" * 5000))
    assert main(["explain", "llama-3.3-70b", "--tp", "8", "--machine", str(path)]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert f"profile {path}: line 2, column 25: found a number of 5000 digits" in captured.err


def test_not_an_object(tmp_path: Path) -> None:
    assert _refusal(tmp_path, "[1, 2]") == "field (whole file): found [1, 2], expected an object"


def test_falling_rates_rows(tmp_path: Path) -> None:
    document = json.loads((FOLDER / "profiles" / "cpu.json").read_text())
    document["gemms"]["float32"]["rates"][1]["m"] = 1
    expected = "field gemms.float32.rates[1].m: found 1, expected more than the row before (1)"
    assert _refusal(tmp_path, json.dumps(document)) == expected


def test_unreadable(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="cannot be read: No such file"):
        cost_model.load(str(tmp_path / "missing.json"))
    with pytest.raises(ProfileError, match="cannot be read: Is a directory"):
        cost_model.load(f"{tmp_path}/")
    os.mkfifo(tmp_path / "pipe.json")
    for path in (tmp_path / "pipe.json", "/dev/zero"):  # one never begins, the other never ends
        with pytest.raises(ProfileError, match="cannot be read: not a regular file"):
            cost_model.load(str(path))
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProfileError, match="not UTF-8"):
        cost_model.load(str(tmp_path / "binary.json"))


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ProfileError, match="did you mean 'h100x8'"):
        cost_model.load("h100-x8")


def test_absent_fabric_is_named() -> None:
    with pytest.raises(ProfileError, match="'h200x4' has no fabric 'multimem'; it has: library, peer"):
        cost_model.all_reduce_us(cost_model.load("h200x4"), Fabric.MULTIMEM, "two_shot", 1024, 4)


def test_imports_nothing_but_records_and_errors() -> None:
    """No torch and no device: a profile can be read, and a decision be made, anywhere."""
    allowed = {
        "weaveopt.cost_model",
        "weaveopt.records.candidate",
        "weaveopt.records.price",
        "weaveopt.records.report",
        "weaveopt.records.site",
        "weaveopt.records.skew",
        "weaveopt.records.task",
        "weaveopt.errors",
        "weaveopt.plain_json",
    }
    found = set()
    for path in FOLDER.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found.update(names)
            for name in names:
                assert not name.startswith(("torch", "numpy")), f"{path.name} imports {name}"
                if name.startswith("weaveopt"):
                    assert any(name == each or name.startswith(f"{each}.") for each in allowed), f"{path.name}: {name}"
    assert "weaveopt.errors" in found, f"only {sorted(found)} are imported in {FOLDER}"
