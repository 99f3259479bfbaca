"""The rule `shard_norm` on GPUs: a compiled decoder against eager, and from CUDA graphs."""

from __future__ import annotations

import pytest

from tests.gpu.launch import needs_cuda_part, run_ranks


@needs_cuda_part
@pytest.mark.multigpu
@pytest.mark.parametrize("world", [2, 4])
def test_a_decoder_computes_as_eager(world: int) -> None:
    assert run_ranks(world, "tests.gpu.shard_norm_ranks").count("chains agree") == world
