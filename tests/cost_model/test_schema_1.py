"""Profiles of schema 1, as users have them: loaded as they are, and written anew, with no number changed."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from weaveopt import cost_model
from weaveopt.cost_model import convert
from weaveopt.cost_model.collectives import fabric_costs
from weaveopt.errors import ProfileError
from weaveopt.records.candidate import Fabric

OLD = Path(__file__).parent / "schema_1"


def document() -> dict:
    """A profile of schema 1 that holds everything that schema 1 had names of its own for."""
    made = json.loads((OLD / "h100x8.json").read_text())
    points = [{"bytes": 4096, "us": 5.0}, {"bytes": 8192, "us": 6.0}]
    curve = {"origin": "fused", "world": 4, "points": points}
    made["fabrics"]["peer"] |= {
        "forms": ["mail", "bulk"],
        "all_reduce_norm": [
            {**curve, "algorithm": "two_shot", "form": "mail", "hidden": 4096},
            {**curve, "algorithm": "two_shot", "form": "mail", "ctas": 132, "hidden": 4096},
            {**curve, "algorithm": "two_shot", "form": "bulk", "ctas": 64},
            {**curve, "algorithm": "one_shot"},
            {**curve, "algorithm": "two_shot"},
        ],
    }
    made["fabrics"]["library"]["all_gather"] = [{**curve, "algorithm": "library"}]
    made["contention"] = {"origin": "fused", "rows": [{"ctas": 8, "product": 1.25, "exchange": 1.5}]}
    made["memory"]["norms"] = [{"hidden": 2048, "points": points}]
    return made


def load(made: dict, folder: Path) -> cost_model.Machine:
    path = folder / "old.json"
    path.write_text(json.dumps(made))
    return cost_model.load(str(path))


@pytest.mark.parametrize("path", sorted(OLD.glob("*.json")), ids=lambda path: path.stem)
def test_what_was_shipped_is_the_machine_that_is_shipped(path: Path, tmp_path: Path) -> None:
    assert json.loads(path.read_text())["schema"] == 1
    assert cost_model.load(str(path)) == cost_model.load(path.stem)
    new = tmp_path / "new.json"
    assert convert.main([str(path), str(new)]) == 0
    assert json.loads(new.read_text())["schema"] == 2
    assert cost_model.load(str(new)) == cost_model.load(path.stem)


def test_every_number_is_kept_under_its_new_name(tmp_path: Path) -> None:
    machine = load(document(), tmp_path)
    costs = fabric_costs(machine, Fabric.PEER)
    assert [(c.variant, c.row, c.first_bytes, c.last_bytes) for c in costs.curves] == [
        ("two_shot ll_packet", 4096, 0, 8192),
        ("two_shot ll_packet ctas=132", 4096, 4096, 8192),
        ("two_shot bulk ctas=64", 0, 0, None),
        ("one_shot ll_packet", 0, 0, 8192),  # profiles from before there were several transfers
        ("two_shot bulk", 0, 0, None),
    ]
    assert {c.op for c in costs.curves} == {"all_reduce_norm"} and {c.world for c in costs.curves} == {4}
    assert costs.transfers == ("ll_packet", "bulk")
    assert [c.variant for c in fabric_costs(machine, Fabric.MULTIMEM).curves_of("all_reduce_norm")] == [
        "two_shot direct"
    ]
    assert [(c.op, c.world) for c in fabric_costs(machine, Fabric.LIBRARY).curves] == [
        ("all_gather", 4),
        ("all_reduce", 8),
    ]
    assert machine.contention is not None
    (row,) = machine.contention.rows
    assert (row.ctas, row.gemm, row.communication) == (8, 1.25, 1.5)
    assert machine.memory.norms[0].row == 2048
    (tmp_path / "new.json").write_text(cost_model.dumps(machine))
    assert cost_model.load(str(tmp_path / "new.json")) == machine


@pytest.mark.parametrize(
    ("place", "value", "expected"),
    [
        (("products", "bfloat16", "launch_us"), -1, "field products.bfloat16.launch_us: found -1, expected a number"),
        (("gemms",), {}, "field gemms: found {}, expected one of the fields schema"),
        (("fabrics", "peer", "all_reduce_norm", 2, "form"), "post", "expected one of segment, mail, bulk, direct"),
        (
            ("fabrics", "peer", "all_reduce_norm", 2, "algorithm"),
            "one_shot",
            'field fabrics.peer.all_reduce_norm[2].algorithm: found "one_shot", expected two_shot: bulk copies',
        ),
        (("fabrics", "peer", "all_reduce_norm", 4, "form"), "mail", "two_shot ll_packet"),
    ],
)
def test_what_schema_1_refused_is_refused(
    place: tuple[str | int, ...], value: object, expected: str, tmp_path: Path
) -> None:
    made = copy.deepcopy(document())
    inside = made
    for step in place[:-1]:
        inside = inside[step]
    inside[place[-1]] = value
    if place[-1] == "form" and value == "mail":
        inside["hidden"] = 4096  # the first curve's kernel once more
    with pytest.raises(ProfileError) as caught:
        load(made, tmp_path)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_the_converter_says_what_it_could_not_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert.main(["one"]) == 2
    assert "OLD NEW" in capsys.readouterr().err
    assert convert.main([str(tmp_path / "none.json"), str(tmp_path / "new.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "new.json").exists()
