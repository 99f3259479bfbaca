"""The ways to run the chain on each fabric: what it takes, and what speaks against it.

Both operations have their own prices, and the norm between them is a kernel of Inductor's on a part of the rows. Of
several kernels for an operation the one that is predicted fastest is taken: they do not depend on each other. A kernel
that holds the norm too (`tiles norm`) makes a candidate of its own, with its own reasons against it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType

from weaveopt.cost_model import Gemm, Machine, gemm_us, host_us, memory_us, norm_us
from weaveopt.cost_model.tile_config import TILES_NORM
from weaveopt.fabrics.topology import Topology
from weaveopt.ops.gemm_comm.all_gather import prices as gathering
from weaveopt.ops.gemm_comm.reduce_scatter import prices as scattering
from weaveopt.records.candidate import Candidate, Estimate, Fabric, Rejection, Term, Values
from weaveopt.records.site import DTYPE_BYTES, TokenCounts
from weaveopt.rewrites.reduction.plan import two_shot_division
from weaveopt.rewrites.reduction.sharding import GATHER
from weaveopt.rewrites.reduction.workload import workload_of
from weaveopt.sites.reduction.matcher import ReductionFacts

RULE = "shard_norm"
_NAMES: Mapping[str, str] = MappingProxyType({"reduce": "reduce_scatter", "gather": "all_gather"})
"""Terms of the operations, as they are called where both are one candidate's."""


@dataclass(frozen=True)
class Chain:
    """Work of the chain on every rank, with the kernels' rejections."""

    facts: ReductionFacts
    tokens: TokenCounts
    depths: tuple[int, ...]
    """k of the GEMMs that make partial results."""
    widths: tuple[int, ...]
    """Columns of the GEMMs that read the normalized rows."""
    rows_dtype: str
    num_residuals: int
    is_symbolic: bool
    """True if the token count is symbolic, whatever count it is priced for."""
    tiles_refused: tuple[Rejection, ...] = ()
    pushed_refused: tuple[Rejection, ...] = ()
    norm_refused: tuple[Rejection, ...] = ()
    """Why the kernel of tiles does not take in addition and norm."""

    @property
    def is_padded(self) -> bool:
        """True if rows of zeros are appended so that all ranks have equally many."""
        return self.is_symbolic or bool(self.tokens.hint % self.facts.world)

    @property
    def padded(self) -> TokenCounts:
        """Rows of the operations: all ranks have equally many."""
        world, tokens = self.facts.world, self.tokens
        least, hint, most = (-(-each // world) * world for each in (tokens.least, tokens.hint, tokens.most))
        return TokenCounts(hint, least, most)

    @property
    def row_bytes(self) -> int:
        return self.facts.hidden * DTYPE_BYTES[self.facts.dtype]

    @property
    def shard_bytes(self) -> float:
        """Bytes of this rank's rows of the sum."""
        return self.padded.hint * self.row_bytes / self.facts.world

    @property
    def scatter(self) -> scattering.GemmReduceScatterWork:
        facts = self.facts
        gemms = tuple(Gemm(self.padded.hint, depth, facts.hidden) for depth in self.depths)
        return scattering.GemmReduceScatterWork(gemms, facts.dtype, facts.world, facts.hosts)

    @property
    def gather(self) -> gathering.AllGatherGemmWork:
        facts, tokens = self.facts, self.padded.hint
        gemms = tuple(Gemm(tokens, facts.hidden, width) for width in self.widths)
        return gathering.AllGatherGemmWork(tokens, facts.hidden, gemms, self.rows_dtype, facts.world, facts.hosts)

    @property
    def sum_gather(self) -> gathering.AllGatherGemmWork:
        """All-gather of the sum's rows, for sites whose sum every rank needs."""
        facts = self.facts
        return gathering.AllGatherGemmWork(
            self.padded.hint, facts.hidden, (), facts.dtype, facts.world, facts.hosts, True
        )


@dataclass(frozen=True)
class ShardNormPlan:
    """Plan of a candidate, as the rule keeps it until the rewrite."""

    fabric: Fabric
    max_tokens: int
    """Rows of an operation, padding included."""
    tiles_cut: str
    pushed_cut: str
    takes_norm: bool
    """The kernel of tiles adds the residual and normalizes."""
    is_padded: bool
    division: tuple[Hashable, ...]
    """See `ReductionPlan`: ranks have equally many rows, one after the other."""
    gather_us: float
    """Cost of gathering the rows of the sum, if they may stay sharded."""
    unshard_copy_us: float
    """Cost of copying this rank's rows of the sum into a full-size buffer, for consumers that take the unsharded sum.
    The kernel with the norm stores them there."""
    residual_sharded: bool = False
    """The residual that comes in holds only this rank's token rows."""
    sum_sharded: bool = False
    """The sum that goes out holds only this rank's token rows (every reader accepts that)."""

    @property
    def unfused_norm(self) -> bool:
        """The norm is part of it."""
        return False

    @property
    def may_alias_arena(self) -> bool:
        """False: only the operation's own GEMMs read normalized rows."""
        return False


Found = tuple[Candidate, ShardNormPlan | None]


@lru_cache(maxsize=4096)
def candidates(chain: Chain, topology: Topology, machine: Machine, usable_only: bool = False) -> tuple[Found, ...]:
    """One on each fabric, allowed or rejected, with its estimate at the hint where one can be made.

    With `usable_only` only those that may be chosen. Equal sites get the same objects.
    """
    found = _every(chain, topology, machine)
    return tuple(each for each in found if each[0].allowed or not usable_only)


def _every(chain: Chain, topology: Topology, machine: Machine) -> Iterator[Found]:
    counts = chain.padded
    scatters = _by_fabric(
        scattering.candidates(
            RULE, chain.scatter, counts, topology, machine, False, chain.tiles_refused, _norm_refused(chain)
        )
    )
    gathers = _by_fabric(
        gathering.candidates(RULE, chain.gather, counts, topology, machine, False, chain.pushed_refused)
    )
    sums = _by_fabric(gathering.candidates(RULE, chain.sum_gather, counts, topology, machine, False))
    for fabric, offered in scatters.items():
        read = (gathers[fabric], *((sums[fabric],) if chain.facts.sum_is_read else ()))
        gathering_parts = [_best(each) for each in read]
        for takes_norm in (False, True):
            firsts = [each for each in offered if (each[0].variant == TILES_NORM) is takes_norm]
            if not firsts:
                continue
            parts = [_best(firsts), *gathering_parts]
            reasons = tuple(
                dict.fromkeys(reason for part in parts if not isinstance(part, ChainPart) for reason in part)
            )
            known = [part for part in parts if isinstance(part, ChainPart)]
            if reasons:
                yield Candidate(RULE, fabric, TILES_NORM if takes_norm else "", rejections=reasons), None
            else:
                yield _joined(chain, machine, fabric, known)


def _norm_refused(chain: Chain) -> tuple[Rejection, ...]:
    """Why the kernel of tiles does not take in addition and norm at this token count."""
    if not chain.is_padded:
        return chain.norm_refused
    message = "the kernel adds a residual of equally many rows on every rank, and rows have to be filled up"
    values = (("tokens", chain.tokens.hint), ("ranks", chain.facts.world))
    return (*chain.norm_refused, Rejection("uneven_rows", message, values))


@dataclass(frozen=True)
class ChainPart:
    """An operation of the chain, by the kernel that is predicted fastest."""

    variant: str
    cut: str
    estimate: Estimate


def _by_fabric(
    offered: Iterator[tuple[Candidate, scattering.GemmCommPlan]] | Iterator[tuple[Candidate, gathering.GemmCommPlan]],
) -> dict[Fabric, list[tuple[Candidate, str]]]:
    found: dict[Fabric, list[tuple[Candidate, str]]] = {}
    for candidate, lowered in offered:
        found.setdefault(candidate.fabric, []).append((candidate, lowered.cut))
    return found


def _best(offered: list[tuple[Candidate, str]]) -> ChainPart | tuple[Rejection, ...]:
    """The fastest that may be used, or why none may."""
    allowed = [
        ChainPart(candidate.variant, cut, candidate.estimate)
        for candidate, cut in offered
        if candidate.allowed and candidate.estimate is not None
    ]
    if not allowed:
        return tuple(reason for candidate, _ in offered for reason in candidate.rejections)
    return min(allowed, key=lambda part: part.estimate.us)


def _joined(chain: Chain, machine: Machine, fabric: Fabric, parts: list[ChainPart]) -> Found:
    scatter, gather = parts[:2]
    takes_norm = scatter.variant == TILES_NORM
    between = Estimate(()) if takes_norm else _between(chain, machine)
    estimate = _named(scatter.estimate).plus(between).plus(_named(gather.estimate))
    summed = parts[2].estimate if len(parts) > 2 else Estimate(())
    if summed.us:
        estimate = estimate.plus(Estimate((Term(GATHER, summed.price),)))
    facts, counts = chain.facts, chain.padded
    division: tuple[Hashable, ...]
    if chain.is_padded:
        shape = (facts.world, facts.hidden, facts.dtype, chain.tokens.hint, counts.most)
        division = (facts.group, fabric, RULE, *shape)
    else:
        exact = workload_of(facts, TokenCounts(chain.tokens.hint), takes_gemm=False, quantizes=False)
        division = two_shot_division(facts.group, fabric, exact)
    copy_us = memory_us(machine, chain.shard_bytes * (1 + facts.world)) + host_us(machine)
    lowered = ShardNormPlan(
        fabric, counts.most, scatter.cut, gather.cut, takes_norm, chain.is_padded, division,
        gather_us=summed.price if facts.sum_read_by_reductions else 0.0,
        unshard_copy_us=0.0 if takes_norm else copy_us,
    )  # fmt: skip
    variant = ", ".join(part.variant for part in parts[:2] if part.variant)
    parameters: Values = (("gemms", len(chain.depths)), ("read_by", len(chain.widths)), ("max_tokens", counts.most))
    parameters += tuple((name, cut) for name, cut in (("tiles", scatter.cut), ("pushed", gather.cut)) if cut)
    return Candidate(RULE, fabric, variant, parameters, estimate, notes=notes_of(lowered, facts)), lowered


def _between(chain: Chain, machine: Machine) -> Estimate:
    """Estimate of the kernels that the graph itself runs between both operations, with the host's part of them.

    On this rank's rows: `norm`, the addition and the norm in one kernel, two if a norm precedes the residual. On all
    rows: `pad`, copies of the GEMMs' operands with rows of zeros appended, and what GEMMs gain by those.
    """
    facts = chain.facts
    slowdown = machine.oversubscription(facts.world, facts.hosts)
    traffic = (1 + chain.num_residuals + 1 + facts.sum_is_read) * chain.shard_bytes
    norms_us = norm_us(machine, traffic, facts.hidden)
    if facts.num_norms > 1:
        norms_us += norm_us(machine, 2 * chain.shard_bytes, facts.hidden)
    kernels, pad_us = max(facts.num_norms, 1), 0.0
    if chain.is_padded:
        size = chain.tokens.hint * DTYPE_BYTES[facts.dtype]
        pad_us = sum(memory_us(machine, 2 * size * depth) for depth in chain.depths) + _sped_up_us(chain, machine)
        kernels += len(chain.depths)
    terms = (
        Term("norm", norms_us * slowdown),
        Term("pad", pad_us * slowdown),
        Term("host", kernels * host_us(machine) * slowdown),
    )
    return Estimate(tuple(term for term in terms if term.us))


def _sped_up_us(chain: Chain, machine: Machine) -> float:
    """Time that rows of zeros would save: on CPUs a GEMM of two rows may be faster than one of one row. The rule must
    not win by that, so it is charged."""
    faster = 0.0
    for work in (*chain.scatter.gemms, *chain.gather.gemms):
        as_it_is = replace(work, m=chain.tokens.hint)
        dtype = chain.facts.dtype
        faster += max(gemm_us(machine, as_it_is, dtype) - gemm_us(machine, work, dtype), 0.0)
    return faster


def _named(estimate: Estimate) -> Estimate:
    """With terms that say of which operation they are."""
    return replace(estimate, terms=tuple(Term(_NAMES.get(term.name, term.name), term.us) for term in estimate.terms))


def notes_of(lowered: ShardNormPlan, facts: ReductionFacts) -> tuple[str, ...]:
    """Notes of the report on a candidate, in addition to its price."""
    where = " in the kernel that sums them" if lowered.takes_norm else ""
    notes = [f"every rank adds and normalizes its own rows{where}; GEMMs read them gathered"]
    if facts.sum_is_read and not lowered.sum_sharded:
        notes.append("gather: the whole sum is gathered too, which others read")
    if lowered.is_padded:
        notes.append("pad: rows of zeros fill up the last rank's")
    return tuple(notes)
