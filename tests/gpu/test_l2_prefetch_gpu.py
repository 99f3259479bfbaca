"""Weights loaded into L2 while an exchange waits change no result, on GPUs."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.launch import needs_cuda_part, run_program, run_ranks


@needs_cuda_part
@pytest.mark.gpu
def test_ranks_of_one_process_get_the_same_bits() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    assert "calls give the bits" in run_program("tests.gpu.one_process_prefetch")


@needs_cuda_part
@pytest.mark.multigpu
@pytest.mark.parametrize("world", [2, 4])
def test_the_operation_equals_the_one_that_loads_nothing(world: int) -> None:
    printed = run_ranks(world, "tests.gpu.prefetch_ranks")
    assert printed.count("prefetching changes nothing") == world
