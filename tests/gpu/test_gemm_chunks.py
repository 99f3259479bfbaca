"""GEMMs whose rows are exchanged in chunks, on GPUs: against the reference, between other calls, in CUDA graphs."""

from __future__ import annotations

import pytest

from tests.gpu.launch import needs_cuda_part, run_ranks


@needs_cuda_part
@pytest.mark.multigpu
@pytest.mark.parametrize("world", [2, 4])
def test_chunks_equal_the_reference(world: int) -> None:
    printed = run_ranks(world, "tests.gpu.gemm_ranks")
    assert printed.count("chunks agree") == world
