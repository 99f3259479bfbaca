"""Candidates of GEMMs and one collective, as far as they do not depend on which collective it is.

On each fabric the library's GEMMs run before or after the exchange: their time is the graph's, and the exchange's comes
from the profile's curves. On GPUs a kernel that exchanges rows while its GEMM runs is a candidate too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from weaveopt.cost_model import Gemm, Machine, gemm_us, measured_parts_us
from weaveopt.cost_model.tile_config import TileConfig
from weaveopt.fabrics.fabric_eligibility import eligible_fabrics, not_measured, world_refused
from weaveopt.fabrics.topology import Topology
from weaveopt.records.candidate import Candidate, Estimate, Fabric, Rejection, Term, Values
from weaveopt.records.site import TokenCounts
from weaveopt.records.task import Stream, Task

Rejections = tuple[Rejection, ...]


@dataclass(frozen=True)
class GemmCommPlan:
    """Plan of a candidate, as a rule keeps it until the rewrite."""

    fabric: Fabric
    max_tokens: int
    cut: str = ""
    """Tile configuration of the kernel that exchanges rows while it computes."""
    tasks: tuple[Task, ...] = ()
    """GEMMs and exchange, one after the other; none of a kernel that does both."""


Found = tuple[Candidate, GemmCommPlan]


class GemmCommWork(Protocol):
    """Work of an operation on every rank, at the hint."""

    @property
    def gemms(self) -> tuple[Gemm, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def world(self) -> int: ...
    @property
    def hosts(self) -> int: ...
    @property
    def message_bytes(self) -> int:
        """Bytes that the collective's curves go by."""
        ...


@dataclass(frozen=True)
class PricedOperation:
    """An operation whose candidates are priced: for which rule, at which token counts, on which machine."""

    rule: str
    work: GemmCommWork
    tokens: TokenCounts
    machine: Machine
    exchange: str
    """Operation of the profile's curves."""
    estimate: Callable[[Fabric, tuple[float, float]], Estimate]
    """Estimate on a fabric with the library's GEMMs, from latency and rest of the exchange in µs."""
    parameters: Values
    exchanges_first: bool
    """True if the GEMMs read what the exchange returns; False: it takes what they return."""

    def in_turn(self, fabric: Fabric, variant: str, reasons: Rejections) -> Found:
        """Candidate with the library's GEMMs: they and the exchange run one after the other."""
        parts = measured_parts_us(self.machine, fabric, self.exchange, self.work.message_bytes, self.work.world)
        if parts is None and not reasons:
            reasons = (not_measured(self.machine, fabric, self.exchange),)
        estimate = None if parts is None else self.estimate(fabric, parts)
        parameters = (*self.parameters, ("max_tokens", self.tokens.most))
        candidate = Candidate(self.rule, fabric, variant, parameters, estimate, reasons)
        tasks = () if estimate is None or parts is None else self._tasks(estimate, sum(parts))
        return candidate, GemmCommPlan(fabric, self.tokens.most, tasks=tasks)

    def _tasks(self, estimate: Estimate, exchange_us: float) -> tuple[Task, Task]:
        """The exchange, and everything else of the estimate, in the order in which they run."""
        computing = Task(max(estimate.us - exchange_us, 0.0), name="gemm")
        moving = Task(exchange_us, Stream.COMMUNICATION, name=self.exchange)
        first, second = (moving, computing) if self.exchanges_first else (computing, moving)
        return first, replace(second, waits_for=(0,))

    def refused(self, fabric: Fabric, variant: str, reasons: Rejections) -> Found:
        """Candidate with a kernel that does not run here."""
        return Candidate(self.rule, fabric, variant, rejections=reasons), GemmCommPlan(fabric, self.tokens.most)

    def overlapped(
        self,
        fabric: Fabric,
        variant: str,
        reasons: Rejections,
        found: tuple[TileConfig, Estimate] | Rejection,
        parameters_of: Callable[[TileConfig], Values],
    ) -> Found:
        """Candidate with a kernel that exchanges rows while its GEMM runs, by its fastest tiles in `found`."""
        if isinstance(found, Rejection) or reasons:
            more = (found,) if isinstance(found, Rejection) else ()
            return self.refused(fabric, variant, (*reasons, *more))
        cut, estimate = found
        parameters = (*parameters_of(cut), ("max_tokens", self.tokens.most))
        candidate = Candidate(self.rule, fabric, variant, parameters, estimate)
        return candidate, GemmCommPlan(fabric, self.tokens.most, str(cut))


def on_fabrics(
    priced: PricedOperation,
    kernels: Collection[Fabric],
    topology: Topology,
    usable_only: bool,
    on_gpus: Callable[[Rejections], Sequence[Found]],
) -> Iterator[Found]:
    """Candidates on every fabric; `on_gpus` makes those of GPUs, from the rejections that hold for all of them."""
    for fabric, unreachable in eligible_fabrics(topology, priced.machine, kernels):
        if unreachable or fabric is not Fabric.PEER:
            found: Sequence[Found] = [priced.in_turn(fabric, "", unreachable)]
        else:
            found = on_gpus(world_refused(fabric, priced.work.world))
        for candidate, lowered in found:
            if candidate.allowed or not usable_only:
                yield candidate, lowered


def with_gemms(machine: Machine, work: GemmCommWork, others: tuple[Term, ...]) -> Estimate:
    """Estimate of `gemm`, the library's GEMMs, and then of `others`."""
    slowdown = machine.oversubscription(work.world, work.hosts)
    gemms_us = sum(gemm_us(machine, gemm, work.dtype) for gemm in work.gemms) * slowdown
    estimate = Estimate(others).plus(Estimate((Term("gemm", gemms_us),)))
    return replace(estimate, terms=tuple(sorted(estimate.terms, key=lambda term: term.name != "gemm")))
