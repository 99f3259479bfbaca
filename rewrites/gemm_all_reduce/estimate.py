"""Predicted time of a site whose rows are exchanged in chunks while its GEMM goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from weaveopt.cost_model import host_us, measured_contention, schedule
from weaveopt.cost_model.chunks import (
    ROUNDING,
    ChunkTimes,
    at_least,
    chunk_counts,
    chunk_tasks,
    divided,
    least_us,
    serial_us,
)
from weaveopt.cost_model.gemm import Waves, waves_of
from weaveopt.cost_model.machine import ContentionRow, Machine
from weaveopt.cost_model.schedule import contention_row
from weaveopt.ops.reduction.prices.estimate import estimate_fused
from weaveopt.ops.reduction.prices.kernels import KernelVariant
from weaveopt.ops.reduction.prices.workload import Workload
from weaveopt.ops.reduction.variant import Algorithm
from weaveopt.records.candidate import Estimate, Fabric, Term
from weaveopt.records.task import Task


@dataclass(frozen=True)
class ChunkExchange:
    """The kernel that exchanges every chunk's rows."""

    fabric: Fabric
    algorithm: Algorithm
    kernel: KernelVariant | None = None
    """The kernel on fabrics with a table; None: the fabric's only one."""
    contention: ContentionRow | None = None
    """Contention of it and a GEMM; None: they do not run concurrently."""

    @property
    def ctas(self) -> int:
        """CTAs that it leaves to no GEMM; 0: the two do not run concurrently."""
        return 0 if self.contention is None or self.kernel is None else self.kernel.num_ctas


@dataclass(frozen=True)
class Chunked:
    """One way to divide a site's rows."""

    exchange: ChunkExchange
    rows: tuple[int, ...]
    """Rows of every chunk."""
    tasks: tuple[Task, ...]
    estimate: Estimate


def at_tokens(workload: Workload, tokens: int) -> Workload:
    """The same with so many tokens, and no others."""
    assert workload.gemm is not None, "a site without a GEMM has no chunks"
    gemm = replace(workload.gemm, m=tokens)
    return replace(workload, tokens=tokens, max_tokens=tokens, min_tokens=0, gemm=gemm)


def waves(machine: Machine, workload: Workload) -> Waves | None:
    """Waves of the site's GEMM; None where the machine has none."""
    assert workload.gemm is not None, "a site without a GEMM has no chunks"
    return waves_of(machine, workload.gemm, workload.dtype)


def divisions(machine: Machine, workload: Workload) -> Iterator[tuple[int, ...]]:
    """Chunks of whole tiles that are worth a look, fewest first; none for a GEMM of one wave."""
    known = waves(machine, workload)
    multiple = 1 if known is None else known.tile_m
    seen: set[tuple[int, ...]] = set()
    for count in chunk_counts(workload.tokens, known):
        rows = divided(workload.tokens, count, multiple)
        if len(rows) > 1 and rows not in seen:
            seen.add(rows)
            yield rows


@dataclass(frozen=True)
class _Sizes:
    """Chunks of one site. Each size is made once, as many divisions have it."""

    machine: Machine
    workload: Workload
    _made: dict[int, Workload] = field(default_factory=dict)

    def times(self, exchange: ChunkExchange, rows: int) -> ChunkTimes:
        chunk = self._made.get(rows)
        if chunk is None:
            chunk = self._made[rows] = at_tokens(self.workload, rows)
        return _times(self.machine, chunk, exchange)

    def chunks(self, exchange: ChunkExchange, rows: Sequence[int]) -> list[ChunkTimes]:
        times = {each: self.times(exchange, each) for each in set(rows)}
        return at_least([times[each] for each in rows], self.times(exchange, self.workload.tokens).gemm_us)

    def waited_us(self, num_chunks: int) -> float:
        """Time of the host for so many chunks."""
        slowdown = self.machine.oversubscription(self.workload.world, self.workload.hosts)
        return num_chunks * host_us(self.machine) * slowdown


def estimate_chunks(machine: Machine, workload: Workload, exchange: ChunkExchange, rows: Sequence[int]) -> Chunked:
    """The site in chunks of `rows`.

    Terms: `gemm`, all chunks' GEMMs; `exchange`, of every chunk but the last; `last chunk`, the last one's, which
    nothing hides; `overlapped`, what running both at once changes; `host`. The GEMMs of chunks are not the graph's, so
    what is wrong with its price need not be with theirs.
    """
    sizes = _Sizes(machine, workload)
    return _chunked(sizes, exchange, rows, sizes.chunks(exchange, rows))


def _chunked(sizes: _Sizes, exchange: ChunkExchange, rows: Sequence[int], chunks: Sequence[ChunkTimes]) -> Chunked:
    tasks = chunk_tasks(chunks, exchange.ctas)
    gemm_us = sum(each.gemm_us for each in chunks)
    last_us = chunks[-1].exchange_us if chunks else 0.0
    exchange_us = sum(each.exchange_us for each in chunks) - last_us
    makespan_us = schedule(tasks, measured_contention(sizes.machine)).us
    # A number, no price: what overlaps is off by as much as the same work in turn.
    hidden_us = makespan_us - float(gemm_us) - float(exchange_us) - float(last_us)
    terms = (
        Term("gemm", gemm_us),
        Term("exchange", exchange_us),
        Term("overlapped", hidden_us if exchange.ctas else 0.0),
        Term("last chunk", last_us),
        Term("host", sizes.waited_us(len(rows))),
    )
    kept = tuple(term for term in terms if term.us != 0.0)
    return Chunked(exchange, tuple(rows), tasks, Estimate(kept))


def _least_us(sizes: _Sizes, exchange: ChunkExchange, rows: Sequence[int], chunks: Sequence[ChunkTimes]) -> float:
    """`_chunked` finds no less."""
    found = exchange.contention
    least = serial_us(chunks) if found is None else least_us(chunks, found.gemm, found.communication)
    return least + sizes.waited_us(len(rows))


def best_chunks(machine: Machine, workload: Workload, exchanges: Sequence[ChunkExchange]) -> Chunked | None:
    """The division and exchange predicted fastest, of equally fast ones the first; None where there is no division."""
    sizes = _Sizes(machine, workload)
    options = [
        (exchange, rows, sizes.chunks(exchange, rows))
        for rows in divisions(machine, workload)
        for exchange in _fastest(sizes, exchanges, rows[0])
    ]
    least_of = [_least_us(sizes, *option) for option in options]
    best: tuple[float, int, Chunked] | None = None
    for least, index in sorted(zip(least_of, range(len(options)), strict=True)):
        if best is not None and least * (1 - ROUNDING) > best[0]:
            break  # neither this option nor any later one is faster
        found = _chunked(sizes, *options[index])
        if best is None or (found.estimate.us, index) < best[:2]:
            best = found.estimate.us, index, found
    return None if best is None else best[2]


def exchange_of(kernel: KernelVariant, fabric: Fabric, machine: Machine) -> ChunkExchange:
    """Exchange of a kernel variant, with its measured contention with a GEMM."""
    return ChunkExchange(fabric, kernel.algorithm, kernel, contention_row(machine, kernel.num_ctas))


def _fastest(sizes: _Sizes, exchanges: Sequence[ChunkExchange], rows: int) -> list[ChunkExchange]:
    """Fastest exchange for chunks of `rows`, one for each level of contention with a GEMM."""
    message_bytes = sizes.workload.message_bytes // max(sizes.workload.tokens, 1) * rows
    best: dict[ContentionRow | None, tuple[float, ChunkExchange]] = {}
    for exchange in exchanges:
        if exchange.kernel is not None and not exchange.kernel.covers(message_bytes):
            continue
        us = sizes.times(exchange, rows).exchange_us
        if exchange.contention not in best or us < best[exchange.contention][0]:
            best[exchange.contention] = us, exchange
    return [exchange for _, exchange in best.values()]


@lru_cache(maxsize=16384)
def _times(machine: Machine, chunk: Workload, exchange: ChunkExchange) -> ChunkTimes:
    """Times of one chunk. If the sum is read it is returned unsharded, as every chunk is divided among
    ranks by itself."""
    kernel = exchange.kernel
    transfer, num_ctas = (None, None) if kernel is None else (kernel.transfer, kernel.num_ctas)
    estimate = estimate_fused(machine, chunk, exchange.fabric, exchange.algorithm, False, transfer, num_ctas)
    multiplied_us = sum(term.us for term in estimate.terms if term.name == "gemm")
    stream_switch_us = 0.0 if exchange.contention is None or machine.launch is None else machine.launch.graph_us
    exchanged_us = sum(term.us for term in estimate.terms if term.name != "gemm")
    return ChunkTimes(multiplied_us, exchanged_us + stream_switch_us)
