"""The records that travel between the steps: sites, candidates, rejections, estimates, decisions, plans, reports.

All of them are frozen, hold only plain values (never a graph node or a tensor) and go to JSON. The
report that `weaveopt explain` prints is made of these same objects, so it cannot differ from what ran.
Units are in the names: `_us` microseconds, `_bytes` bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

Scalar = bool | int | float | str
Values = tuple[tuple[str, Scalar], ...]

LEAVE = "leave"
"""The choice that changes nothing: a candidate at every site."""


class Fabric(StrEnum):
    """A way for the ranks of a group to reach each other's memory."""

    MULTIMEM = "multimem"
    PEER = "peer"
    SHM = "shm"
    NVSHMEM = "nvshmem"
    LIBRARY = "library"


class Algorithm(StrEnum):
    """How a reduction is divided among ranks."""

    LIBRARY = "library"
    """NCCL or Gloo decides."""
    ONE_SHOT = "one_shot"
    """Every rank reads all partial results and computes every token: one synchronization."""
    TWO_SHOT = "two_shot"
    """Every rank computes its share of the tokens and hands the rows out: two synchronizations."""


class Form(StrEnum):
    """How the rows of a fused reduction travel between ranks; which of them a fabric has is the op's to say."""

    SEGMENT = "segment"
    """CPU ranks read each other's shared segments."""
    MAIL = "mail"
    """Words that carry their own arrival, pushed into peers' mailboxes: no barrier, no flag."""
    BULK = "bulk"
    """Bulk copies (TMA) through a staging region with a signal behind each: few CTAs fill the link."""
    DIRECT = "direct"
    """Loads that reduce and stores that broadcast, in place, between two barriers."""


@dataclass(frozen=True)
class Lowering:
    """One row of a site's run-time table: how calls of up to `max_tokens` tokens run. Equal on all ranks."""

    max_tokens: int
    algorithm: Algorithm
    form: Form
    num_ctas: int = 0
    """CTAs of the kernel; 0: as many as are co-resident."""


@dataclass(frozen=True)
class Product:
    """The matrix product `a[m, k] @ b[k, n]` that makes a rank's partial result (`k` is this rank's share)."""

    m: int
    k: int
    n: int


@dataclass(frozen=True)
class Workload:
    """What one site computes on every rank, unfused: all-reduce of `[tokens, hidden]`, add, norm.

    `tokens` is the token count that estimates are made for (the hint, if shapes are dynamic);
    `max_tokens` is the largest count that the compiled graph may see (equal to `tokens` if static).
    """

    tokens: int
    max_tokens: int
    hidden: int
    dtype: str
    world: int
    hosts: int = 1
    product: Product | None = None
    num_partials: int = 1
    """All-reduces that meet in one sum (two where a mixture and its shared experts are added)."""
    num_norms: int = 1
    has_residual: bool = True
    sum_is_used: bool = True
    """Whether the graph reads the sum (partials + residual) after this site."""
    sum_may_shard: bool = False
    """Whether only other sites read the sum, as their residual: then every rank may keep just its own token rows."""
    out_dtype: str = ""
    """Of the normed rows, where it is not `dtype`."""
    min_tokens: int = 0
    """The least count that the compiled graph may see, where its count is not fixed; 0: nothing is known."""

    @property
    def is_static(self) -> bool:
        """Whether the compiled graph sees this one count only."""
        return self.max_tokens == self.tokens and self.min_tokens in (0, self.tokens)

    @property
    def message_bytes(self) -> int:
        return self.tokens * self.hidden * DTYPE_BYTES[self.dtype]


DTYPE_BYTES: dict[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class Term:
    """One named part of an estimate; negative where work is hidden under other work."""

    name: str
    us: float


@dataclass(frozen=True)
class Estimate:
    """Predicted time as a sum of named terms, with the model's own relative error."""

    terms: tuple[Term, ...]
    relative_error: float = 0.0

    @property
    def us(self) -> float:
        return sum(term.us for term in self.terms)

    @property
    def error_us(self) -> float:
        return abs(self.us) * self.relative_error


@dataclass(frozen=True)
class Rejection:
    """Why a candidate may not be used: a stable code, one sentence, and the values that decided it."""

    code: str
    message: str
    values: Values = ()


@dataclass(frozen=True)
class Site:
    """A place in a captured graph that a rule looked at."""

    id: str
    rule: str
    group: str
    """Name of the process group whose ranks meet here."""
    module: str
    """Path of the module that makes the partial result, for people; no decision rests on it."""
    collectives: tuple[str, ...]
    """Names of the graph nodes whose communication this site stands for."""
    workload: Workload | None
    """None where the form was not recognized: then `rejections` says why and the site is left."""
    form: str = ""
    """The computation in words of torch: `all_reduce(mm) + residual -> rms_norm(eps=1e-05)`."""
    rejections: tuple[Rejection, ...] = ()
    """Reasons that hold for every fabric and parameter; empty if the rule may rewrite the site."""
    count: int = 1
    """How many places of the whole model this one stands for (layers of the same kind)."""


@dataclass(frozen=True)
class Candidate:
    """A site with one way to lower it."""

    choice: str
    """Rule name, or `leave`."""
    fabric: Fabric
    algorithm: Algorithm
    parameters: Values = ()
    estimate: Estimate | None = None
    rejections: tuple[Rejection, ...] = ()
    lowerings: tuple[Lowering, ...] = ()
    """The run-time table by token count, ascending; more tokens than the last row has go through the library."""
    whole: Estimate | None = None
    """Where `estimate` counts on the sum staying sharded: the estimate with the sum handed out whole. A decision has
    settled which of the two counts, and has that one as its `estimate`."""

    @property
    def allowed(self) -> bool:
        return not self.rejections


@dataclass(frozen=True)
class Decision:
    """The candidate chosen for a site, and all the others with what spoke against them."""

    site: Site
    chosen: Candidate
    alternatives: tuple[Candidate, ...]
    unfused: Estimate | None

    @property
    def rewritten(self) -> bool:
        return self.chosen.choice != LEAVE

    @property
    def saving_us(self) -> float:
        if self.unfused is None or self.chosen.estimate is None:
            return 0.0
        return self.unfused.us - self.chosen.estimate.us


@dataclass(frozen=True)
class Slot:
    """`bytes` of the arena from `offset` on, owned by the named sites (one after the other)."""

    offset: int
    bytes: int
    owners: tuple[str, ...]


@dataclass(frozen=True)
class Placement:
    """Where a rewritten site works in the arena of its group; offsets and bytes are 0 where sites share regions."""

    site: str
    partial_offset: int
    """This rank's partial result, read by peers: two buffers of `partial_bytes`, used in turn."""
    partial_bytes: int
    output_offset: int
    """Rows that this rank hands out in a two-shot exchange."""
    max_tokens: int
    """The largest token count that fits; more go through the library at run time."""
    residual_sharded: bool = False
    """The residual that comes in holds only this rank's token rows."""
    sum_sharded: bool = False
    """The sum that goes out holds only this rank's token rows (every reader accepts that)."""
    normed_lands: bool = False
    """The normed rows lie in the arena, where peers write them (every reader is through before the next site)."""


@dataclass(frozen=True)
class RegionNeed:
    """Bytes of the regions of a GPU arena, by use; each a multiple of 256. See `csrc/fabric/peer.h`."""

    mailbox_bytes: int = 0
    """Of one of the two mailboxes."""
    staging_bytes: int = 0
    output_bytes: int = 0
    partial_bytes: int = 0
    """Where the product writes for loads that reduce in place."""

    def union(self, other: RegionNeed) -> RegionNeed:
        """Room for either."""
        return RegionNeed(*(max(a, b) for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True)
class BufferPlan:
    """All symmetric memory that one graph needs in one process group, known before any is allocated."""

    group: str
    bytes: int
    slots: tuple[Slot, ...] = ()
    """On GPUs the regions, in the order of `csrc/fabric/peer.h`: mailboxes, staging, output, partial."""
    placements: tuple[Placement, ...] = ()
    fabric: Fabric = Fabric.SHM
    regions: RegionNeed | None = None
    """On GPUs: all sites of the group share them, and the runtime places them."""


@dataclass(frozen=True)
class Fallback:
    """A graph that runs unrewritten because a step failed (or because `strict` is off and it could not agree)."""

    graph: str
    step: str
    error: str


@dataclass(frozen=True)
class Work:
    """Predicted time of one kernel that a graph runs outside its sites, the same before and after rewriting."""

    module: str
    """Path of the module that it belongs to; empty where the graph does not tell."""
    kind: str
    """`product`, `attention`, `memory` (point-wise operations and reductions fused into one kernel) or `collective`."""
    us: float
    after: int
    """Sites that come before it in the order of the graph."""
    count: int = 1
    """How many places of the whole model this one stands for (layers of the same kind)."""


@dataclass(frozen=True)
class WorkFailure:
    """Why the work outside the sites of a graph has no predicted time. What the graph runs does not rest on it."""

    exception: str
    """Name of the exception's class."""
    message: str
    """The first line of what it says; empty where it says nothing."""

    def __str__(self) -> str:
        return f"{self.exception}: {self.message or 'no message'}"


@dataclass(frozen=True)
class Stretch:
    """Token counts from `tokens` on, up to the next stretch, at which the same choice wins."""

    tokens: int
    choice: str
    """`leave`, or rule, fabric, algorithm and form."""


@dataclass(frozen=True)
class Sensitivity:
    """What would change the decision at sites of one kind, everything else held."""

    sites: tuple[str, ...]
    tokens: int
    """The token count that was decided for."""
    choice: str
    stretches: tuple[Stretch, ...]
    """The choice at every token count, ascending from 1."""
    constants: Values = ()
    """Change of a constant of the machine -> the choice that wins then; every change that was tried."""


@dataclass(frozen=True)
class Regime:
    """The token counts that one compiled graph serves; with other counts the function is compiled again."""

    min_tokens: int
    max_tokens: int | None
    """None: no end."""


@dataclass(frozen=True)
class GraphReport:
    """One captured graph: every site with its decision, the arena, and what changed rounding."""

    name: str
    phase: str
    """`prefill`, `decode`, `forward`, `backward` or `inference`."""
    tokens: int
    decisions: tuple[Decision, ...] = ()
    plans: tuple[BufferPlan, ...] = ()
    rounding: tuple[str, ...] = ()
    """One line per kind of change: which intermediate is no longer rounded, or rounded elsewhere."""
    fallbacks: tuple[Fallback, ...] = ()
    """The step that failed, where the graph runs unrewritten."""
    steps_us: Values = ()
    """Time that each step of weaveopt took in this compile."""
    work: tuple[Work, ...] = ()
    """What the graph runs outside its sites, in its order."""
    work_failure: WorkFailure | None = None
    """Set where `work` is empty because estimating it failed."""
    sensitivity: tuple[Sensitivity, ...] = ()
    """Of the sites whose choice rests on their own price; only `weaveopt explain` asks for it."""
    regime: Regime | None = None
    """The token counts that it was compiled for; None where its sizes are numbers."""

    @property
    def num_rewritten(self) -> int:
        return sum(decision.rewritten for decision in self.decisions)

    @property
    def unfused_us(self) -> float:
        return sum(d.unfused.us * d.site.count for d in self.decisions if d.unfused is not None)

    @property
    def predicted_us(self) -> float:
        return sum(d.chosen.estimate.us * d.site.count for d in self.decisions if d.chosen.estimate is not None)


@dataclass(frozen=True)
class MachineSummary:
    """Which profile the decisions rest on, and where its constants come from."""

    name: str
    measured: bool
    """True if every constant used was measured on such a machine."""
    origins: Values = ()
    """Constant -> `measured 2026-11-20 h200x4` or `datasheet ...`."""


@dataclass(frozen=True)
class Report:
    """Everything that was decided for one model: the only thing that `explain` and `weaveopt.report` print."""

    model: str
    world: int
    machine: MachineSummary | None
    graphs: tuple[GraphReport, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()
    notes: tuple[str, ...] = field(default=())
