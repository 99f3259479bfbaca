"""The cost model of today against the stored measurements, without the machines that these were taken on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from benchmarks import accuracy, results_table
from benchmarks.record import RESULTS, Row
from benchmarks.workloads.prediction_model import predict_again, predicted_us
from weaveopt import cost_model

MACHINES = ("h200x4", "cpu")
FILE = Path(__file__).parent / "prediction.json"
DIGITS = 5
Figures = dict[str, int | float | str | None]


def rows_of(machine: str) -> list[Row]:
    return list(results_table.read(RESULTS / machine / "prediction.json").rows)


def record(machine: str) -> dict[str, Figures]:
    """Errors by kind of case, and how good the choices are, predicted anew.

    Whole layers cannot be predicted from their case: they keep the prediction that they were stored with.
    """
    stored = rows_of(machine)
    model = cost_model.load(machine)
    again = predict_again(model, stored)
    found: dict[str, Figures] = {}
    for each in accuracy.errors(again):
        named = {name: _rounded(value) for name, value in asdict(each).items() if name != "kind"}
        rows = [row for row in accuracy.predictions(stored) if each.kind in (row.case["kind"], accuracy.ALL)]
        kept = sum(row.case["kind"] == "layers" for row in rows)
        known = [row for row in rows if row.case["kind"] == "layers" or predicted_us(model, row.case) is not None]
        found[each.kind] = {**named, "stored_cases": len(rows), "kept_as_stored": kept, "known_cases": len(known)}
    choices = accuracy.choices(again)
    for name, figures in (("choice against best", choices.best), ("choice against leaving", choices.leaving)):
        if figures is not None:
            found[name] = {part: _rounded(value) for part, value in asdict(figures).items()}
    return found


def stored_errors(machine: str) -> dict[str, accuracy.Errors]:
    """Errors of the predictions that the file holds."""
    return {each.kind: each for each in accuracy.errors(rows_of(machine))}


def _rounded(value: int | float | str | None) -> int | float | str | None:
    return round(value, DIGITS) if isinstance(value, float) else value


def record_all() -> dict[str, dict[str, Figures]]:
    return {machine: record(machine) for machine in MACHINES}


def write(found: Mapping[str, Mapping[str, Figures]]) -> None:
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def read() -> dict[str, dict[str, Figures]]:
    return dict(json.loads(FILE.read_text(encoding="utf-8")))


def text(found: Mapping[str, Mapping[str, Figures]]) -> Iterator[str]:
    """A line a kind: cases, mean error, 90th percentile."""
    for machine, kinds in found.items():
        stored = stored_errors(machine)
        for kind, figures in kinds.items():
            if "mean" in figures and "p90" in figures:
                old = stored[kind]
                yield (
                    f"{machine} {kind}: {figures['cases']} cases, mean {figures['mean']:.2%}, 90th "
                    f"{figures['p90']:.2%} (stored predictions: {old.cases} cases, {old.mean:.2%}, {old.p90:.2%})"
                )
            else:
                yield f"{machine} {kind}: " + ", ".join(f"{name} {value}" for name, value in figures.items())


def changes(old: Mapping[str, Mapping[str, Figures]], new: Mapping[str, Mapping[str, Figures]]) -> list[str]:
    """A line for each figure that is another one now."""
    found = []
    for machine, kinds in old.items():
        for kind in dict.fromkeys([*kinds, *new.get(machine, {})]):
            before, after = kinds.get(kind, {}), new.get(machine, {}).get(kind, {})
            for name in dict.fromkeys([*before, *after]):
                if before.get(name) != after.get(name):
                    found.append(f"{machine} {kind} {name}: {before.get(name)} -> {after.get(name)}")
    return found
