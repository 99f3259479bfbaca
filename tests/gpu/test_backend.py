"""A compiled block on GPUs runs on the fabric `peer`, and computes what eager computes."""

from __future__ import annotations

import pytest

from tests.gpu.launch import needs_cuda_part, run_ranks


@needs_cuda_part
@pytest.mark.multigpu
def test_a_compiled_block_runs_on_peer() -> None:
    printed = run_ranks(2, "tests.gpu.compiled_ranks")
    assert printed.count("compiled as in eager") == 2
