"""Outgrown arenas of GPUs are given back, and kept where captured graphs hold them; `arena_bytes` makes room."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.gpu.launch import ENVIRONMENT, ROOT, needs_cuda_part
from tests.ranks import free_port


@needs_cuda_part
@pytest.mark.multigpu
def test_static_prefills_keep_one_arena() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", str(free_port()), "-m", "tests.gpu.arena_ranks"]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=480, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    assert done.stdout.count("arenas as expected") == 2
    sys.stdout.write(done.stdout)
