"""The examples on emulated hosts, started on every host by the README's own command lines, each compared with eager.

    python -m tests.hosts.demo [--hosts 2 3 4] [--ranks 1 2] [--all]      (make hosts-demo)

Launchers take turns, and from 6 ranks on the training step is left out; `--all` has every program started by every
launcher on every number of ranks. Exits with 1 if a run does not agree with eager.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.emulation.emulated_hosts import ROOT, Host, Link, finish, hosts, missing

PORT = 29500
LIMIT_S = 400.0
MOST_TRAINING = 4
"""Ranks that make a training step, unless all runs are asked for: each costs two cores a quarter of a minute."""
LINK = Link(delay_us=50, gbit_per_s=10)
LAUNCHERS = ("accelerate", "torchrun")
COLUMNS = (("hosts x ranks", 14), ("launcher", 10), ("program", 14), ("agrees", 7), ("collectives", 21), ("speed", 52))


@dataclass(frozen=True)
class Program:
    name: str
    arguments: tuple[str, ...]
    agrees: str
    """Line that it prints if it agrees with eager; its exit code says so too."""
    speed: str
    """The line of its times."""


GENERATE = Program(
    "generate.py", ("--hidden", "128", "--layers", "2", "--new-tokens", "8", "--rounds", "1"),
    r"tokens agree with eager", r"(tokens per second): (eager \d+, inductor \d+, weave \d+)",
)  # fmt: skip
TRAIN = Program(
    "train_step.py", ("--hidden", "128", "--layers", "2", "--rounds", "3"), r"largest relative difference [\d.e-]+ ",
    r"(a step): (eager [\d.]+ ms, weave [\d.]+ ms)",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    hosts: int
    ranks: int
    """On each host."""
    launcher: str
    program: Program

    def command(self, index: int, first: Host) -> list[str]:
        """As it is typed on host `index`."""
        script = [f"examples/{self.program.name}", *self.program.arguments]
        if self.launcher == "accelerate":
            return [
                sys.executable, "-m", "accelerate.commands.launch", "--config_file",
                "examples/configs/accelerate_two_hosts.yaml", "--num_machines", str(self.hosts), "--num_processes",
                str(self.hosts * self.ranks), "--machine_rank", str(index), "--main_process_ip", first.address, *script,
            ]  # fmt: skip
        return [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", str(self.hosts), "--node-rank", str(index),
            "--nproc-per-node", str(self.ranks), "--master-addr", first.address, "--master-port", str(PORT), *script,
        ]  # fmt: skip


@dataclass(frozen=True)
class Ended:
    run: Run
    agrees: bool
    rewritten: int
    """Collectives of all graphs."""
    left: int
    speed: str
    seconds: float
    output: str
    """Output of every host."""

    def line(self) -> str:
        run = self.run
        shape, collectives = f"{run.hosts} x {run.ranks}", f"{self.rewritten} rewritten, {self.left} left"
        cells = [shape, run.launcher, run.program.name, "yes" if self.agrees else "NO", collectives, self.speed]
        return _line(cells, f"{self.seconds:.0f} s")


def _line(cells: Sequence[str], last: str) -> str:
    return " ".join([f"{cell:{width}}" for cell, (_, width) in zip(cells, COLUMNS, strict=True)] + [f"{last:>5}"])


def ended(run: Run) -> Ended:
    """Runs it on hosts of its own. Emulated hosts share a kernel, so WEAVE_HOST names the host of each rank."""
    begin = time.monotonic()
    with hosts(run.hosts, LINK) as made:
        processes = []
        for index, host in enumerate(made):
            variables = {
                **os.environ, "WEAVE_HOST": host.name, "GLOO_SOCKET_IFNAME": host.interface, "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "", "TORCH_CPP_LOG_LEVEL": "ERROR",
                "TORCHINDUCTOR_VEC_ISA_OK": "1",
            }  # fmt: skip
            processes.append(
                subprocess.Popen(
                    host.command(*run.command(index, made[0])), cwd=ROOT, env=variables, stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT, text=True,
                )
            )  # fmt: skip
        found = finish(processes, LIMIT_S)
    seconds = time.monotonic() - begin
    output = "\n".join(f"--- host {index}: exit code {code}\n{out}" for index, (code, out) in enumerate(found))
    first = found[0][1]
    agrees = all(code == 0 for code, _ in found) and re.search(run.program.agrees, first) is not None
    speed = re.search(run.program.speed, first)
    graphs = re.findall(r"^\d+ collectives: (\d+) rewritten, (\d+) left", first, re.MULTILINE)
    rewritten, left = (sum(int(graph[part]) for graph in graphs) for part in (0, 1))
    return Ended(run, agrees, rewritten, left, " ".join(filter(None, speed.groups())) if speed else "", seconds, output)


def runs(num_hosts: Sequence[int], ranks: Sequence[int], everything: bool) -> Iterator[Run]:
    turns = itertools.cycle(LAUNCHERS)
    for count, of_host in itertools.product(num_hosts, ranks):
        for program in (GENERATE, TRAIN):
            launcher = next(turns)
            if everything or program is GENERATE or count * of_host <= MOST_TRAINING:
                for each in LAUNCHERS if everything else (launcher,):
                    yield Run(count, of_host, each, program)
        next(turns)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", nargs="*", type=int, default=[2, 3, 4])
    parser.add_argument("--ranks", nargs="*", type=int, default=[1, 2], help="on each host")
    parser.add_argument("--all", action="store_true", help="every program by every launcher")
    asked = parser.parse_args()
    if why := missing(LINK):
        print(f"no hosts can be emulated: {why}")
        return 1
    print(f"{LINK.delay_us:g} us from host to host, {LINK.gbit_per_s:g} Gbit/s; {os.cpu_count()} cores for all ranks\n")
    print(_line([name for name, _ in COLUMNS], "took"), flush=True)
    bad = []
    for run in runs(asked.hosts, asked.ranks, asked.all):
        found = ended(run)
        print(found.line(), flush=True)
        if not found.agrees:
            bad.append(found)
    for found in bad:
        print(f"\n{found.line()}\n{found.output[-6000:]}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
