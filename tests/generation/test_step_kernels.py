"""Compile options of the step-kernel benchmark, in addition to those of the step that users get."""

from __future__ import annotations

import pytest

from benchmarks.suite import Asked, UsageError
from benchmarks.suites.generate import Case
from benchmarks.suites.step_kernels import OPTIONS, cases, compiled
from weaveopt.generation.compiling import ONE_ROW, SIDE_BY_SIDE


@pytest.mark.parametrize(
    ("options", "batch", "expected"),
    [
        ("max_autotune:1", 1, {ONE_ROW: True, SIDE_BY_SIDE: True, "max_autotune": True}),
        ("combo_kernels:0", 1, {ONE_ROW: True, SIDE_BY_SIDE: False}),
        ("combo_kernels:1", 16, {"combo_kernels": True}),
    ],
)
def test_further_options_stand_beside_what_a_step_has(options: str, batch: int, expected: dict[str, bool]) -> None:
    config = compiled(options, batch)
    assert (config.backend, config.mode, config.options) == ("weave", None, expected)


def test_models_and_options_are_asked_for() -> None:
    asked = Asked("gpu", values={"models": "8b", "options": "combo_kernels:0,max_autotune:1"})
    assert cases(asked) == [Case("8b", 1, "greedy")]
    assert asked.of(OPTIONS) == ("combo_kernels:0", "max_autotune:1")
    for wrong in ("combo_kernels", "combo_kernels:yes", ":1"):
        with pytest.raises(UsageError, match="NAME:0 or NAME:1"):
            cases(Asked("gpu", values={"options": wrong}))
