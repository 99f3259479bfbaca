"""One rank on an emulated host, and what befalls it: what it says about how that ended."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from tests.emulation.emulated_hosts import Network
from tests.graphs.tolerances import KERNEL, assert_close
from tests.hosts.faults import FAULTS, Fault, Moment
from tests.ranks.tcp_ranks import make_call, partial_of
from weaveopt.errors import WeaveError
from weaveopt.fabrics import connections, tcp, topology
from weaveopt.ops.reduction.buffers import memory_plan
from weaveopt.ops.reduction.call import ReductionCall
from weaveopt.ops.reduction.operands import EpilogueOperands
from weaveopt.ops.reduction.reference import reference

NUM_STEPS = 4
STEP = 2
"""The one that faults within a call strike."""
WIDE, LONG = 4096, 192
"""Elements and rows of a call that takes its time: 3 MiB a rank."""
STRUCK, PORTS, ENDED = "struck", "ports", "ended"
"""Files: when the fault struck; who listens where; a rank has reported its end."""
_LAST_WAITS_S = 20.0
STRANGER_S = 5.0
"""Time that a connecting process has to identify itself; until then a rank may listen to it."""


@dataclass(frozen=True)
class Case:
    fault: str
    hosts: int
    ranks_per_host: int
    folder: str
    """Folder of the files by which ranks and the test communicate outside of the network."""

    @property
    def world(self) -> int:
        return self.hosts * self.ranks_per_host

    @property
    def struck_host(self) -> int:
        return 0 if FAULTS[self.fault].strikes_first else self.hosts - 1

    def is_struck(self, rank: int) -> bool:
        return rank // self.ranks_per_host == self.struck_host


@dataclass(frozen=True)
class Said:
    """How a rank ended."""

    error: str
    """`Type: message`; empty where every step was right."""
    later: str
    """Error of the same step when repeated."""
    began_at: float
    """When the part that failed began, on the machine's monotonic clock."""
    ended_at: float
    connected_s: float
    """Seconds of reserving in which this rank did not sleep."""
    steps: tuple[bytes, ...]
    held: int
    """Sockets beyond those that there were before, at the end."""


class _Rank:
    def __init__(self, rank: int, case: Case, network: Network) -> None:
        self.rank, self.case, self.network = rank, case, network
        self.fault: Fault = FAULTS[case.fault]
        self.began_at = 0.0
        self.slept_s = 0.0

    def reach(self, moment: Moment) -> None:
        if moment is not self.fault.moment or not self.case.is_struck(self.rank):
            return
        if self.rank % self.case.ranks_per_host == 0 and self.fault.strike is not None:
            Path(self.case.folder, STRUCK).write_text(str(time.monotonic()))
            self.fault.strike(self.network, self.case.struck_host)
        time.sleep(self.fault.pauses_s)
        self.slept_s += self.fault.pauses_s

    def call(self) -> ReductionCall:
        call = make_call(self.case.world, self.case.hosts, timeout_s=self.fault.call_timeout_s)
        if self.fault.moment is not Moment.TRANSFER:
            return call
        return replace(call, hidden=WIDE, max_tokens=LONG, table=(replace(call.table[0], max_tokens=LONG),))

    def partials(self, step: int) -> list[torch.Tensor]:
        if self.fault.moment is Moment.TRANSFER:
            seeds = [torch.Generator().manual_seed(100 * step + rank) for rank in range(self.case.world)]
            return [torch.randn(LONG, WIDE, generator=seed) for seed in seeds]
        return [partial_of(rank, 7, step, torch.float32) for rank in range(self.case.world)]

    def reserve(self) -> None:
        timeout_s = self.fault.meeting_timeout_s
        where = topology.discover("0", timeout_s)
        self.reach(Moment.RESERVING)
        self.began_at = time.monotonic()
        tcp.reserve(where, memory_plan("0", [self.call()]), 0, timeout_s)

    def step(self, number: int) -> bytes:
        call, partials = self.call(), self.partials(number)
        weight = torch.linspace(0.5, 1.5, call.hidden)
        want = reference(partials, EpilogueOperands(weight=weight), call)
        if number == STEP:
            for moment in (Moment.CALL, Moment.TRANSFER):
                self.reach(moment)
        self.began_at = time.monotonic()
        got = torch.ops.weave.all_reduce_norm(
            partials[self.rank], None, None, None, None, None, weight, None, call.encode()
        )
        for each, expected in zip(got, want, strict=True):
            assert_close(each, expected, KERNEL, f"step {number}")
        return b"".join(each.view(torch.uint8).numpy().tobytes() for each in got)


def _sockets() -> int:
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
        except OSError:
            continue
    return found


def _tells_its_port(rank: int, folder: str) -> None:
    """Strangers read it there."""
    plain: Callable[..., object] = connections.socket.create_server

    def telling(address: tuple[str, int], **options: object) -> object:
        listener = plain(address, **options)
        with Path(folder, PORTS).open("a") as ports:
            ports.write("{} {} {}\n".format(rank, *listener.getsockname()[:2]))  # type: ignore[attr-defined]
        return listener

    connections.socket.create_server = telling  # type: ignore[assignment]


def _strikes_while_connecting(this: _Rank) -> None:
    plain = connections._ConnectionSetup.hold

    def struck(setup: connections._ConnectionSetup, *arguments: object) -> None:
        this.reach(Moment.CONNECTING)
        plain(setup, *arguments)  # type: ignore[arg-type]

    connections._ConnectionSetup.hold = struck  # type: ignore[assignment, method-assign]


def run(rank: int, case: Case, network: Network) -> Said:
    this = _Rank(rank, case, network)
    _tells_its_port(rank, case.folder)
    _strikes_while_connecting(this)
    dist.barrier()
    before = _sockets()
    steps: list[bytes] = []
    error, connected_s = "", 0.0
    try:
        begin = time.monotonic()
        this.reserve()
        connected_s = time.monotonic() - begin - this.slept_s
        for number in range(NUM_STEPS):
            steps.append(this.step(number))
    except WeaveError as failure:
        error = f"{type(failure).__name__}: {failure}"
    began_at, ended_at = this.began_at, time.monotonic()
    later = _once_more(this) if error else ""
    tcp.release("0")
    deadline = time.monotonic() + STRANGER_S + 0.5
    while (held := _sockets() - before) > 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    Path(case.folder, f"{ENDED}-{rank}").touch()
    if rank == 0:  # it has the store, which others may still ask
        _wait_for_others(case)
    return Said(error, later, began_at, ended_at, connected_s, tuple(steps), held)


def _once_more(this: _Rank) -> str:
    try:
        this.step(NUM_STEPS)
    except WeaveError as error:
        return f"{type(error).__name__}: {error}"
    return "a result"


def _wait_for_others(case: Case) -> None:
    are_killed = FAULTS[case.fault].itself is None
    ranks = [rank for rank in range(case.world) if not (are_killed and case.is_struck(rank))]
    deadline = time.monotonic() + _LAST_WAITS_S
    while time.monotonic() < deadline:
        if all(Path(case.folder, f"{ENDED}-{rank}").exists() for rank in ranks):
            return
        time.sleep(0.02)
