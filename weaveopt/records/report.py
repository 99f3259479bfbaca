"""Records of the decisions for a graph and for a model: the only thing that `explain` and `weaveopt.report` print."""

from __future__ import annotations

from dataclasses import dataclass, field

from weaveopt.records.candidate import LEAVE, Candidate, Estimate, Measured, Rejection, Values, error_between_us
from weaveopt.records.generation import GenerationReport
from weaveopt.records.memory import MemoryPlan
from weaveopt.records.site import Site
from weaveopt.records.task import ScheduledTask

RULE_FAILED = "rule_failed"
"""Code of a graph rule's fault: its variants are not there, and all else of the graph is as ever."""


@dataclass(frozen=True)
class Decision:
    """The candidate chosen for a site, and all the others with what spoke against them."""

    site: Site
    chosen: Candidate
    alternatives: tuple[Candidate, ...]
    baseline: Estimate | None
    """Price of the site's unmodified nodes; None if they could not be priced."""

    @property
    def rewritten(self) -> bool:
        return self.chosen.choice != LEAVE

    @property
    def saving_us(self) -> float:
        if self.baseline is None or self.chosen.estimate is None:
            return 0.0
        return self.baseline.decided_us - self.chosen.estimate.decided_us

    @property
    def saving_error_us(self) -> float:
        """Standard error of `saving_us`, in microseconds."""
        after = self.chosen.estimate
        if self.baseline is None or after is None or not self.rewritten:
            return 0.0
        known = after.saving_error_us
        return error_between_us(after, self.baseline) if known is None else known


@dataclass(frozen=True)
class Fallback:
    """A graph that runs unrewritten because a step failed (or because `strict` is off and it could not agree)."""

    graph: str
    step: str
    error: str


@dataclass(frozen=True)
class OutsideWork:
    """Predicted time of one kernel that a graph runs outside its sites, the same before and after rewriting."""

    module: str
    """Path of its module; empty if the graph does not name one."""
    kind: str
    """`gemm`, `attention`, `memory` (point-wise operations and reductions fused into one kernel) or `collective`."""
    us: float
    after: int
    """Sites that come before it in the order of the graph."""
    count: int = 1
    """How many places of the whole model this one stands for (layers of the same kind)."""


@dataclass(frozen=True)
class WorkFailure:
    """Reason why the work outside the sites of a graph has no predicted time. It does not affect what the graph
    runs."""

    exception: str
    """Name of the exception's class."""
    message: str
    """The first line of what it says; empty where it says nothing."""

    def __str__(self) -> str:
        return f"{self.exception}: {self.message or 'no message'}"


@dataclass(frozen=True)
class ChoiceRange:
    """Token counts from `tokens` on, up to the next stretch, at which the same choice wins."""

    tokens: int
    choice: str
    """`leave`, or rule, fabric, algorithm and form."""


@dataclass(frozen=True)
class Sensitivity:
    """Changes that would alter the decision at sites of one kind, everything else held constant."""

    sites: tuple[str, ...]
    tokens: int
    """The token count that was decided for."""
    choice: str
    stretches: tuple[ChoiceRange, ...]
    """The choice at every token count, ascending from 1."""
    constants: Values = ()
    """Change of a constant of the machine -> the choice that wins then; every change that was tried."""


@dataclass(frozen=True)
class Regime:
    """The token counts that one compiled graph serves; with other counts the function is compiled again."""

    min_tokens: int
    max_tokens: int | None
    """Largest token count; None: no end."""


@dataclass(frozen=True)
class Variant:
    """A graph that could stand in place of the captured one: what it is predicted to take, and why it may not."""

    name: str
    """`captured`, or what the graph rule calls it."""
    rule: str = ""
    """The graph rule that made it; empty for the captured graph."""
    baseline_us: float | None = None
    """Predicted time with every site of it left as it is."""
    predicted_us: float | None = None
    """Predicted time with this variant's own decisions carried out."""
    rejections: tuple[Rejection, ...] = ()
    parameters: Values = ()
    """Parameters that the graph rule chose."""
    exposed_us: float | None = None
    """Time of `predicted_us` in which communication or copies run and nothing is computed."""
    baseline_steady_us: float | None = None
    """`baseline_us` run after run, at the device's power limit; None where the profile has no energies."""
    steady_us: float | None = None
    """The same of `predicted_us`."""
    added_us: float | None = None
    """Computation that it has more than the captured graph, both as decided, each kernel by itself; None for that."""
    measured: Measured | None = None
    """Time of the whole graph as the ranks ran it, with the option `verify`."""


@dataclass(frozen=True)
class KernelReport:
    """A local kernel that was timed at its exact shape when the graph was compiled."""

    kernel: str
    """Kernel, dtype, sizes and layout: `gemm bfloat16 1500x5120x13824 rc`."""
    us: float
    """The longest time of all ranks."""
    profile_us: float
    """Time that the profile predicts."""
    relative_error: float


@dataclass(frozen=True)
class Doubt:
    """A choice that an error of one local kernel's price may turn."""

    sites: tuple[str, ...]
    kernel: str
    us: float
    """Time that the profile predicts for it."""
    loss_us: float
    """Most that the choice may lose by the error."""


@dataclass(frozen=True)
class GraphReport:
    """One captured graph: every site with its decision, the arena, and what changed rounding."""

    name: str
    phase: str
    """`prefill`, `decode`, `forward`, `backward` or `inference`."""
    tokens: int
    decisions: tuple[Decision, ...] = ()
    plans: tuple[MemoryPlan, ...] = ()
    rounding: tuple[str, ...] = ()
    """One line per kind of change: which intermediate is no longer rounded, or rounded elsewhere."""
    fallbacks: tuple[Fallback, ...] = ()
    """The step that failed, where the graph runs unrewritten."""
    steps_us: Values = ()
    """Time that each step of weaveopt took in this compile."""
    work: tuple[OutsideWork, ...] = ()
    """Work outside the sites, in graph order."""
    work_failure: WorkFailure | None = None
    """Set where `work` is empty because estimating it failed."""
    sensitivity: tuple[Sensitivity, ...] = ()
    """Sensitivity of sites whose choice depends on their own price alone; computed only by `weaveopt explain`."""
    regime: Regime | None = None
    """The token counts that it was compiled for; None where its sizes are numbers."""
    variants: tuple[Variant, ...] = ()
    """The graphs that were compared; the first is the captured one."""
    variant: str = "captured"
    """The one that runs."""
    timed: tuple[str, ...] = ()
    """Measurements by the ranks under the option `verify`, and those left to the prediction with the reason; one
    line each."""

    kernels: tuple[KernelReport, ...] = ()
    """Local kernels that were timed for this graph, longest first."""
    tuned: str = ""
    """How many of them were timed in this compile; empty where none was asked for."""
    doubts: tuple[Doubt, ...] = ()
    """Choices that rest on a price between measured ones; computed only by `weaveopt explain`."""
    schedule_before: tuple[ScheduledTask, ...] = ()
    """The captured graph with every site as it is, where another variant runs: once, not for all layers that it stands
    for."""
    schedule: tuple[ScheduledTask, ...] = ()
    """The variant that runs, if it is not the captured graph."""

    @property
    def failed_rules(self) -> tuple[tuple[str, str], ...]:
        """Graph rules that failed on this graph, with the error of each."""
        reasons = [(each.rule, why) for each in self.variants for why in each.rejections]
        return tuple((rule, why.message) for rule, why in reasons if why.code == RULE_FAILED)

    @property
    def num_rewritten(self) -> int:
        return sum(decision.rewritten for decision in self.decisions)

    @property
    def unfused_us(self) -> float:
        return sum(d.baseline.us * d.site.count for d in self.decisions if d.baseline is not None)

    @property
    def predicted_us(self) -> float:
        return sum(d.chosen.estimate.us * d.site.count for d in self.decisions if d.chosen.estimate is not None)


@dataclass(frozen=True)
class MachineSummary:
    """Profile that the decisions are based on, and the origins of its constants."""

    name: str
    measured: bool
    """True if every constant used was measured on such a machine."""
    origins: Values = ()
    """Constant -> `measured 2026-11-20 h200x4` or `datasheet ...`."""
    stands_in_for: tuple[str, ...] = ()
    """GPUs that have no profile and that this one is nearest to; no rule is used for them unless it is forced."""
    note: str = ""
    """Why another profile is not used, in one line; empty: there is none."""


@dataclass(frozen=True)
class GraphBreak:
    """A graph break: Dynamo ended a graph before the model's end. No rewrite crosses it."""

    reason: str
    """Reason that Dynamo recorded, in one line."""
    where: str
    """`file:line in function`, the innermost frame outside torch; empty if Dynamo kept no stack."""
    hint: str = ""
    """Dynamo's suggestion for a remedy."""
    count: int = 1
    """How often Dynamo stopped there for this reason."""


@dataclass(frozen=True)
class OutsideCommunication:
    """Collectives that ran outside the graphs of a model, where nothing can rewrite them."""

    group: str
    collectives: int
    """Lower bound of their number: those counted between two graphs of the call that compiled them."""
    after: str
    """The break after which they ran."""


@dataclass(frozen=True)
class Uncompiled:
    """Calls that torch ran without any compiled code, so that nothing was rewritten in them."""

    what: str
    """`function (file:line)`; empty where it is the model itself."""
    reason: str
    hint: str = ""
    """Suggestion for a remedy."""
    calls: int | None = None
    """How many there were; None where torch does not count them."""


@dataclass(frozen=True)
class Report:
    """Decisions for one model: the only thing that `explain` and `weaveopt.report` print."""

    model: str
    world: int
    machine: MachineSummary | None
    graphs: tuple[GraphReport, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()
    notes: tuple[str, ...] = field(default=())
    breaks: tuple[GraphBreak, ...] = ()
    """Graph breaks that split the model; empty if Dynamo captured it whole."""
    outside: tuple[OutsideCommunication, ...] = ()
    uncompiled: tuple[Uncompiled, ...] = ()
    """Calls that ran uncompiled: Dynamo's recompile limit, a stance."""
    generation: GenerationReport = field(default=GenerationReport())
    """Report of `weaveopt.generate` for the model."""

    @property
    def num_graphs(self) -> int:
        """Graphs that Dynamo captured. A backward graph belongs to the forward graph that it was made with."""
        return sum(graph.phase != "backward" for graph in self.graphs)
