"""How tests start ranks on GPUs, and when they cannot."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from tests.gpu.programs import Ended, Ranks, start
from tests.gpu.shared_gpu import SHARED
from weaveopt.cli.calibrate import NO_MULTICAST
from weaveopt.fabrics.traits import NativePart, is_built

ENVIRONMENT = {
    **os.environ,
    **NO_MULTICAST,
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "OMP_NUM_THREADS": "1",
}

needs_cuda_part = pytest.mark.skipif(not is_built(NativePart.CUDA), reason="weaveopt was built without CUDA")


def run_ranks(world: int, program: str, *arguments: str, timeout_s: float = 300.0) -> str:
    """Runs `world` ranks of `program`, one per GPU, and returns what they print; skips the test if there are fewer GPUs
    and they may not be shared."""
    name, given = program, arguments
    if torch.cuda.device_count() < world:
        if not torch.cuda.is_available() or os.environ.get(SHARED) != "1":
            pytest.skip(f"needs {world} CUDA GPUs, found {torch.cuda.device_count()}")
        name, given = "tests.gpu.shared_gpu", (program, *arguments)
    return _printed(Ranks([given] * world, name, ENVIRONMENT).end(timeout_s))


@contextmanager
def trapping(devices: Iterable[int]) -> Iterator[None]:
    """Programs whose kernels end with a trap, on these GPUs, run here: one after the other on each of them.

    Where kernels of several processes trapped on one GPU at the same time, the driver did not end one of them: its
    process waited in cudaDeviceSynchronize for good.
    """
    with ExitStack() as locked:
        for device in sorted(devices):
            path = Path(tempfile.gettempdir(), f"weaveopt-tests-trapping-{device}")
            fcntl.flock(locked.enter_context(open(path, "w")), fcntl.LOCK_EX)
        yield


def run_program(name: str, *arguments: str, timeout_s: float = 300.0) -> str:
    """Runs a program that uses one GPU or none, and returns what it prints."""
    return _printed([start(name, arguments, ENVIRONMENT).end(timeout_s)])


def _printed(ended: Sequence[Ended]) -> str:
    told = "\n".join(
        f"--- rank {rank}, exit code {each.code}\n{each.out[-2000:]}{each.err[-4000:]}"
        for rank, each in enumerate(ended)
    )
    assert all(each.code == 0 for each in ended), told
    return "".join(each.out for each in ended)
