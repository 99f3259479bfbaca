"""Candidates of a fused all-reduce + norm on each fabric: their estimates and rejections.

Which of them runs is a function of what all sites of a chain share (see `table.lowerings`), so sites that share a
token-sharded residual always agree on who holds which rows.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from weaveopt.cost_model import Machine, host_us
from weaveopt.cost_model.collectives import fabric_costs
from weaveopt.fabrics.fabric_eligibility import eligible_fabrics, not_measured
from weaveopt.fabrics.topology import Topology
from weaveopt.fabrics.traits import TRAITS
from weaveopt.ops.reduction import call as op
from weaveopt.ops.reduction.prices.estimate import estimate_fused
from weaveopt.ops.reduction.prices.kernels import MEASURED_ONLY, KernelVariant, kernel_variants, longest_row_bytes
from weaveopt.ops.reduction.prices.table import lowerings, one_shot_max_tokens
from weaveopt.ops.reduction.prices.workload import Workload, with_unfused_norm
from weaveopt.ops.reduction.variant import OP, Algorithm, KernelRow, Transfer
from weaveopt.records.candidate import Candidate, Estimate, Fabric, Rejection, Scalar, TableRow, Term, Values
from weaveopt.records.site import DTYPE_BYTES, TokenCounts
from weaveopt.rewrites.reduction.eligible import shape_rejections
from weaveopt.rewrites.reduction.plan import two_shot_division
from weaveopt.rewrites.reduction.workload import workload_of
from weaveopt.sites.reduction.matcher import ReductionFacts

FP8_ROW_ALIGNMENT = 16
"""Elements of a row in e4m3: bulk copies move 16 bytes, and any transfer may stand in the run-time table."""
GEMM_IN_ARENA = frozenset({Fabric.SHM, Fabric.TCP, Fabric.MULTIMEM})
"""Fabrics whose operation makes the partial result too, in the arena; on `peer` rows are sent from wherever they are,
and the GEMM stays in the graph, where Inductor picks its kernel."""


@dataclass(frozen=True)
class FusedReductionPlan:
    """Plan of a candidate, as the rule keeps it until the rewrite."""

    workload: Workload
    fabric: Fabric
    group: str
    division: tuple[Hashable, ...] | None = None
    """See `ReductionPlan`."""
    algorithm: Algorithm = Algorithm.TWO_SHOT
    """Algorithm of the kernel that serves the token count that was decided for."""
    rows: tuple[KernelRow, ...] = ()
    """The run-time table."""
    one_shot_max_tokens: int = 0
    gather_us: float = 0.0
    """Cost of gathering the rows of the sum on every rank."""
    takes_gemm: bool = False
    quantizes: bool = False
    unfused_norm: bool = False
    """The operation returns the unsharded sum, and the norm stays in the graph, on every rank."""
    residual_sharded: bool = False
    """The residual that comes in holds only this rank's token rows."""
    sum_sharded: bool = False
    """The sum that goes out holds only this rank's token rows (every reader accepts that)."""
    aliases_arena: bool = False
    """The normalized rows alias the arena, where peers store them (every reader has finished before the next site)."""
    begun: bool = False
    """Two operators begin and end the exchange, and other work of the graph runs between them."""

    @property
    def may_alias_arena(self) -> bool:
        """True if peers can store normalized rows where they are read; rows that have scales of their own cannot be."""
        return (
            self.fabric is Fabric.PEER
            and not self.begun
            and not self.quantizes
            and self.workload.has_norm
            and any(row.transfer is Transfer.BULK for row in self.rows)
        )

    @property
    def max_tokens(self) -> int:
        """The largest count that fits; more go through the library at run time."""
        return max((row.max_tokens for row in self.rows), default=self.workload.max_tokens)


SAME_CORES = Rejection("same_cores", "ranks exchange rows on the cores that compute: nothing would run in between")
Found = tuple[Candidate, FusedReductionPlan]


@dataclass(frozen=True)
class FusedReductionTerms:
    """Inputs of the candidates other than the site: equal for all sites of a group in one compile."""

    rule: str
    between_hosts: bool
    """True if candidates are on fabrics that join ranks of several hosts; false if on those within one host."""
    topology: Topology
    machine: Machine
    against_library: bool
    """False where the rule is forced: then its kernels are not compared with the library's."""
    begun: bool = False
    """True if two operators begin and end the exchange: its GEMM stays in the graph on every fabric."""
    norm_refused: bool = False
    """The kernels do not take the site's norm: it can only stay in the graph."""


@lru_cache(maxsize=4096)
def candidates(
    facts: ReductionFacts, tokens: TokenCounts, known: FusedReductionTerms, usable_only: bool = False
) -> tuple[Found, ...]:
    """Every kernel on every fabric, allowed or rejected, with its estimate at the hint where one can be made.

    With `usable_only` only those that may be chosen. Sites with equal facts get the same objects.
    """
    found: list[Found] = []
    machine = known.machine
    for fabric, against in eligible_fabrics(known.topology, machine, op.FEATURES):
        if TRAITS[fabric].crosses_hosts is not known.between_hosts or (against and usable_only):
            continue
        reasons, features = list(against), op.FEATURES.get(fabric)
        if known.begun and features is not None and not features.overlaps:
            reasons.append(SAME_CORES)
            if usable_only:
                continue
        can_quantize_here = features is not None and features.quantizes and can_quantize(facts.hidden)
        quantizes = can_quantize_here and facts.quantization != "none"
        # The op that quantizes takes a partial result: its GEMM stays in the graph on every fabric.
        takes_gemm = fabric in GEMM_IN_ARENA and facts.gemm_depth > 0 and not quantizes and not known.begun
        workload = workload_of(facts, tokens, takes_gemm=takes_gemm, quantizes=quantizes)
        if features is not None and not features.shards_sum:
            workload = replace(workload, sum_may_shard=False)
        base = FusedReductionPlan(
            workload, fabric, facts.group, takes_gemm=takes_gemm, quantizes=quantizes, begun=known.begun
        )
        variants = kernel_variants(machine.untimed, fabric, workload.hidden, workload.world, workload.hosts)
        tabled = features is not None and features.tabled and bool(variants)
        if fabric in MEASURED_ONLY:
            reasons.extend(_beyond_times(workload, fabric, machine))
            if reasons and usable_only:
                continue
        if tabled and TRAITS[fabric].device == "cuda":
            reasons.extend(shape_rejections(workload, fabric))
        for form in _forms(base, facts, known):
            if tabled:
                here = _from_table(form, variants, reasons, known, usable_only)
            else:
                here = _by_threshold(form, reasons, known, usable_only)
            if form.unfused_norm and not known.norm_refused:
                here = [each for each in here if _may_pay(*each, reasons)]
            found.extend(here)
    return tuple(found)


def _beyond_times(workload: Workload, fabric: Fabric, machine: Machine) -> Iterator[Rejection]:
    """Rejections of a site that the profile's times do not cover: such kernels are not used where they were
    not timed."""
    if not TRAITS[fabric].crosses_hosts:
        if fabric in machine.fabrics and not fabric_costs(machine, fabric).curves_of(OP):
            yield not_measured(machine, fabric, OP)
        return
    longest = longest_row_bytes(machine, fabric, workload.world // workload.hosts)
    if not longest:
        yield not_measured(machine, fabric, OP)
        return
    row_bytes = workload.hidden * DTYPE_BYTES[workload.dtype]
    if row_bytes > longest:
        rows = (("row_bytes", row_bytes), ("measured", longest))
        yield Rejection("beyond_measured", "the kernel was not measured with rows that long, and is not used", rows)


def _forms(base: FusedReductionPlan, facts: ReductionFacts, known: FusedReductionTerms) -> Iterator[FusedReductionPlan]:
    """Forms of a site that the operation supports: all of it; and the unnormalized sum alone, if every rank
    needs it."""
    if not known.norm_refused:
        yield base
    if facts.has_norm and (known.norm_refused or (facts.sum_is_read and not facts.sum_read_by_reductions)):
        yield replace(base, workload=with_unfused_norm(base.workload), quantizes=False, unfused_norm=True)


def _may_pay(candidate: Candidate, lowered: FusedReductionPlan, reasons: list[Rejection]) -> bool:
    """True if a norm left in the graph may be faster than a fused one: the fused op would gather rows of
    both results."""
    return lowered.algorithm is Algorithm.TWO_SHOT and len(candidate.rejections) == len(reasons)


def _named(algorithm: Algorithm, transfer: Transfer | None, lowered: FusedReductionPlan) -> str:
    """A kernel and its form, as reports name them."""
    name = algorithm.value if transfer is None else f"{algorithm.value} {transfer.value}"
    name = f"{name}, norm apart" if lowered.unfused_norm else name
    return f"{name}, begun" if lowered.begun else name


def can_quantize(hidden: int) -> bool:
    """True if the kernels that quantize support rows of this length."""
    return hidden % FP8_ROW_ALIGNMENT == 0


def _from_table(
    base: FusedReductionPlan,
    variants: tuple[KernelVariant, ...],
    reasons: list[Rejection],
    known: FusedReductionTerms,
    usable_only: bool,
) -> list[Found]:
    """One candidate for each transfer and algorithm; the run-time table says which of them runs at the hint."""
    workload = base.workload
    table = _table(workload, base.fabric, known)
    row = next((row for row in table if workload.tokens <= row.max_tokens), None)
    end = table[-1].max_tokens if table else 0
    found: list[Found] = []
    for algorithm, transfer in dict.fromkeys((kernel.algorithm, kernel.transfer) for kernel in variants):
        same = [kernel for kernel in variants if (kernel.algorithm, kernel.transfer) == (algorithm, transfer)]
        able = [kernel for kernel in same if kernel.covers(workload.message_bytes)]
        is_chosen = row is not None and (row.algorithm, row.transfer) == (algorithm, transfer)
        why = [*reasons, *_against(workload, row, end, is_chosen, able)]
        if why and usable_only:
            continue
        parameters: Values = (("form", transfer.value),)
        estimate, gather_us = None, 0.0
        if able:
            if is_chosen and row is not None:
                able = [kernel for kernel in able if kernel.num_ctas == row.num_ctas]
            estimates = [
                (_estimates(workload, base.fabric, algorithm, known.machine, kernel), kernel) for kernel in able
            ]
            (estimate, gather_us), best = min(estimates, key=lambda pair: pair[0][0].us - pair[0][1])
            own: Values = () if transfer is Transfer.MESSAGE else (("num_ctas", best.num_ctas),)
            parameters = (("form", transfer.value), *own, ("max_tokens", end), ("measured", best.measured))
        rows = tuple(_table_row(each) for each in table)
        named = _named(algorithm, transfer, base)
        candidate = Candidate(known.rule, base.fabric, named, parameters, estimate, tuple(why), rows)
        lowered = replace(
            base,
            algorithm=algorithm,
            division=_division(base, algorithm, parameters, table),
            rows=table,
            gather_us=gather_us,
        )
        found.append((candidate, lowered))
    return found


def _table_row(row: KernelRow) -> TableRow:
    ctas = (("num_ctas", row.num_ctas),) if row.num_ctas else ()
    return TableRow(row.max_tokens, f"{row.algorithm.value} {row.transfer.value}", ctas)


def _division(
    base: FusedReductionPlan, algorithm: Algorithm, parameters: Values, table: tuple[KernelRow, ...]
) -> tuple[Hashable, ...]:
    workload = base.workload
    # On `shm` there is no table: a graph of one size has the one algorithm that serves it.
    in_one = workload.is_static and (table[-1].max_tokens >= workload.tokens if table else base.fabric is Fabric.SHM)
    if base.fabric in (Fabric.PEER, Fabric.HOST, Fabric.SHM) and in_one and algorithm is Algorithm.TWO_SHOT:
        return two_shot_division(base.group, base.fabric, workload)
    shape = (workload.world, workload.hidden, workload.dtype, workload.tokens, workload.max_tokens)
    return (base.group, base.fabric, algorithm, *shape, parameters, table)


def _table(workload: Workload, fabric: Fabric, known: FusedReductionTerms) -> tuple[KernelRow, ...]:
    """A graph of one size has one row, and reserves memory for that alone."""
    static = workload.is_static
    table = lowerings(
        known.machine.untimed,
        fabric,
        workload.hidden,
        workload.dtype,
        workload.world,
        workload.hosts,
        workload.max_tokens,
        min_tokens=workload.tokens if static else max(workload.min_tokens, 1),
        against_library=known.against_library,
    )
    fitting = [row for row in table if row.max_tokens >= workload.tokens] if static else []
    return (replace(fitting[0], max_tokens=workload.tokens),) if fitting else table


def _against(
    workload: Workload, row: KernelRow | None, end: int, is_chosen: bool, able: list[KernelVariant]
) -> list[Rejection]:
    """Why the table has something else at the hint."""
    reasons = []
    if not able:
        values: tuple[tuple[str, Scalar], ...] = (("bytes", workload.message_bytes),)
        message = "the kernel was not measured at this size, and is not used there"
        reasons.append(Rejection("beyond_measured", message, values))
    if row is None:
        values = (("tokens", workload.tokens), ("table_ends_at", end))
        message = "the library's all-reduce, then one kernel for addition and norm, is predicted faster at this size"
        reasons.append(Rejection("library_faster", message, values))
    elif not is_chosen:
        message = f"{row.algorithm.value} {row.transfer.value} is predicted faster at this size"
        reasons.append(Rejection("slower_algorithm", message, (("tokens", workload.tokens),)))
    return reasons


def _estimates(
    workload: Workload, fabric: Fabric, algorithm: Algorithm, machine: Machine, kernel: KernelVariant | None = None
) -> tuple[Estimate, float]:
    """Estimate with the sum returned unsharded; and the cost of that, if the sum may stay sharded. The host's part
    included."""
    transfer, num_ctas = (None, None) if kernel is None else (kernel.transfer, kernel.num_ctas)
    estimate = estimate_fused(
        machine, workload, fabric, algorithm, sum_sharded=False, transfer=transfer, num_ctas=num_ctas
    )
    gather_us = sum(term.us for term in estimate.terms if term.name == "gather")
    waited_us = host_us(machine) * machine.oversubscription(workload.world, workload.hosts)
    estimate = estimate.plus(Estimate((Term("host", waited_us),)))
    return estimate, gather_us if workload.sum_may_shard else 0.0


def _by_threshold(
    base: FusedReductionPlan, reasons: list[Rejection], terms: FusedReductionTerms, usable_only: bool
) -> list[Found]:
    """One-shot up to a token count, two-shot above: `shm`, and fabrics without kernels of ours.

    Those between hosts are priced as the paper's recursive doubling.
    """
    workload, fabric, machine = base.workload, base.fabric, terms.machine
    known = fabric in machine.fabrics
    threshold = 0
    if known:
        threshold = one_shot_max_tokens(
            machine.untimed, fabric, workload.hidden, workload.dtype, workload.world, workload.hosts
        )
    algorithms: tuple[Algorithm, ...] = (Algorithm.ONE_SHOT, Algorithm.TWO_SHOT)
    chosen = Algorithm.ONE_SHOT if workload.tokens <= threshold else Algorithm.TWO_SHOT
    if workload.hosts > 1 and TRAITS[fabric].crosses_hosts:
        algorithms, chosen = (Algorithm.DOUBLING,), Algorithm.DOUBLING
    found: list[Found] = []
    for algorithm in algorithms:
        why = list(reasons)
        if known and algorithm is not chosen:
            values = (("tokens", workload.tokens), ("one_shot_max_tokens", threshold))
            why.append(Rejection("slower_algorithm", f"{chosen.value} is predicted faster at this size", values))
        if why and usable_only:
            continue
        estimate, gather_us = _estimates(workload, fabric, algorithm, machine) if known else (None, 0.0)
        parameters = (("one_shot_max_tokens", threshold), ("max_tokens", workload.max_tokens))
        candidate = Candidate(terms.rule, fabric, _named(algorithm, None, base), parameters, estimate, tuple(why))
        division = _division(base, algorithm, parameters, ())
        lowered = replace(
            base, algorithm=algorithm, division=division, one_shot_max_tokens=threshold, gather_us=gather_us
        )
        found.append((candidate, lowered))
    return found
