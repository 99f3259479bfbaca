"""The fused op between GPUs of one machine that take themselves for hosts (`WEAVE_HOST`), over NVSHMEM."""

from __future__ import annotations

import pytest

from tests.gpu.launch import run_ranks
from weaveopt.fabrics.traits import NativePart, is_built

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(not is_built(NativePart.NVSHMEM), reason="weaveopt was built without NVSHMEM"),
]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_equals_the_reference_bitwise_alike_and_from_graphs(world: int) -> None:
    assert run_ranks(world, "tests.gpu.hosts_ranks").count("every stage passed") == world


def test_a_rank_that_leaves_a_call_out_is_named() -> None:
    said = run_ranks(2, "tests.gpu.hosts_ranks", "--fault")
    assert "rank 0 raised" in said and "peer rank 1 did not signal within 2 s (slot host step 0 of" in said, said
