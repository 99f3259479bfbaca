"""Exchanges between hosts with every host taking part, and the terms that their times are made of.

Each exchange runs as compiled graphs call it, at a few sizes, in turns with the others, so that other load on the
machine affects all of them. The profile gets terms, not times: a call, a round, a message, a byte sent, a byte of the
rows.
"""

from __future__ import annotations

import datetime
import statistics
import time
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

import weaveopt.ops  # noqa: F401  (registers torch.ops.weave)
from weaveopt.cost_model import Machine
from weaveopt.cost_model.host_algorithms import host_algorithm
from weaveopt.cost_model.host_exchange import HostExchangeTerms
from weaveopt.cost_model.machine import MEASURED, Origin
from weaveopt.fabrics import tcp
from weaveopt.fabrics.topology import Topology
from weaveopt.measure import draft, fit
from weaveopt.measure.clock import CollectiveRendezvous, Launch, Sample, barrier
from weaveopt.measure.session import CalibrationSession
from weaveopt.ops.reduction.buffers import memory_plan
from weaveopt.ops.reduction.call import ReductionCall
from weaveopt.ops.reduction.prices.estimate import estimate_fused
from weaveopt.ops.reduction.prices.messages import problem_of
from weaveopt.ops.reduction.prices.workload import Workload
from weaveopt.ops.reduction.variant import ALGORITHMS, Algorithm, KernelRow, Transfer
from weaveopt.records.candidate import Fabric
from weaveopt.records.norm import NormKind, NormSpec

HIDDEN, DTYPE = 4096, torch.bfloat16
TOKENS = (1, 4, 24, 96, 384)
"""8 KiB to 3 MiB: a single row, which is one host's alone where hosts divide rows, and many."""
TIMEOUT_S = 60.0
SPINS = 9
SPIN_STEPS = 200_000
SHARED = 1.25
"""Hosts that slow each other's processors down by more share them; less is noise."""
Case = tuple[Algorithm, int]
"""(exchange, tokens)."""


@dataclass
class HostExchanges:
    """Measurements among all ranks."""

    hosts: int
    ranks_per_host: int
    times: dict[Case, Sample] = field(default_factory=dict)
    slowdown: float = 1.0
    """Slowdown of a loop run by one rank of each host at once, relative to the first host alone."""

    def measure(self, session: CalibrationSession, topology: Topology) -> None:
        """Every rank calls it."""
        tokens = TOKENS[::2] if session.quick else TOKENS
        self.slowdown = _slowdown(session, topology)
        calls = [_call(topology, self.hosts, each, tokens[-1]) for each in ALGORITHMS[Transfer.MESSAGE]]
        tcp.reserve(topology, memory_plan(topology.group.name, calls), 0, TIMEOUT_S)
        launches: dict[Case, Launch] = {}
        for count in tokens:
            for call in calls:
                launches[call.table[0].algorithm, count] = _launch(call, count)
        session.show_progress("exchanges between hosts", 0, 1)
        samples = session.clock.in_turns(list(launches.values()), [0.0] * len(launches), CollectiveRendezvous())
        self.times = dict(zip(launches, samples, strict=True))
        barrier()
        tcp.release(topology.group.name)

    @property
    def origin(self) -> str:
        return f"busy.{self.hosts}x{self.ranks_per_host}"

    def workload(self, tokens: int) -> Workload:
        return Workload(tokens, tokens, HIDDEN, str(DTYPE)[6:], self.hosts * self.ranks_per_host, self.hosts)

    def terms(self, before: Machine) -> HostExchangeTerms:
        """Terms, none below zero, with the least squares of relative errors; the price's other parts are left out."""
        nothing = HostExchangeTerms(self.origin, self.hosts, self.ranks_per_host, 0.0, 0.0, 0.0, 0.0, 0.0)
        machine = replace(before, busy_hosts=(nothing,))
        rows = []
        for (algorithm, tokens), sample in self.times.items():
            workload = self.workload(tokens)
            rest_us = self._predicted_us(machine, (algorithm, tokens))
            traffic = host_algorithm(algorithm.value).traffic(problem_of(workload, algorithm))
            made_of = (1.0, traffic.steps, traffic.messages, traffic.sent_bytes, workload.message_bytes)
            rows.append((made_of, sample.us - rest_us, sample.us))
        call_us, round_us, message_us, sent_us, row_us = fit.relative_nonnegative(rows)
        ranks = self.hosts * self.ranks_per_host
        processors = round(ranks / self.slowdown, 2) if self.slowdown > SHARED else 0.0
        return HostExchangeTerms(
            self.origin, self.hosts, self.ranks_per_host, round(call_us, 3), round(round_us, 3), round(message_us, 3),
            round(sent_us, 9), round(row_us, 9), processors,
        )  # fmt: skip

    def renewed(self, before: Machine, device: torch.device) -> Machine:
        """Return `before` with the measured exchange terms for so many hosts; its error is at least that of these
        terms."""
        terms = self.terms(before)
        others = [
            each
            for each in before.busy_hosts
            if (each.hosts, each.ranks_per_host) != (terms.hosts, terms.ranks_per_host)
        ]
        known = tuple(sorted((*others, terms), key=lambda each: (each.ranks_per_host, each.hosts)))
        machine = replace(before, busy_hosts=known)
        error = statistics.fmean(abs(self._predicted_us(machine, case) / us.us - 1) for case, us in self.times.items())
        where = f"{self.hosts} hosts of {draft.host(device, self.ranks_per_host)}"
        origin = Origin(
            MEASURED, datetime.date.today().isoformat(), where,
            f"{len(self.times)} exchanges among all ranks as terms that add up, mean error {error:.1%}; "
            f"torch {torch.__version__}, the fastest pass's median, slowest rank",
            round(statistics.median(sample.spread for sample in self.times.values()), 4),
        )  # fmt: skip
        origins = dict(before.origins) | {self.origin: origin}
        return replace(
            machine,
            origins=tuple(sorted(origins.items())),
            relative_error=max(before.relative_error, round(min(error, draft.MOST_ERROR), 3)),
        )

    def _predicted_us(self, machine: Machine, case: Case) -> float:
        algorithm, tokens = case
        return estimate_fused(machine, self.workload(tokens), Fabric.TCP, algorithm).us


def _call(topology: Topology, hosts: int, algorithm: Algorithm, max_tokens: int) -> ReductionCall:
    name, world = topology.group.name, len(topology.hosts)
    return ReductionCall(
        site=f"calibrate.{algorithm.value}", group=name, fabric=Fabric.TCP, world=world, hosts=hosts, hidden=HIDDEN,
        dtype=str(DTYPE)[6:], out_dtype=str(DTYPE)[6:], max_tokens=max_tokens, post=None,
        table=(KernelRow(max_tokens, algorithm, Transfer.MESSAGE),),
        norm=NormSpec(NormKind.RMS, 1e-5, cast_before_weight=True), timeout_s=TIMEOUT_S,
    )  # fmt: skip


def _launch(call: ReductionCall, tokens: int) -> Launch:
    partial = torch.randn(tokens, HIDDEN).to(DTYPE)
    residual, weight = torch.zeros(tokens, HIDDEN, dtype=DTYPE), torch.ones(HIDDEN, dtype=DTYPE)
    op, text = torch.ops.weave.all_reduce_norm.default, call.encode()
    return lambda _: op(partial, None, None, residual, None, None, weight, None, text)


def _slowdown(session: CalibrationSession, topology: Topology) -> float:
    """How much longer a loop takes when the first rank of every host runs it than on the first host alone.

    The fastest of several each: what else the machine does is no host's.
    """
    firsts = [topology.hosts.index(name) for name in dict.fromkeys(topology.hosts)]
    fastest = []
    for together in (False, True):
        times = [0.0] * SPINS
        for turn in range(SPINS):
            barrier()
            if session.rank in (firsts if together else firsts[:1]):
                begin = time.perf_counter()
                for _ in range(SPIN_STEPS):
                    pass
                times[turn] = time.perf_counter() - begin
        longest = torch.tensor(times, dtype=torch.float64)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        fastest.append(float(longest.min()))
    return fastest[1] / fastest[0]
