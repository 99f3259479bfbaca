"""The link between hosts of CPU ranks: latency, bandwidth and what a message costs, and the library's all-reduce on it.

Rank `l` of the first host and rank `l` of the second have a TCP connection, made as fabric `tcp` makes its own. One
pair plays ping-pong and sends bursts of little messages; then all pairs send and receive at once, because ranks of a
host share its link. Every rank takes part in the library's all-reduce.
"""

from __future__ import annotations

import datetime
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from weaveopt.cost_model import Cost, Machine
from weaveopt.cost_model.between_hosts import ring_cost, tree_cost
from weaveopt.cost_model.collectives import fabric_costs
from weaveopt.cost_model.machine import MEASURED, Link, Origin
from weaveopt.errors import WeaveError
from weaveopt.fabrics import connections
from weaveopt.fabrics import topology as topologies
from weaveopt.fabrics.hosts import ranks_by_host
from weaveopt.fabrics.topology import Topology
from weaveopt.measure import base, draft, fit
from weaveopt.measure.cases import hosts_contention
from weaveopt.measure.cases.collectives import collective
from weaveopt.measure.cases.hosts_contention import HostContention
from weaveopt.measure.clock import Launch, Sample, barrier, sample_of
from weaveopt.measure.ranks import subgroup
from weaveopt.measure.session import CalibrationSession, Rows
from weaveopt.records.candidate import Fabric
from weaveopt.wording import counted

TIMEOUT_S = 60.0
LITTLE_BYTES = 64
"""Size of one message of a burst."""
NUM_BURSTS = 25
NUM_FITS = 10
ARRIVES_S = 0.002
"""Time longer than a burst is in transit."""
PING_BYTES = (64, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10)
BURSTS = (1, 2, 4, 8, 16, 32)
EXCHANGE_BYTES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
MOST_BYTES = 64 << 20
"""Maximum size of an exchange: sizes grow up to it until bandwidth dominates."""
REDUCED_BYTES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
MOST_OVERHEAD = 0.45
"""Largest share of a message's time that is taken to be work of one of its ends, on hosts of one machine."""
ORIGIN, LIBRARY_ORIGIN = "between", "between.gloo"


def host_ranks(topology: Topology) -> tuple[tuple[int, ...], ...]:
    """Ranks by host, in the order of their first ranks. Raises `WeaveError` where hosts have different numbers."""
    ranks = ranks_by_host(topology)
    counts = [len(each) for each in ranks]
    if len(set(counts)) > 1:
        raise WeaveError(f"calibrate between hosts: hosts have {counts} ranks; start equally many on each")
    return ranks


@dataclass(frozen=True)
class _Form:
    """One algorithm of the library: what it takes whatever the link, and its steps and traffic on a link of 1 us and
    1 byte a us."""

    fixed_us: float
    steps: Cost

    def us(self, num_bytes: float, latency_us: float, us_per_byte: float) -> float:
        return self.fixed_us + self.steps.latency_us * latency_us + self.steps.transfer_us * num_bytes * us_per_byte


@dataclass
class HostLink:
    """Measurements between the first two hosts, and of the library among all of them."""

    hosts: int
    ranks_per_host: int
    pings: Rows = field(default_factory=list)
    """(bytes, from one host to the other): half of what there and back takes."""
    bursts: Rows = field(default_factory=list)
    """(messages, mean of what they take of their sender and of their receiver)."""
    exchanges: Rows = field(default_factory=list)
    """(bytes, time in which every rank of a host has sent and received them)."""
    reduced: Rows = field(default_factory=list)
    """(bytes, time of the library's all-reduce among all ranks)."""
    contention: HostContention | None = None
    """Computation while the library's all-reduce is in flight."""
    on_one_machine: bool = False
    """Hosts are namespaces of one machine, whose kernel delivers a message within the sender's call."""

    def measure(self, session: CalibrationSession, topology: Topology) -> None:
        """Every rank calls it."""
        by_host = host_ranks(topology)
        self.on_one_machine = topology.num_machines < self.hosts
        own = next(index for index, ranks in enumerate(by_host) if session.rank in ranks)
        local = by_host[own].index(session.rank)
        opposite = by_host[1 - own][local] if own < 2 else None
        channel = topologies.exchange(topology.group.name, TIMEOUT_S)
        wires = connections.connect(channel, [] if opposite is None else [opposite], TIMEOUT_S)
        wire = None if opposite is None else _ready(wires[opposite])
        first = wire if local == 0 else None
        try:
            pings = _steps(session, "latency between hosts", PING_BYTES, lambda n: _ping(first, own == 0, n))
            self.pings = [(size, Sample(sample.us / 2, sample.spread)) for size, sample in pings]
            for count in BURSTS:
                session.show_progress("messages between hosts", len(self.bursts), len(BURSTS))
                self.bursts.append((count, _burst(session, first, own == 0, count)))
            self.exchanges = _steps(session, "bandwidth between hosts", EXCHANGE_BYTES, lambda n: _exchange(wire, n))
            while not shows_bytes(self.exchanges) and self.exchanges[-1][0] < MOST_BYTES:
                size = 4 * self.exchanges[-1][0]
                self.exchanges.append((size, session.clock.together(_exchange(wire, size), 100.0)))
        finally:
            if wire is not None:
                wire.close()
        everyone = subgroup(session.world, session.device)
        self.reduced = _steps(
            session,
            f"all_reduce of {self.hosts} hosts",
            REDUCED_BYTES,
            lambda n: collective(everyone, "all_reduce", n),
        )
        self.contention = HostContention()
        self.contention.measure(session)

    def link(self) -> Link:
        """α, β and o of the link: `α + 2 o + bytes / β` a message, `G bytes / β` where all `G` ranks send at once.

        Least squares of relative errors. Raises `WeaveError` where the times contradict that.
        """
        step_us, _ = _line("ping-pong", self.pings)
        _, overhead_us = _line("bursts of messages", self.bursts)
        _, us_per_byte = _line("exchanges of all ranks at once", self.exchanges)
        if self.on_one_machine:
            overhead_us = min(overhead_us, MOST_OVERHEAD * step_us)
        latency_us = step_us - 2 * overhead_us
        if latency_us <= 0:
            raise WeaveError(
                f"calibrate between hosts: a message takes {step_us:.1f} us, yet costs each of its two ends "
                f"{overhead_us:.1f} us, which leaves a latency of {latency_us:.1f} us: measure again on quiet hosts"
            )
        rate = self.ranks_per_host / us_per_byte * 1e6
        return Link(ORIGIN, round(latency_us, 3), round(rate, -3), round(overhead_us, 3))

    def library(self, before: Machine) -> Link:
        """α and β with which the price of the library's all-reduce, a ring's or a tree's, is nearest to its time.

        Each size is taken as of the algorithm that is priced lower with the α and β found so far.
        """
        world, hosts, local = self.hosts * self.ranks_per_host, self.hosts, self.ranks_per_host
        slowdown = before.oversubscription(world, hosts)
        launch_us, link = before.memory.floor_us, fabric_costs(before, Fabric.LIBRARY).link
        unit = Link("", 1.0, 1e6)  # steps, and microseconds a byte
        ring = _Form(launch_us, ring_cost(1.0, world, unit))
        tree_us = launch_us + 2 * (local - 1) * link.latency_us
        tree = _Form(tree_us, tree_cost(1.0, local, hosts, Link("", 0.0, 1e6), unit))
        times_us = [(size, sample.us / slowdown) for size, sample in self.reduced]
        forms, latency_us, us_per_byte = [ring] * len(times_us), 0.0, 0.0
        for _ in range(NUM_FITS):
            latency_us, us_per_byte = fit.relative_plane(
                [
                    (form.steps.latency_us, form.steps.transfer_us * size, us - form.fixed_us)
                    for form, (size, us) in zip(forms, times_us, strict=True)
                ]
            )
            # A time below what a tree takes within the host is no tree's.
            forms = [
                min((ring, tree), key=lambda form, size=size: form.us(size, latency_us, us_per_byte))  # type: ignore[misc]
                if tree.fixed_us < us
                else ring
                for size, us in times_us
            ]
        if latency_us <= 0 or us_per_byte <= 0:
            raise _contradiction("the library's all-reduce", self.reduced, latency_us, us_per_byte)
        return Link(LIBRARY_ORIGIN, round(latency_us, 3), round(1e6 / us_per_byte, -3))

    def renewed(self, before: Machine, name: str, device: torch.device) -> Machine:
        """`before` with the link as it was measured, under `name`."""
        where = f"{self.hosts} hosts of {draft.host(device, self.ranks_per_host)}"
        today = datetime.date.today().isoformat()
        said = f"torch {torch.__version__}, median, slowest rank"
        samples = [sample for rows in (self.pings, self.bursts, self.exchanges) for _, sample in rows]
        what = (
            f"TCP of {counted(self.ranks_per_host, 'rank')} a host: ping-pong, bursts, exchanges of all at once; {said}"
        )
        library = f"Gloo's all-reduce among all ranks as the price of a ring or a tree; {said}"
        origins = {
            ORIGIN: Origin(MEASURED, today, where, what, _spread(samples)),
            LIBRARY_ORIGIN: Origin(MEASURED, today, where, library, _spread([sample for _, sample in self.reduced])),
        }
        found = None
        if self.contention is not None:
            found = self.contention.contention()
            computed = f"GEMMs while Gloo's all-reduce among all ranks is in flight; {said}"
            spread = _spread([self.contention.exchange])
            origins[hosts_contention.ORIGIN] = Origin(MEASURED, today, where, computed, spread)
        return base.with_link(before, name, self.link(), self.library(before), found, origins)


def _spread(samples: Sequence[Sample]) -> float:
    return round(sample_of([max(sample.spread, 1e-4) for sample in samples]).us, 4)


def shows_bytes(rows: Rows) -> bool:
    """True if the bytes account for most of the largest size's time, as on slow links. The rows, and so the answer,
    are the same on all ranks."""
    fixed_us, us_per_byte = fit.relative_line([(float(size), sample.us) for size, sample in rows])
    return us_per_byte * rows[-1][0] > fixed_us


def _line(what: str, rows: Rows) -> tuple[float, float]:
    """(a, b) of `a + b x`; both have to be above zero."""
    a, b = fit.relative_line([(float(size), sample.us) for size, sample in rows])
    if a <= 0 or b <= 0:
        raise _contradiction(what, rows, a, b)
    return a, b


def _contradiction(what: str, rows: Rows, fixed_us: float, us_each: float) -> WeaveError:
    shown = ", ".join(f"{size}: {sample.us:.1f}" for size, sample in rows)
    return WeaveError(
        f"calibrate between hosts: {what} took (us) {shown}, of which {fixed_us:.3g} would be latency and "
        f"{us_each:.3g} each byte or message: neither can be negative or nothing; measure again on quiet hosts"
    )


def _steps(session: CalibrationSession, what: str, sizes: Sequence[int], make: Callable[[int], Launch]) -> Rows:
    """A time for each size; ranks that have no part in it wait for the others."""
    kept = sizes[::2] if session.quick else sizes
    launches = [make(size) for size in kept]
    return session.curve(what, kept, lambda index: session.clock.together(launches[index], 100.0))


def _ready(wire: socket.socket) -> socket.socket:
    wire.settimeout(TIMEOUT_S)
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return wire


def _take(wire: socket.socket, into: memoryview) -> None:
    """Receive all of `into`. A wait longer than `TIMEOUT_S`, or a peer that is gone, is an error."""
    done = 0
    while done < len(into):
        count = wire.recv_into(into[done:])
        if not count:
            raise WeaveError("calibrate between hosts: the rank on the other host closed its connection")
        done += count


def _nothing(index: int) -> None:
    """Do nothing, on ranks that only wait for the others."""


def _ping(wire: socket.socket | None, begins: bool, num_bytes: int) -> Launch:
    """Build a ping-pong step: a message there and back."""
    data = memoryview(bytearray(num_bytes))

    def run(index: int) -> None:
        assert wire is not None
        if begins:
            wire.sendall(data)
        _take(wire, data)
        if not begins:
            wire.sendall(data)

    return _nothing if wire is None else run


def _burst(session: CalibrationSession, wire: socket.socket | None, sends: bool, count: int) -> Sample:
    """Measure the sender's and the receiver's time for each of `count` little messages; returns their mean.

    The receiver begins when all messages have arrived, so both times are pure work, without waiting.
    """
    data, found = memoryview(bytearray(LITTLE_BYTES)), [0.0] * NUM_BURSTS
    barrier()
    for turn in range(NUM_BURSTS if wire is not None else 0):
        assert wire is not None
        if not sends:
            time.sleep(ARRIVES_S)
            wire.recv(LITTLE_BYTES * count, socket.MSG_PEEK | socket.MSG_WAITALL)
        begin = time.perf_counter()
        for _ in range(count):
            if sends:
                wire.sendall(data)
            else:
                _take(wire, data)
        found[turn] = (time.perf_counter() - begin) * 1e6
        if sends:
            _take(wire, data)
        else:
            wire.sendall(data)
    both = torch.tensor(found, dtype=torch.float64)
    dist.all_reduce(both)  # of the two ends; the others have none
    return sample_of((both / 2).tolist())


def _exchange(wire: socket.socket | None, num_bytes: int) -> Launch:
    """Out and in at once."""
    out, into = bytes(num_bytes), memoryview(bytearray(num_bytes))

    def run(index: int) -> None:
        assert wire is not None
        sending = threading.Thread(target=wire.sendall, args=(out,), daemon=True)
        sending.start()
        _take(wire, into)
        sending.join()

    return _nothing if wire is None else run
