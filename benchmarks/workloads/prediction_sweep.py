"""A wide sweep of sites: at each one, only leaving it alone and what the model chooses are measured.

Token counts are drawn evenly in the logarithm, odd ones too, and row lengths from those of models. It asks one thing:
is a decision ever slower than leaving the site alone? A site that the model leaves is measured once, and counts as 1.

Left alone, a site runs what a graph with dynamic token counts runs: the library's all-reduce, and Inductor's addition
and norm, compiled once for a row length and any number of tokens (and once more for a single token, as torch does).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from random import Random
from statistics import median

import torch

from benchmarks.accuracy import NEVER_SLOWER
from benchmarks.record import Row
from benchmarks.workloads.prediction_model import Case, chosen, kernel_of, predicted_us, swept_row
from weaveopt.cost_model import Machine
from weaveopt.measure.cases.memory import add_norm
from weaveopt.measure.cases.reduction.calls import DTYPE, Fused
from weaveopt.measure.clock import Launch, Sample
from weaveopt.measure.ranks import Ranks
from weaveopt.ops.reduction.variant import KernelRow
from weaveopt.records.candidate import LEAVE

Site = tuple[int, int]
"""(hidden, tokens)."""
Timed = Callable[[float], Sample]
"""One measurement of a side of a site that takes about so many microseconds."""
COMPILED_TOKENS = 512
"""First token count that Inductor sees, by which it picks the shape of its blocks."""
LEAST_NOISE = 0.03
"""Two measurements a second apart may differ by so much, however calm each of them is."""
AGAIN = 6
"""Further measurements of each side of a doubtful site, in turns; with the first ones the median of seven counts."""


@dataclass(frozen=True)
class Span:
    """Range that sites are drawn from."""

    most_tokens: int
    hiddens: tuple[int, ...]


GPU = Span(16384, (1024, 1536, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 12288, 16384))
CPU = Span(700, (1024, 1536, 2048, 3072, 4096))


def draw(span: Span, count: int, world: int) -> list[Site]:
    """`count` sites, the same in every run, by row length."""
    numbers = Random(world)
    found: set[Site] = set()
    while len(found) < count:
        tokens = int((span.most_tokens + 1) ** numbers.random())
        found.add((numbers.choice(span.hiddens), tokens))
    return sorted(found)


def is_doubtful(leave: Sample, choice: Sample) -> bool:
    """True if, by these two measurements, the choice may be slower than leaving by more than 1 %."""
    ratio = leave.us / choice.us
    # The lower quartile of one against the upper one of the other.
    low = ratio * (1 - leave.spread / 2) / (1 + choice.spread / 2)
    return min(low, ratio * (1 - LEAST_NOISE)) < NEVER_SLOWER


@dataclass(frozen=True)
class Settled:
    """Both sides of a site, in microseconds."""

    leave_us: float
    us: float
    times: int
    """How often each side was measured."""


def settle(leave: Timed, choice: Timed, leave_us: float, us: float) -> Settled:
    """Each side once, and where that leaves a doubt again, in turns. `leave_us` and `us` are what is expected."""
    pairs = [(leave(leave_us), choice(us))]
    if is_doubtful(*pairs[0]):
        pairs += [(leave(leave_us), choice(us)) for _ in range(AGAIN)]
    return Settled(median(pair[0].us for pair in pairs), median(pair[1].us for pair in pairs), len(pairs))


Compiled = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]


def left_alone(
    ranks: Ranks, compiled: Compiled, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> Launch:
    """The library's all-reduce and Inductor's addition and norm, as a compiled graph runs them."""
    compiled(x, residual, weight)
    ops = torch.ops._c10d_functional

    def run(index: int) -> object:
        return compiled(ops.wait_tensor(ops.all_reduce_(x, "sum", ranks.name)), residual, weight)

    return run


class Unfused:
    """Leaving sites of one row length alone, at any number of tokens."""

    def __init__(self, ranks: Ranks, hidden: int) -> None:
        torch._dynamo.reset()
        self._ranks = ranks
        self._weight = torch.ones(hidden, device=ranks.device, dtype=DTYPE)
        self._compiled = torch.compile(add_norm)
        # The first graph is for any number of tokens but one; without the marks it would be for these alone.
        x, residual = self._rows(COMPILED_TOKENS)
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(residual, 0)
        self._compiled(x, residual, self._weight)

    def _rows(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        size = (tokens, self._weight.numel())
        return torch.randn(size, device=self._ranks.device, dtype=DTYPE), self._weight.new_zeros(size)

    def launch(self, tokens: int) -> Launch:
        return left_alone(self._ranks, self._compiled, *self._rows(tokens), self._weight)


@dataclass(frozen=True)
class Choice:
    """Choice of the model at a site, and the predictions that a clock starts from."""

    case: Case
    name: str
    fused: Fused | None
    """None: the site is left alone."""
    leave_us: float
    us: float


@cache
def plan(machine: Machine, world: int, count: int, span: Span) -> tuple[Choice, ...]:
    """Every site's choice, known before anything runs: one reservation of memory serves them all."""
    sites = draw(span, count, world)
    return tuple(_choice(machine, {"ranks": world, "hidden": hidden, "tokens": tokens}) for hidden, tokens in sites)


def _choice(machine: Machine, case: Case) -> Choice:
    name, leave_us = chosen(machine, case), predicted_us(machine, {**case, "kind": LEAVE})
    assert leave_us is not None, case
    if name == LEAVE:
        return Choice(case, name, None, leave_us, leave_us)
    us = predicted_us(machine, {**case, "kind": "fused", "kernel": name})
    assert us is not None, (case, name)
    kernel, tokens = kernel_of(name), int(case["tokens"])
    lowering = KernelRow(tokens, kernel.algorithm, kernel.transfer, kernel.num_ctas)
    return Choice(case, name, Fused(lowering, int(case["hidden"]), tokens), leave_us, us)


def measure(
    machine: Machine,
    ranks: Ranks,
    planned: Sequence[Choice],
    leaving: Callable[[Launch], Timed],
    exchange: Callable[[Fused], Timed],
) -> list[Row]:
    """A row for each site. `leaving` and `exchange` get a side of it ready for the clock."""
    rows = []
    for hidden, sites in groupby(planned, key=lambda each: int(each.case["hidden"])):
        unfused = Unfused(ranks, hidden)
        for each in sites:
            leave = leaving(unfused.launch(int(each.case["tokens"])))
            if each.fused is None:
                rows.append(swept_row(machine, each.case, {LEAVE: leave(each.leave_us).us}, 1))
                continue
            found = settle(leave, exchange(each.fused), each.leave_us, each.us)
            rows.append(swept_row(machine, each.case, {LEAVE: found.leave_us, each.name: found.us}, found.times))
    return rows
