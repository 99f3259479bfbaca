"""Units of tests that the processes of a run claim, the longest first, by a committed table of durations.

A test is a unit of its own if it takes long. Tests that share a fixture of their module, or a function's cache in it,
are one unit, so that it is made once; the short tests of a file are one too. `--record-durations` writes the table.
Tests marked `alone` look at what the whole machine has; they run when every other test has ended.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

TABLE = Path(__file__).parents[1] / "durations.json"
DEFAULT_S = 0.2
"""Duration of a test that is not in the table, such as short and new ones."""
GPU_DEFAULT_S = 3.0
"""The same for a test that needs a GPU: most make their references on a CPU, or wait for a compiler."""
RECORDED_S = 1.0
"""Tests that take less are not in the table: it would change with every run."""
LONG_S = 3.0
"""A test that takes so long is a unit of its own."""
MOST_S = 15.0
"""Most that short tests of one unit take together."""

Unit = list[pytest.Item]


def durations() -> Mapping[str, float]:
    """Seconds by test."""
    found: dict[str, float] = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    return found


def record(measured: Mapping[str, float]) -> None:
    """Writes what was measured into the table; tests that did not run keep what they had."""
    found = {**durations(), **measured}
    long = {test: round(seconds, 1) for test, seconds in sorted(found.items()) if seconds >= RECORDED_S}
    TABLE.write_text(json.dumps(long, indent=0) + "\n")


def is_alone(item: pytest.Item) -> bool:
    """True if no other test may run concurrently."""
    return item.get_closest_marker("alone") is not None


def seconds_of(item: pytest.Item, seconds: Mapping[str, float]) -> float:
    """How long a test takes, as far as is known."""
    needs_gpu = any(item.get_closest_marker(name) is not None for name in ("gpu", "multigpu"))
    return seconds.get(item.nodeid, GPU_DEFAULT_S if needs_gpu else DEFAULT_S)


def units_of(items: Iterable[pytest.Item], seconds: Mapping[str, float]) -> list[Unit]:
    """All tests, in the order in which units are claimed. It is the same in every process that collected the same."""

    def takes(unit: Unit) -> float:
        return sum(seconds_of(item, seconds) for item in unit)

    found: list[Unit] = []
    for _, file in itertools.groupby(items, lambda item: item.path):
        found.extend(_units_of_file(list(file), seconds))
    return sorted(found, key=takes, reverse=True)  # stable: of equally long ones the first that was collected


def _units_of_file(items: list[pytest.Item], seconds: Mapping[str, float]) -> Iterator[Unit]:
    if any(_has_cache(module) for module in {item.getparent(pytest.Module) for item in items} if module is not None):
        yield items
        return
    together: Unit = []
    short: Unit = []
    left_s = MOST_S
    for item in items:
        own_s = seconds_of(item, seconds)
        if _shares_fixture(item):
            together.append(item)
        elif own_s >= LONG_S:
            yield [item]
        else:
            if short and own_s > left_s:
                yield short
                short, left_s = [], MOST_S
            short.append(item)
            left_s -= own_s
    yield from (unit for unit in (together, short) if unit)


def _shares_fixture(item: pytest.Item) -> bool:
    """True if a fixture of the tests' own, which outlives a test, is set up for it."""
    info = getattr(item, "_fixtureinfo", None)
    if info is None:
        return False
    definitions = (each for found in info.name2fixturedefs.values() for each in found)
    return any(each.scope != "function" and each.baseid for each in definitions)


def _has_cache(module: pytest.Module) -> bool:
    """True if the module itself has a function whose results are cached."""
    return any(
        hasattr(value, "cache_info") and getattr(value, "__module__", "") == module.obj.__name__
        for value in vars(module.obj).values()
    )
