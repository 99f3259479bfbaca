"""The examples on emulated hosts, started on every host by the README's own command lines, each compared with eager.

    python -m tests.hosts.demo [--hosts 2 3 4] [--ranks 1 2] [--launchers accelerate torchrun]      (make hosts-demo)

Without `--launchers` they take turns. Exits with 1 if a run does not agree with eager.
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

from tests.emulated_hosts import ROOT, Host, Link, finish, hosts, missing

PORT = 29500
LIMIT_S = 200.0
LINK = Link(delay_us=50, gbit_per_s=10)
LAUNCHERS = ("accelerate", "torchrun")
HEAD = f"{'hosts x ranks':14} {'launcher':10} {'program':14} {'agrees':7} {'collectives':26} {'time':44} {'took':>6}"


@dataclass(frozen=True)
class Program:
    name: str
    arguments: tuple[str, ...]
    agrees: str
    """What it prints where it agrees with eager; its exit code says so too."""
    speed: str
    """The line of its times."""


GENERATE = Program(
    "generate.py", ("--hidden", "128", "--layers", "2", "--new-tokens", "8", "--rounds", "1"),
    r"tokens agree with eager", r"tokens per second: (eager \d+, inductor \d+, weave \d+)",
)  # fmt: skip
TRAIN = Program(
    "train_step.py", ("--hidden", "128", "--layers", "2", "--rounds", "3"), r"largest relative difference [\d.e-]+ ",
    r"a step: (eager [\d.]+ ms, weave [\d.]+ ms)",
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
    collectives: str
    speed: str
    seconds: float
    output: str
    """Of every host."""

    def line(self) -> str:
        run = self.run
        shape = f"{run.hosts} x {run.ranks}"
        return (
            f"{shape:14} {run.launcher:10} {run.program.name:14} {'yes' if self.agrees else 'NO':7} "
            f"{self.collectives:26} {self.speed:44} {self.seconds:4.0f} s"
        )


def ended(run: Run) -> Ended:
    """Runs it on hosts of its own. Emulated hosts share a kernel, so their ranks are told which one they are on."""
    begin = time.monotonic()
    with hosts(run.hosts, LINK) as made:
        processes = []
        for index, host in enumerate(made):
            variables = {
                **os.environ, "WEAVE_HOST": host.name, "GLOO_SOCKET_IFNAME": host.interface, "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "", "TORCH_CPP_LOG_LEVEL": "ERROR",
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
    collectives = re.findall(r"^\d+ collectives: (\d+ rewritten, \d+ left)", first, re.MULTILINE)
    return Ended(run, agrees, "; ".join(collectives), speed[1] if speed else "", seconds, output)


def runs(num_hosts: Sequence[int], ranks: Sequence[int], launchers: Sequence[str]) -> Iterator[Run]:
    """All launchers that are asked for; where none is, one after the other."""
    turns = itertools.cycle(LAUNCHERS)
    for count, of_host in itertools.product(num_hosts, ranks):
        for program in (GENERATE, TRAIN):
            for launcher in launchers or (next(turns),):
                yield Run(count, of_host, launcher, program)
        next(turns)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", nargs="*", type=int, default=[2, 3, 4])
    parser.add_argument("--ranks", nargs="*", type=int, default=[1, 2], help="on each host")
    parser.add_argument("--launchers", nargs="*", choices=LAUNCHERS, default=[])
    asked = parser.parse_args()
    if why := missing(LINK):
        print(f"no hosts can be emulated: {why}")
        return 1
    print(f"{LINK.delay_us:g} us from host to host, {LINK.gbit_per_s:g} Gbit/s; {os.cpu_count()} cores for all ranks\n")
    print(HEAD, flush=True)
    bad = []
    for run in runs(asked.hosts, asked.ranks, asked.launchers):
        found = ended(run)
        print(found.line(), flush=True)
        if not found.agrees:
            bad.append(found)
    for found in bad:
        print(f"\n{found.line()}\n{found.output[-6000:]}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
