"""The file of records: one line a site, and each longer text once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from tests.golden.compact import Json, Record

TEXTS = "texts"
CASES = "cases"
SHARED = ("rounding", "module", "stretches", "alternatives", "form", "lowerings", "parameters", "notes")
"""Fields whose values repeat from case to case: the file holds each of them once, and its place where it stands."""


def write(path: Path, records: Mapping[str, Record]) -> None:
    places: dict[str, int] = {}

    def place(value: Json) -> int:
        return places.setdefault(_line(value), len(places))

    cases = [f"{_line(name)}: {_indented(_changed(record, place))}" for name, record in records.items()]
    texts = ",\n".join(places)
    path.write_text(f'{{"{CASES}": {{\n{_joined(cases)}\n}},\n"{TEXTS}": [\n{texts}\n]}}\n', encoding="utf-8")


def read(path: Path) -> dict[str, Record]:
    stored = json.loads(path.read_text(encoding="utf-8"))
    texts = stored[TEXTS]
    return {name: _changed(record, lambda place: texts[place]) for name, record in stored[CASES].items()}


def _changed(value: Json, change: Callable[[Json], Json]) -> Json:
    """`value` with what its shared fields hold changed, at any depth. An alternative keeps its time."""
    if isinstance(value, list):
        return [_changed(each, change) for each in value]
    if not isinstance(value, dict):
        return value
    found: dict[str, Json] = {}
    for name, each in value.items():
        if name not in SHARED:
            found[name] = _changed(each, change)
        elif name == "alternatives":
            found[name] = [[change(text), us] for text, us in each]
        else:
            found[name] = change(each)
    return found


def _line(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _indented(record: Record) -> str:
    """A record whose graphs have one line for themselves and one for each site."""
    graphs = []
    for graph in record.get("graphs", ()):
        own = _line({name: value for name, value in graph.items() if name != "sites"})
        sites = _joined(_line({name: value for name, value in site.items() if value != []}) for site in graph["sites"])
        graphs.append(f'{own[:-1]},"sites":[\n{sites}]}}')
    rest = _line({name: value for name, value in record.items() if name != "graphs"})
    return f'{rest[:-1]},"graphs":[{_joined(graphs)}]}}' if graphs else rest


def _joined(lines: Iterable[str]) -> str:
    return ",\n".join(lines)
