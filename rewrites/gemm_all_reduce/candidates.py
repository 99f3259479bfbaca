"""Candidates that overlap a GEMM with the exchange of its rows, by fabric: estimates and rejections."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType

from weaveopt.cost_model import Machine
from weaveopt.cost_model.tile_config import TILES, TileConfig
from weaveopt.fabrics.fabric_eligibility import eligible_fabrics
from weaveopt.fabrics.topology import Topology
from weaveopt.ops.gemm_comm.all_reduce.call import CHUNKS, ChunkRow
from weaveopt.ops.reduction.prices.kernels import kernel_variants
from weaveopt.ops.reduction.prices.workload import Workload, with_unfused_norm
from weaveopt.ops.reduction.variant import Algorithm, KernelRow, Transfer
from weaveopt.records.candidate import Candidate, Fabric, Rejection, TableRow, Values
from weaveopt.records.site import TokenCounts
from weaveopt.records.task import Task
from weaveopt.rewrites.gemm_all_reduce import tiles
from weaveopt.rewrites.gemm_all_reduce.estimate import (
    Chunked,
    ChunkExchange,
    at_tokens,
    best_chunks,
    exchange_of,
    waves,
)
from weaveopt.rewrites.reduction.eligible import shape_rejections
from weaveopt.rewrites.reduction.plan import two_shot_division
from weaveopt.rewrites.reduction.workload import workload_of
from weaveopt.sites.reduction.matcher import ReductionFacts

RULE = "gemm_all_reduce"
UNFUSED_NORM = "norm apart: the kernel returns the unsharded sum alone, and every rank normalizes it in the graph"


@dataclass(frozen=True)
class GemmAllReducePlan:
    """Plan of a candidate, as the rule keeps it until the rewrite."""

    workload: Workload
    fabric: Fabric
    variant: str
    """The word of the operation's variant."""
    chunks: tuple[ChunkRow, ...]
    """Rows of a chunk, by the number of tokens of a call; none where nothing goes in chunks."""
    rows: tuple[KernelRow, ...] = ()
    """The run-time table of an exchange, where the fabric has one."""
    one_shot_max_tokens: int = 0
    unfused_norm: bool = False
    """The operation returns the unsharded sum, and the norm stays in the graph, on every rank."""
    cut: TileConfig | None = None
    """Tile configuration of variant `tiles`."""
    division: tuple[Hashable, ...] | None = None
    """See `ReductionPlan`: chunks are divided among ranks one by one, so their results are returned full-size."""
    gather_us: float = 0.0
    """Cost of gathering the rows of the sum on every rank, if it may stay sharded."""
    residual_sharded: bool = False
    """The residual that comes in holds only this rank's token rows."""
    sum_sharded: bool = False
    """The sum that goes out holds only this rank's token rows (every reader accepts that)."""
    aliases_arena: bool = False
    """The normalized rows alias the arena, where peers store them (every reader has finished before the next site)."""
    tasks: tuple[Task, ...] = ()
    """Tasks of all chunks; none of a single kernel."""

    @property
    def may_alias_arena(self) -> bool:
        """True if peers can store normalized rows where they are read."""
        return self.variant == TILES and self.workload.has_norm

    @property
    def max_tokens(self) -> int:
        """Rows that one exchange takes at most."""
        return max((row.chunk_tokens for row in self.chunks), default=self.workload.max_tokens)


Found = tuple[Candidate, GemmAllReducePlan | None]


@dataclass(frozen=True)
class GemmAllReduceMatch:
    """The part of a site that the operation can compute."""

    workload: Workload
    group: str
    unfused_norm: bool = False
    """Only the whole sum: the norm stays in the graph."""
    tiles_refused: tuple[Rejection, ...] = ()
    """Rejections of the kernel that computes the GEMM too, whatever the sizes."""
    copies_rows: bool = False
    """Normalized rows have to leave the arena."""

    def named(self, variant: str) -> str:
        """A variant as reports name it."""
        return f"{variant}, norm apart" if self.unfused_norm else variant


@dataclass(frozen=True)
class GemmAllReduceTerms:
    """Inputs of the candidates other than the site: equal for all sites of a group in one compile."""

    topology: Topology
    machine: Machine
    norm_refused: bool = False
    """The kernels do not take the site's norm: it can only stay in the graph."""
    tiles_refused: tuple[Rejection, ...] = ()
    """Rejections of the kernel that computes the GEMM too, for all of the site, whatever the sizes."""
    unfused_norm_refused: tuple[Rejection, ...] = ()
    """The same where the norm stays in the graph."""
    copies_rows: bool = False
    """Normalized rows have to leave the arena: not only GEMMs read them."""


@lru_cache(maxsize=4096)
def candidates(
    facts: ReductionFacts, tokens: TokenCounts, known: GemmAllReduceTerms, usable_only: bool = False
) -> tuple[Found, ...]:
    """Every variant on every fabric, allowed or rejected, with its estimate at the hint where one can be made.

    With `usable_only` only those that may be chosen. Sites with equal facts get the same objects.
    """
    found: list[Found] = []
    machine = known.machine
    forms = tuple(_forms(facts, tokens, known))
    for fabric, reasons in eligible_fabrics(known.topology, machine, VARIANTS):
        if reasons:
            found.append((Candidate(RULE, fabric, rejections=reasons), None))
            continue
        found.extend(propose(form, machine) for propose in VARIANTS[fabric] for form in forms)
    return tuple(each for each in found if each[0].allowed or not usable_only)


def _forms(facts: ReductionFacts, tokens: TokenCounts, known: GemmAllReduceTerms) -> Iterator[GemmAllReduceMatch]:
    """Forms of a site that the operation supports: all of it; and the unnormalized sum alone, if every rank
    needs it."""
    whole = workload_of(facts, tokens, takes_gemm=True, quantizes=False)
    if not known.norm_refused:
        yield GemmAllReduceMatch(whole, facts.group, tiles_refused=known.tiles_refused, copies_rows=known.copies_rows)
    if facts.has_norm and (known.norm_refused or facts.sum_is_read):
        yield GemmAllReduceMatch(
            with_unfused_norm(whole), facts.group, unfused_norm=True, tiles_refused=known.unfused_norm_refused
        )


def _chunks_in_turn(form: GemmAllReduceMatch, machine: Machine) -> Found:
    """CPU ranks: chunks follow one another."""
    exchanges = [ChunkExchange(Fabric.SHM, algorithm) for algorithm in (Algorithm.ONE_SHOT, Algorithm.TWO_SHOT)]
    best = best_chunks(machine, form.workload, exchanges)
    if best is None:
        return _indivisible(form, machine, Fabric.SHM)
    algorithm = best.exchange.algorithm
    lowered = GemmAllReducePlan(
        form.workload, Fabric.SHM, CHUNKS, chunk_table(machine, form.workload, best), unfused_norm=form.unfused_norm,
        tasks=best.tasks,
    )  # fmt: skip
    if algorithm is Algorithm.ONE_SHOT:
        lowered = replace(lowered, one_shot_max_tokens=lowered.max_tokens)
    parameters: Values = (*_division(best), ("exchange", algorithm.value))
    return _candidate(best, form, lowered, parameters), lowered


def _chunks_concurrent(form: GemmAllReduceMatch, machine: Machine) -> Found:
    """GPUs: the exchange of a chunk runs on few CTAs, concurrently with the GEMM of the next."""
    fabric, workload = Fabric.PEER, form.workload
    reasons = shape_rejections(workload, fabric)
    variants = kernel_variants(machine.untimed, fabric, workload.hidden, workload.world, workload.hosts)
    exchanges = [exchange_of(kernel, fabric, machine) for kernel in variants]
    measured = [each for each in exchanges if each.contention is not None]
    if not measured:
        message = "how a GEMM and the fabric's kernels slow each other down was not measured"
        reasons.append(Rejection("contention_not_measured", message, (("machine", machine.name),)))
    best = best_chunks(machine, form.workload, measured)
    if best is None:
        refused, _ = _indivisible(form, machine, fabric)
        return replace(refused, rejections=(*reasons, *(refused.rejections if measured else ()))), None
    kernel = best.exchange.kernel
    assert kernel is not None, "an exchange on GPUs has a kernel"
    parameters: Values = (
        *_division(best),
        ("exchange", f"{kernel.algorithm.value} {kernel.transfer.value}"),
        ("num_ctas", kernel.num_ctas),
        ("measured", kernel.measured),
    )
    lowered = GemmAllReducePlan(
        workload, fabric, CHUNKS, chunk_table(machine, workload, best), unfused_norm=form.unfused_norm, tasks=best.tasks
    )
    row = KernelRow(lowered.max_tokens, kernel.algorithm, kernel.transfer, kernel.num_ctas)
    candidate = replace(_candidate(best, form, lowered, parameters), rejections=tuple(reasons))
    return candidate, replace(lowered, rows=(row,))


def _tiles(form: GemmAllReduceMatch, machine: Machine) -> Found:
    """GPUs: one kernel computes the GEMM, and sends its tiles as they are finished."""
    fabric, workload = Fabric.PEER, form.workload
    named = form.named(TILES)
    shape = shape_rejections(workload, fabric)
    reasons = tuple(dict.fromkeys((*form.tiles_refused, *shape, *tiles.size_rejections(workload))))
    found = tiles.price(machine, workload, fabric, form.copies_rows)
    if isinstance(found, Rejection):
        return Candidate(RULE, fabric, named, rejections=(*reasons, found)), None
    if reasons:
        return Candidate(RULE, fabric, named, rejections=reasons), None
    cut = found.cut
    parameters: Values = (
        ("tile_columns", cut.tile_columns),
        ("group_pairs", cut.group_pairs),
        ("finisher_ctas", cut.reducer_ctas),
        ("measured", found.measured),
    )
    lowered = GemmAllReducePlan(
        workload, fabric, TILES, (), (KernelRow(workload.tokens, Algorithm.TWO_SHOT, Transfer.TILES),),
        unfused_norm=form.unfused_norm, cut=cut, division=two_shot_division(form.group, fabric, workload),
        gather_us=found.gather_us if workload.sum_may_shard else 0.0,
    )  # fmt: skip
    return Candidate(RULE, fabric, named, parameters, found.estimate, notes=tile_notes(lowered)), lowered


def tile_notes(lowered: GemmAllReducePlan) -> tuple[str, ...]:
    """Notes of the report on tiles, in addition to their price."""
    notes = []
    if lowered.unfused_norm:
        notes.append(UNFUSED_NORM)
    elif lowered.workload.has_norm and lowered.workload.sum_is_used and not lowered.sum_sharded:
        notes.append("gather: the unsharded sum is returned too, which other nodes read")
    if lowered.aliases_arena:
        notes.append("no copy: normalized rows are read in the arena, where peers write them")
    return tuple(notes)


VARIANTS: Mapping[Fabric, tuple[Callable[[GemmAllReduceMatch, Machine], Found], ...]] = MappingProxyType({
    Fabric.SHM: (_chunks_in_turn,),
    Fabric.PEER: (_chunks_concurrent, _tiles),
})  # fmt: skip
"""Variants that the rule proposes, by fabric."""


def chunk_table(machine: Machine, workload: Workload, best: Chunked) -> tuple[ChunkRow, ...]:
    """Rows of a chunk for every count that the compiled graph may see, by the exchange that serves the hint.

    Where a call has too few rows to divide, a chunk is all of them. Counts double from row to row, and the hint's is
    its own: what is predicted at the hint is what runs there.
    """
    if workload.is_static:
        return (ChunkRow(workload.tokens, best.rows[0]),)
    counts = {workload.tokens, workload.max_tokens}
    count = max(workload.min_tokens, 1)
    while count < workload.max_tokens:
        counts.add(count)
        count *= 2
    rows: list[ChunkRow] = []
    for count in sorted(counts):
        found = best if count == workload.tokens else best_chunks(machine, at_tokens(workload, count), [best.exchange])
        row = ChunkRow(count, count if found is None else found.rows[0])
        if rows and rows[-1].chunk_tokens == row.chunk_tokens:
            rows.pop()
        rows.append(row)
    return tuple(rows)


def _division(best: Chunked) -> Values:
    return ("num_chunks", len(best.rows)), ("chunk_tokens", best.rows[0])


def _candidate(best: Chunked, form: GemmAllReduceMatch, lowered: GemmAllReducePlan, parameters: Values) -> Candidate:
    named = form.named(CHUNKS)
    table = tuple(TableRow(row.max_tokens, f"chunks of {row.chunk_tokens}") for row in lowered.chunks)
    return Candidate(RULE, lowered.fabric, named, parameters, best.estimate, table=table, notes=_notes(best, form))


def _notes(best: Chunked, form: GemmAllReduceMatch) -> tuple[str, ...]:
    workload, when = form.workload, "concurrently with" if best.exchange.contention is not None else "before"
    notes = [f"chunks: rows go {best.rows[0]} at a time, the exchange of each {when} the GEMM of the next"]
    if form.unfused_norm:
        notes.append(UNFUSED_NORM)
    elif workload.has_norm and workload.sum_is_used and best.exchange.algorithm is Algorithm.TWO_SHOT:
        notes.append("gather: each chunk is divided among the ranks, so the unsharded sum is returned too")
    return tuple(notes)


def _indivisible(form: GemmAllReduceMatch, machine: Machine, fabric: Fabric) -> Found:
    """Why there are no chunks."""
    known = waves(machine, form.workload)
    values: Values = (("tokens", form.workload.tokens),)
    why = Rejection("too_few_rows", "there is no chunk that is not the whole", values)
    if known is not None:
        values = (*values, ("waves", known.num_waves), ("tile_m", known.tile_m))
        message = "the GEMM's tiles run in so few waves that chunks of it would hide nothing"
        why = Rejection("one_wave", message, values)
    return Candidate(RULE, fabric, form.named(CHUNKS), rejections=(why,)), None
