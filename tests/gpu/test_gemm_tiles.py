"""GEMMs whose tiles leave while they run, on GPUs: against the reference, and from CUDA graphs."""

from __future__ import annotations

import pytest

from tests.gpu.launch import needs_cuda_part, run_ranks


@needs_cuda_part
@pytest.mark.multigpu
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    ("program", "says"),
    [("tests.gpu.tiles_ranks", "tiles agree"), ("tests.gpu.tiles_op_ranks", "the operation agrees")],
)
def test_tiles_equal_the_reference(world: int, program: str, says: str) -> None:
    printed = run_ranks(world, program)
    assert printed.count(says) == world
