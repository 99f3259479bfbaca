"""The fused op between GPUs of one machine that take themselves for hosts (`WEAVE_HOST`), over NVSHMEM."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.gpu.launch import ENVIRONMENT, ROOT
from tests.ranks import free_port
from weaveopt.fabrics.traits import NativePart, is_built

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(not is_built(NativePart.NVSHMEM), reason="weaveopt was built without NVSHMEM"),
]


def run(world: int, *arguments: str) -> str:
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} CUDA GPUs, found {torch.cuda.device_count()}")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world)]
    command += ["--master-port", str(free_port()), "-m", "tests.gpu.hosts_ranks", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return done.stdout


@pytest.mark.parametrize("world", [2, 3, 4])
def test_equals_the_reference_bitwise_alike_and_from_graphs(world: int) -> None:
    assert run(world).count("every stage passed") == world


def test_a_rank_that_leaves_a_call_out_is_named() -> None:
    said = run(2, "--fault")
    assert "rank 0 raised" in said and "peer rank 1 did not signal within 2 s (slot host step 0 of" in said, said
