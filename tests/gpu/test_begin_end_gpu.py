"""Calls that are begun on the communication stream: against calls in line, eager and from CUDA graphs."""

from __future__ import annotations

import pytest

from tests.gpu.launch import needs_cuda_part, run_program, run_ranks


@needs_cuda_part
@pytest.mark.multigpu
@pytest.mark.parametrize("world", [2, 4])
def test_begun_calls_equal_those_in_line(world: int) -> None:
    printed = run_ranks(world, "tests.gpu.begin_end_ranks")
    assert printed.count("begun calls agree") == world


@needs_cuda_part
@pytest.mark.gpu
def test_ranks_of_one_process_begin_and_end_in_a_graph() -> None:
    assert "begun calls agree with the reference" in run_program("tests.gpu.one_process_begun")
