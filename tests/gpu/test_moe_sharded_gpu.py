"""`weave::expert_exchange` on GPUs of one host: against the reference, from CUDA graphs, and what travels."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.gpu.launch import ENVIRONMENT, ROOT, needs_cuda_part
from tests.ranks import free_port


@needs_cuda_part
@pytest.mark.multigpu
@pytest.mark.parametrize("world", [2, 3, 4])
def test_sharded_tokens_equal_the_reference(world: int) -> None:
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} CUDA GPUs, found {torch.cuda.device_count()}")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world)]
    command += ["--master-port", str(free_port()), "-m", "tests.gpu.sharded_ranks"]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    assert done.stdout.count("sharded tokens agree") == world
