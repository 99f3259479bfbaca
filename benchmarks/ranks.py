"""Ranks of one host that a benchmark runs on: how they are launched, joined and ended, and what they agree on."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from weaveopt.cli.calibrate import NO_MULTICAST
from weaveopt.measure.clock import barrier as barrier

GROUP_TIMEOUT_S = 180


@dataclass(frozen=True)
class Place:
    """This process among the ranks."""

    rank: int
    world: int
    device: torch.device
    group: str = "0"
    """Name of the process group of all ranks."""
    quick: bool = False
    """Steps are timed in few rounds, only to show that they run."""

    def say(self, text: str = "") -> None:
        """Prints on rank 0."""
        if self.rank == 0:
            print(text, flush=True)


def start(module: str, num_ranks: int, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
    """Runs `python -m module arguments` as `num_ranks` ranks of this host; returns torchrun's exit code."""
    # The launcher's own store gets a port from the system, and is the ranks' too: nobody else can take it meanwhile.
    launch = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(num_ranks)]
    command = [sys.executable, "-m", "torch.distributed.run", *launch, "-m", module, *arguments]
    variables = {"OMP_NUM_THREADS": "1", **os.environ, **NO_MULTICAST, **(environment or {})}
    return subprocess.call(command, env=variables)


def run_and_exit(program: Callable[[Place], None], device: str = "cuda", quick: bool = False) -> None:
    """Runs `program` as a rank that torchrun started, and ends the process.

    It ends without any teardown: destroying an NCCL communicator hangs while a captured graph that uses it lives.
    """
    code = 0
    try:
        program(_join(device, quick))
        barrier()  # peers may still read this rank's memory
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _join(kind: str, quick: bool) -> Place:
    os.environ.update(NO_MULTICAST)
    device = torch.device(kind)
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise SystemExit("no CUDA device found: run this on a GPU host")
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo", timeout=timeout)
    if kind == "cpu" and dist.get_world_size() > 1:
        torch.set_num_threads(1)
    group = dist.distributed_c10d._get_default_group().group_name
    return Place(dist.get_rank(), dist.get_world_size(), device, group, quick)


def slowest(values: Sequence[float]) -> list[float]:
    """Largest of each value over all ranks."""
    found = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return [float(value) for value in found]
