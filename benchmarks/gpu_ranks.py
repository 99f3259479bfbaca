"""What the GPU benchmarks share: the ranks of one host, captured steps, and their times on the slowest rank."""

from __future__ import annotations

import os
import random
import socket
import statistics
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from weaveopt.cli.calibrate import NO_MULTICAST
from weaveopt.measure import clock
from weaveopt.measure.clock import barrier as barrier

Step = Callable[[], object]

GROUP_TIMEOUT_S = 180


@dataclass(frozen=True)
class Place:
    """This process among the ranks."""

    rank: int
    world: int
    device: torch.device
    group: str = "0"
    """Name of the process group of all ranks."""

    def say(self, text: str = "") -> None:
        """Prints on rank 0."""
        if self.rank == 0:
            print(text, flush=True)


def start(module: str, num_ranks: int, arguments: Sequence[str]) -> int:
    """Runs `python -m module arguments` as `num_ranks` ranks of this host; returns torchrun's exit code."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = ["--nproc-per-node", str(num_ranks), "--master-addr", "127.0.0.1", "--master-port", str(port)]
    command = [sys.executable, "-m", "torch.distributed.run", *launch, "-m", module, *arguments]
    return subprocess.call(command, env={**os.environ, **NO_MULTICAST})


def run_and_exit(program: Callable[[Place], None]) -> None:
    """Runs `program` as a rank that torchrun started, and ends the process.

    It ends without any teardown: destroying an NCCL communicator hangs while a captured graph that uses it lives.
    """
    code = 0
    try:
        program(_join())
        barrier()  # peers may still read this rank's memory
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _join() -> Place:
    os.environ.update(NO_MULTICAST)
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device found: run this benchmark with --device cpu, or on a GPU host")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    return Place(dist.get_rank(), dist.get_world_size(), device, dist.distributed_c10d._get_default_group().group_name)


def slowest(values: Sequence[float]) -> list[float]:
    """Of each value the largest of all ranks."""
    found = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return [float(value) for value in found]


def capture(step: Step, pool: tuple[int, int]) -> torch.cuda.CUDAGraph:
    """`step`, run once and then captured, once all ranks are there."""
    barrier()
    return clock.capture(step, pool)


def order_of(steps: Iterable[str], turn: int) -> list[str]:
    """Of a round, the same on all ranks, and another one in each: at the power limit the clock is what the step before
    has left."""
    names = list(steps)
    return random.Random(turn).sample(names, len(names))


def median_us(
    steps: Mapping[str, Step], restore: Step, num_rounds: int, num_replays: int, settle: torch.Tensor
) -> dict[str, float]:
    """Microseconds of each step by name: median of `num_rounds * num_replays` times, and of the ranks the largest.

    Steps take turns in rounds (see `order_of`); a round more comes first and does not count. Before each timed step
    `restore` runs and the ranks meet on the device in an all-reduce of `settle` (a few bytes).
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(num_rounds + 1):
        for name in order_of(steps, turn):
            barrier()
            torch.cuda._sleep(clock.HEAD_START_CYCLES)
            events = []
            for _ in range(num_replays if turn else 1):
                restore()
                dist.all_reduce(settle)
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                steps[name]()
                end.record()
                events.append((begin, end))
            torch.cuda.synchronize()
            if turn:
                times[name] += [begin.elapsed_time(end) * 1e3 for begin, end in events]
    medians = slowest([statistics.median(found) for found in times.values()])
    return dict(zip(times, medians, strict=True))


def replayed_us(
    graphs: Mapping[str, torch.cuda.CUDAGraph], num_rounds: int, num_replays: int, device: torch.device
) -> dict[str, float]:
    """The same of graphs, which are given back."""
    replays = {name: graph.replay for name, graph in graphs.items()}
    us = median_us(replays, lambda: None, num_rounds, num_replays, torch.zeros(1, device=device))
    barrier()
    for graph in graphs.values():
        graph.reset()
    return us


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Right-aligned columns of plain text."""
    widths = [max(len(row[index]) for row in [columns, *rows]) for index in range(len(columns))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [columns, *rows]]
    return "\n".join([title, *lines])
