"""GEMMs whose tiles leave while the GEMM runs, on two Hopper GPUs: against the reference, and in CUDA graphs."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.gpu.launch import ENVIRONMENT, ROOT, needs_cuda_part
from tests.ranks import free_port

WORLD = 2


@needs_cuda_part
@pytest.mark.multigpu
def test_tiles_equal_the_reference() -> None:
    if torch.cuda.device_count() < WORLD:
        pytest.skip(f"needs {WORLD} CUDA GPUs, found {torch.cuda.device_count()}")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip(f"needs compute capability 9.0, found {torch.cuda.get_device_capability()}")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(WORLD)]
    command += ["--master-port", str(free_port()), "-m", "tests.gpu.tiles_ranks"]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    assert done.stdout.count("tiles agree") == WORLD
