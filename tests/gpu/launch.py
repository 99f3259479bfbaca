"""How tests start ranks on GPUs, and when they cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.shared_gpu import SHARED
from tests.ranks import free_port
from weaveopt.cli.calibrate import NO_MULTICAST
from weaveopt.fabrics.traits import NativePart, is_built

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    **os.environ,
    **NO_MULTICAST,
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "OMP_NUM_THREADS": "1",
}

needs_cuda_part = pytest.mark.skipif(not is_built(NativePart.CUDA), reason="weaveopt was built without CUDA")


def run_ranks(world: int, program: str, *arguments: str, timeout_s: float = 300.0) -> str:
    """What `world` ranks of `program` print, on a GPU each; skips where there are fewer and they may not share."""
    shared: tuple[str, ...] = ()
    if torch.cuda.device_count() < world:
        if not torch.cuda.is_available() or os.environ.get(SHARED) != "1":
            pytest.skip(f"needs {world} CUDA GPUs, found {torch.cuda.device_count()}")
        shared = ("tests.gpu.shared_gpu",)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world)]
    command += ["--master-port", str(free_port()), "-m", *shared, program, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return done.stdout
