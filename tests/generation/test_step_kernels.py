"""What the benchmark of a step's kernels compiles beside the step that users get."""

from __future__ import annotations

import pytest

from benchmarks.step_kernels_gpu import compiled, parse
from weaveopt.generation.compiling import ONE_ROW, SIDE_BY_SIDE


@pytest.mark.parametrize(
    ("options", "batch", "expected"),
    [
        ("max_autotune=1", 1, {ONE_ROW: True, SIDE_BY_SIDE: True, "max_autotune": True}),
        ("combo_kernels=0", 1, {ONE_ROW: True, SIDE_BY_SIDE: False}),
        ("combo_kernels=1", 16, {"combo_kernels": True}),
    ],
)
def test_further_options_stand_beside_what_a_step_has(options: str, batch: int, expected: dict[str, bool]) -> None:
    config = compiled(options, batch)
    assert (config.backend, config.mode, config.options) == ("weave", None, expected)


def test_models_and_options_are_asked_for() -> None:
    asked = parse(["--models", "8b", "--options", "combo_kernels=0", "--layers", "8", "--quick"])
    assert (asked.models, asked.options, asked.layers, asked.quick) == (("8b",), ("combo_kernels=0",), 8, True)
    with pytest.raises(SystemExit):
        parse(["--models", "7b"])
    for wrong in ("combo_kernels", "combo_kernels=yes", "=1"):
        with pytest.raises(SystemExit):
            parse(["--options", wrong])
