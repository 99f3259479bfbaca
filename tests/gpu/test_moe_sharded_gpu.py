"""`weave::expert_exchange` on GPUs of one host: against the reference, from CUDA graphs, and the rows that are sent."""

from __future__ import annotations

import pytest

from tests.gpu.launch import needs_cuda_part, run_ranks


@needs_cuda_part
@pytest.mark.multigpu
@pytest.mark.parametrize("world", [2, 3, 4])
def test_sharded_tokens_equal_the_reference(world: int) -> None:
    assert run_ranks(world, "tests.gpu.sharded_ranks").count("sharded tokens agree") == world
