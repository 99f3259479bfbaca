"""The report from its JSON: what each object holds is said by a type, which msgspec reads by.

Fields that are not named here are sums for other readers. A field with a default is newer than the first reports.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct, field

from weaveopt import plain_json
from weaveopt.errors import WeaveError
from weaveopt.records.candidate import (
    Candidate,
    Estimate,
    Fabric,
    Measured,
    Rejection,
    Scalar,
    TableRow,
    Term,
    Values,
)
from weaveopt.records.generation import BatchingReport, GenerationReport, LeftCall, StepReport
from weaveopt.records.memory import Channel, Lifetime, MemoryPlan, PlacedBuffer
from weaveopt.records.price import Price, PriceSource, Uncertainty
from weaveopt.records.report import (
    ChoiceRange,
    Decision,
    Doubt,
    Fallback,
    GraphBreak,
    GraphReport,
    KernelReport,
    MachineSummary,
    OutsideCommunication,
    OutsideWork,
    Regime,
    Report,
    Sensitivity,
    Uncompiled,
    Variant,
    WorkFailure,
)
from weaveopt.records.site import Site, TokenCounts
from weaveopt.records.task import ScheduledTask
from weaveopt.reporting.document import SCHEMA

Table = dict[str, Scalar]
Texts = tuple[str, ...]


def from_json(text: str) -> Report:
    """The report that `to_json` wrote. Raises `WeaveError` naming the first field that is not as expected."""
    try:
        document = plain_json.read(text)
        schema = plain_json.convert(document, _Schema).schema
        if schema != SCHEMA:
            raise WeaveError(f"report has schema {schema}; this weaveopt reads schema {SCHEMA}")
        return plain_json.convert(document, _Report).record()
    except plain_json.JsonError as error:
        raise WeaveError(str(error)) from None


def _values(table: Mapping[str, Scalar]) -> Values:
    return tuple(table.items())


class _Schema(Struct, frozen=True):
    schema: int


class _Rejection(Struct, frozen=True):
    code: str
    message: str
    values: Table


def _rejections(found: Iterable[_Rejection]) -> tuple[Rejection, ...]:
    return tuple(Rejection(each.code, each.message, _values(each.values)) for each in found)


class _TableRow(Struct, frozen=True):
    max_tokens: int
    variant: str
    values: Table

    def record(self) -> TableRow:
        return TableRow(self.max_tokens, self.variant, _values(self.values))


class _Term(Struct, frozen=True):
    name: str
    us: float
    source: PriceSource = PriceSource.ESTIMATED
    errors_us: dict[str, float] = {}

    def record(self) -> Term:
        return Term(self.name, Price(self.us, Uncertainty(dict(self.errors_us.items()), self.source)))


class _Candidate(Struct, frozen=True):
    choice: str
    fabric: Fabric
    variant: str
    parameters: Table
    table: tuple[_TableRow, ...]
    notes: Texts
    terms: tuple[_Term, ...] | None
    measured: Measured | None = None
    saving_error_us: float | None = None

    def candidate(self, rejected: Iterable[_Rejection]) -> Candidate:
        return Candidate(
            choice=self.choice,
            fabric=self.fabric,
            variant=self.variant,
            parameters=_values(self.parameters),
            estimate=_estimate(self.terms, self.measured, self.saving_error_us),
            rejections=_rejections(rejected),
            table=tuple(row.record() for row in self.table),
            notes=self.notes,
        )


def _estimate(
    terms: tuple[_Term, ...] | None, measured: Measured | None, saving_error_us: float | None = None
) -> Estimate | None:
    return None if terms is None else Estimate(tuple(each.record() for each in terms), measured, saving_error_us)


class _Alternative(_Candidate, frozen=True, kw_only=True):
    rejected: tuple[_Rejection, ...]


class _Site(_Candidate, frozen=True, kw_only=True):
    """A site, and the candidate that was chosen at it."""

    id: str
    kind: str
    groups: Texts
    module: str
    collectives: Texts
    form: str
    tokens: TokenCounts
    facts: Table
    rejected: tuple[_Rejection, ...]
    count: int
    choice_rejected: tuple[_Rejection, ...]
    alternatives: tuple[_Alternative, ...]
    unfused_terms: tuple[_Term, ...] | None
    unfused_measured: Measured | None = None

    def decision(self) -> Decision:
        return Decision(
            site=Site(
                id=self.id,
                kind=self.kind,
                groups=self.groups,
                module=self.module,
                collectives=self.collectives,
                description=self.form,
                tokens=self.tokens,
                facts=_values(self.facts),
                rejections=_rejections(self.rejected),
                count=self.count,
            ),
            chosen=self.candidate(self.choice_rejected),
            alternatives=tuple(each.candidate(each.rejected) for each in self.alternatives),
            baseline=_estimate(self.unfused_terms, self.unfused_measured),
        )


class _Slot(Struct, frozen=True, rename={"num_bytes": "bytes"}):
    group: str
    name: str
    offset: int
    num_bytes: int
    lifetime: Lifetime
    owners: Texts
    first: int
    last: int
    fill: int | None
    alignment: int
    zone_begin: int

    def buffer(self) -> PlacedBuffer:
        return PlacedBuffer(
            *(self.name, self.offset, self.num_bytes, self.lifetime, self.owners, self.first, self.last),
            *(self.fill, self.alignment, self.zone_begin),
        )


class _Group(Struct, frozen=True, rename={"num_bytes": "bytes"}):
    group: str
    fabric: Fabric
    num_bytes: int
    channels: tuple[Channel, ...]
    wiring: Texts


class _Arena(Struct, frozen=True):
    slots: tuple[_Slot, ...]
    groups: tuple[_Group, ...]

    def plans(self) -> tuple[MemoryPlan, ...]:
        return tuple(
            MemoryPlan(
                group=each.group,
                fabric=each.fabric,
                num_bytes=each.num_bytes,
                buffers=tuple(slot.buffer() for slot in self.slots if slot.group == each.group),
                channels=each.channels,
                wiring=each.wiring,
            )
            for each in self.groups
        )


class _Variant(Struct, frozen=True):
    name: str
    rule: str
    unfused_us: float | None
    predicted_us: float | None
    rejected: tuple[_Rejection, ...]
    exposed_us: float | None = None
    unfused_steady_us: float | None = None
    steady_us: float | None = None
    added_us: float | None = None
    measured: Measured | None = None
    parameters: Mapping[str, Scalar] = field(default_factory=dict)

    def record(self) -> Variant:
        rejections, parameters = _rejections(self.rejected), _values(self.parameters)
        return Variant(
            self.name, self.rule, self.unfused_us, self.predicted_us, rejections, parameters, self.exposed_us,
            self.unfused_steady_us, self.steady_us, self.added_us, self.measured,
        )  # fmt: skip


class _Sensitivity(Struct, frozen=True):
    sites: Texts
    tokens: int
    choice: str
    stretches: tuple[ChoiceRange, ...]
    constants: Table

    def record(self) -> Sensitivity:
        return Sensitivity(self.sites, self.tokens, self.choice, self.stretches, _values(self.constants))


class _Graph(Struct, frozen=True):
    name: str
    phase: str
    tokens: int
    variant: str
    variants: tuple[_Variant, ...]
    sites: tuple[_Site, ...]
    arena: _Arena
    rounding: Texts
    fallbacks: tuple[Fallback, ...]
    steps_us: Table
    regime: Regime | None = None
    work: tuple[OutsideWork, ...] = ()
    work_failure: WorkFailure | None = None
    sensitivity: tuple[_Sensitivity, ...] = ()
    timed: Texts = ()
    kernels: tuple[KernelReport, ...] = ()
    tuned: str = ""
    doubts: tuple[Doubt, ...] = ()
    schedule_before: tuple[ScheduledTask, ...] = ()
    schedule: tuple[ScheduledTask, ...] = ()

    def record(self) -> GraphReport:
        return GraphReport(
            name=self.name,
            phase=self.phase,
            tokens=self.tokens,
            decisions=tuple(site.decision() for site in self.sites),
            plans=self.arena.plans(),
            rounding=self.rounding,
            fallbacks=self.fallbacks,
            steps_us=_values(self.steps_us),
            work=self.work,
            work_failure=self.work_failure,
            sensitivity=tuple(each.record() for each in self.sensitivity),
            regime=self.regime,
            variants=tuple(each.record() for each in self.variants),
            variant=self.variant,
            timed=self.timed,
            kernels=self.kernels,
            tuned=self.tuned,
            doubts=self.doubts,
            schedule_before=self.schedule_before,
            schedule=self.schedule,
        )


class _Machine(Struct, frozen=True):
    name: str
    measured: bool
    origins: Table
    stands_in_for: Texts = ()
    note: str = ""

    def record(self) -> MachineSummary:
        return MachineSummary(self.name, self.measured, _values(self.origins), self.stands_in_for, self.note)


class _LeftCall(Struct, frozen=True):
    loop: str
    count: int
    reasons: tuple[_Rejection, ...]


class _Generation(Struct, frozen=True):
    steps: tuple[StepReport, ...] = ()
    left: tuple[_LeftCall, ...] = ()
    batching: BatchingReport = BatchingReport()

    def record(self) -> GenerationReport:
        left = (LeftCall(each.loop, _rejections(each.reasons), each.count) for each in self.left)
        return GenerationReport(self.steps, tuple(left), self.batching)


class _World(Struct, frozen=True):
    world: int


class _Report(Struct, frozen=True):
    model: str
    group: _World
    machine: _Machine | None
    graphs: tuple[_Graph, ...]
    fallbacks: tuple[Fallback, ...]
    notes: Texts
    breaks: tuple[GraphBreak, ...] = ()
    communication_outside: tuple[OutsideCommunication, ...] = ()
    uncompiled: tuple[Uncompiled, ...] = ()
    generate: _Generation = _Generation()

    def record(self) -> Report:
        return Report(
            model=self.model,
            world=self.group.world,
            machine=None if self.machine is None else self.machine.record(),
            graphs=tuple(graph.record() for graph in self.graphs),
            fallbacks=self.fallbacks,
            notes=self.notes,
            breaks=self.breaks,
            outside=self.communication_outside,
            uncompiled=self.uncompiled,
            generation=self.generate.record(),
        )
