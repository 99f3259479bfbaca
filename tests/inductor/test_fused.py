"""Joining of loop nests into kernels: which may run in common outer loops, and which readers wait for all writers."""

from __future__ import annotations

import math

import pytest
import torch.fx as fx

from weaveopt.inductor.fused import fuse
from weaveopt.inductor.loops import LoweredStep

NODE = fx.Graph().placeholder("x")
ITEM = 4


def _step(reads: dict[int, int], write: int, rows: tuple[int, ...], reduced: int = 1) -> LoweredStep:
    """Loops over `rows` that read whole values of so many elements."""
    elements = math.prod(rows)
    places = {(value, None): ITEM * size for value, size in reads.items()}
    return LoweredStep(NODE, places, (write,), ITEM * elements, elements, reduced, call=False, rows=rows)


@pytest.mark.parametrize(
    ("rows", "device", "kernels"),
    [((64, 32), "cpu", 1), ((64, 8, 4), "cpu", 1), ((32, 64), "cpu", 2), ((2048,), "cpu", 2), ((64, 32), "cuda", 2)],
)
def test_a_value_of_each_row_runs_with_its_reader_on_cpus(rows: tuple[int, ...], device: str, kernels: int) -> None:
    """In one loop over the rows, if that is the reader's outer loop."""
    assert len(fuse([_step({}, 1, (64,)), _step({1: 64}, 2, rows)], device)) == kernels


def test_rows_that_a_reader_does_not_read_run_apart() -> None:
    """Outer loops alone are no reason."""
    steps = [_step({9: 64}, 1, (64,)), _step({9: 64, 8: 2048}, 2, (64, 32))]
    assert len(fuse(steps, "cpu")) == 2


def test_a_reader_of_a_concatenation_waits_for_all_its_parts() -> None:
    parts = [_step({}, 1, ()), _step({}, 1, (64,))]
    assert len(fuse([*parts, _step({1: 64}, 2, (64,))], "cpu")) == 3
    assert len(fuse([parts[1], _step({1: 64}, 2, (64,))], "cpu")) == 1, "a value with one writer is read as it is made"


def test_a_reduction_runs_with_the_producer_and_the_consumer_of_its_rows() -> None:
    steps = [
        _step({9: 2048}, 1, (64, 32)),
        _step({1: 2048}, 2, (64,), reduced=32),
        _step({1: 2048, 2: 64}, 3, (64, 32)),
    ]
    for device in ("cpu", "cuda"):
        assert len(fuse(steps, device)) == 1
