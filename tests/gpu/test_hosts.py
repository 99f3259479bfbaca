"""The fused op between GPUs of one machine that take themselves for hosts (`WEAVE_HOST`), over NVSHMEM."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.launch import run_program, run_ranks, trapping
from weaveopt.fabrics.traits import NativePart, is_built

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(not is_built(NativePart.NVSHMEM), reason="weaveopt was built without NVSHMEM"),
]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_equals_the_reference_bitwise_alike_and_from_graphs(world: int) -> None:
    assert run_ranks(world, "tests.gpu.hosts_ranks").count("every stage passed") == world


def test_hosts_of_several_ranks_of_one_process_agree_with_the_reference() -> None:
    said = run_program("tests.gpu.one_process_hosts", timeout_s=600)
    assert "agree with the reference and on all ranks" in said


@pytest.mark.parametrize("transfer", ["packets", "flagged rows"])
def test_a_rank_that_leaves_a_call_out_is_named(transfer: str) -> None:
    with trapping(range(2)):
        said = run_ranks(2, "tests.gpu.hosts_ranks", "--fault", transfer)
    assert "rank 0 raised" in said and "peer rank 1 did not signal within 2 s (slot host step 0 of" in said, said


def test_the_rule_is_chosen_by_what_calibrate_measured(tmp_path: Path) -> None:
    """A coarse look, on the profile of such GPUs; then a compiled block."""
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    base = next((base for word, base in (("H200", "h200x4"), ("H100", "h100x2")) if names and word in names[0]), None)
    if base is None:
        pytest.skip(f"no profile of {names or 'a GPU that is not there'} to renew")
    profile = str(tmp_path / "hosts.json")
    said = run_ranks(2, "tests.gpu.calibrate_hosts", "--quick", "--base", base, "--output", profile)
    assert f"the kernel and the library between 2 hosts, all else kept from {base}" in said
    assert run_ranks(2, "tests.gpu.hosts_compiled_ranks", "--profile", profile).count("compiled as in eager") == 2
