"""The fused op through memory of the host: against the reference, in CUDA graphs, and when ranks die, stall or differ.

It runs on any two GPUs of a host, with peer access or without: nothing here uses it.
"""

from __future__ import annotations

import pytest
import torch

from tests.gpu.launch import needs_cuda_part, run_ranks
from tests.gpu.test_op import run_scenario
from weaveopt import _native
from weaveopt.fabrics import gpus


@needs_cuda_part
@pytest.mark.gpu
def test_the_driver_says_what_a_gpu_can() -> None:
    assert gpus.why_no_host_memory(0) == "", "every GPU that torch supports maps memory of an x86 host"
    assert gpus.memory_node(0) >= -1
    assert _native.why_no_host_memory(torch.cuda.device_count()) == "there is no such GPU"


@needs_cuda_part
@pytest.mark.multigpu
@pytest.mark.parametrize("world", [2, 4])
def test_equals_the_reference_bitwise_alike_and_from_graphs(world: int) -> None:
    printed = run_ranks(world, "tests.gpu.host_ranks", timeout_s=600.0)
    assert printed.count("every stage passed") == world


@needs_cuda_part
@pytest.mark.multigpu
@pytest.mark.parametrize("kernel", ["", " posted", " bulk"])
@pytest.mark.parametrize("graph", ["", " graph"])
def test_a_rank_that_is_gone_ends_the_other(kernel: str, graph: str) -> None:
    killed = run_scenario(f"killed host{kernel}{graph}", (0, 1))
    assert 0 in killed.results, f"rank 0 hung or died:\n{killed.stderr[-4000:]}"
    assert "rank 1 exited" in killed.text(0, "later") and killed.seconds(0) < 10
    stalled = run_scenario(f"stalled host{kernel}{graph}", (0, 1))
    assert 0 in stalled.results, f"rank 0 hung or died:\n{stalled.stderr[-4000:]}"
    assert "did not signal within 4 s" in stalled.text(0, "later") and 3 < stalled.seconds(0) < 10


@needs_cuda_part
@pytest.mark.multigpu
@pytest.mark.parametrize("kernel", ["", " posted"])
def test_a_rank_that_comes_back_hears_that_the_other_gave_up(kernel: str) -> None:
    outcome = run_scenario(f"continued host{kernel}", (0, 1))
    assert set(outcome.results) == {0, 1}, f"a rank hung or died:\n{outcome.stderr[-4000:]}"
    assert "rank 1: peer rank 0 gave up waiting itself" in outcome.text(1, "later") and outcome.seconds(1) < 4


@needs_cuda_part
@pytest.mark.multigpu
@pytest.mark.parametrize("scenario", ["differing tokens host", "differing sites host posted"])
def test_ranks_that_differ_are_told_so(scenario: str) -> None:
    outcome = run_scenario(scenario, (0, 1))
    assert set(outcome.results) == {0, 1}, f"a rank hung or died:\n{outcome.stderr[-4000:]}"
    assert any("AgreementError" in outcome.text(rank, "later") for rank in (0, 1))
