"""GEMM + reduce-scatter, also with addition and norm, and all-gather + GEMM on GPUs: against the reference, and from
CUDA graphs."""

from __future__ import annotations

import pytest

from tests.gpu.launch import needs_cuda_part, run_ranks


@needs_cuda_part
@pytest.mark.multigpu
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("tests.gpu.scatter_gather_ranks", "scatter and gather agree"),
        ("tests.gpu.scatter_norm_ranks", "sums and norms agree"),
        ("tests.gpu.scatter_gather_compiled_ranks", "compiled blocks agree"),
    ],
)
def test_they_equal_the_reference(world: int, program: str, says: str) -> None:
    assert run_ranks(world, program).count(says) == world
