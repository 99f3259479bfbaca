"""A compiled block on GPUs runs on the fabric `peer`, and computes what eager computes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.gpu.launch import ENVIRONMENT, ROOT, needs_cuda_part
from tests.ranks import free_port


@needs_cuda_part
@pytest.mark.multigpu
def test_a_compiled_block_runs_on_peer() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", str(free_port()), "-m", "tests.gpu.compiled_ranks"]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    assert done.stdout.count("compiled as in eager") == 2
