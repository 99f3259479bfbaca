"""Programs of the ranks: two layers, repeatedly, for every mode in which a program uses weaveopt.

x = norm(residual := residual + all_reduce(x @ product)) @ after        # twice
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tests.faults.case import FAULT_STEP, NUM_STEPS, Case, Mode, Moment
from tests.graphs import forms
from weaveopt.fabrics import shm, topology
from weaveopt.ops.reduction.buffers import memory_plan
from weaveopt.ops.reduction.call import ReductionCall
from weaveopt.records.candidate import Fabric
from weaveopt.records.norm import NormKind, NormSpec

Tensor = torch.Tensor
Step = Callable[[int], tuple[Tensor, ...]]
Options = dict[str, bool | int | float | str | list[str]]

NUM_LAYERS, TOKENS, MAX_TOKENS = 2, 5, 16
LATE_S = 0.4
"""How much later than the victim the others enter the call within which a fault strikes."""
EPS = 1e-6
OTHER_SEED = 1
"""Seed of a residual that differs from the other ranks'."""


@dataclass
class Rank:
    """One rank of a case, as its program sees it."""

    case: Case
    rank: int
    inject: Callable[[], None]
    """Has the fault strike, where this rank is one that it strikes."""
    is_struck: bool
    digests: list[str] = field(default_factory=list)
    began_at: float = 0.0
    tokens: int = TOKENS
    seed: int = 0
    """Seed of the residual."""
    form: Callable[..., tuple[Tensor, ...]] = lambda *arguments: layers(*arguments)
    num_layers: int = NUM_LAYERS
    options: Options = field(default_factory=dict)
    steps: Step | None = None
    came: dict[Moment, int] = field(default_factory=dict)

    def reach(self, moment: Moment) -> None:
        """Called wherever `moment` comes; the fault strikes once."""
        times = self.came.get(moment, 0)
        self.came[moment] = times + 1
        if self.is_struck and moment is self.case.moment and times == self.case.occurrence:
            self.inject()


def inputs(rank: int, step: int, tokens: int = TOKENS, seed: int = 0) -> tuple[Tensor, Tensor]:
    """This rank's `x` of a step, and the residual, which all ranks have."""
    x = torch.randn(1, tokens, forms.INNER, generator=torch.Generator().manual_seed(1000 * step + rank))
    residual = torch.randn(1, tokens, forms.HIDDEN, generator=torch.Generator().manual_seed(7 + 1000 * seed))
    return x, residual


def layers(w: forms.Weights, x: Tensor, residual: Tensor, num_layers: int = NUM_LAYERS) -> tuple[Tensor, ...]:
    for _ in range(num_layers):
        residual = residual + forms.all_reduce(x @ w.product)
        x = forms.rms(residual, w.norm, EPS) @ w.after
    return x, residual


def other_layers(w: forms.Weights, x: Tensor, residual: Tensor, num_layers: int = NUM_LAYERS) -> tuple[Tensor, ...]:
    """With another norm: (1 + weight)."""
    for _ in range(num_layers):
        residual = residual + forms.all_reduce(x @ w.product)
        x = forms.rms_plus_one(residual, w.norm) @ w.after
    return x, residual


def reference(
    rank: int, ranks: list[int], step: int, seed_of: dict[int, int], other_norm: int | None = None
) -> tuple[Tensor, Tensor]:
    """Result that `rank` has to get in the group of `ranks`. `seed_of`: seeds of ranks with a different residual;
    `other_norm`: the rank whose norm multiplies by (1 + weight)."""
    w = forms.make_weights(torch.float32)
    x_of = {each: inputs(each, step)[0] for each in ranks}
    residual_of = {each: inputs(each, step, seed=seed_of.get(each, 0))[1] for each in ranks}
    for _ in range(NUM_LAYERS):
        total = torch.stack([x @ w.product for x in x_of.values()]).sum(0)
        residual_of = {each: residual + total for each, residual in residual_of.items()}
        x_of = {
            each: (forms.rms_plus_one(residual, w.norm) if each == other_norm else forms.rms(residual, w.norm, EPS))
            @ w.after
            for each, residual in residual_of.items()
        }
    return x_of[rank], residual_of[rank]


def compiled(
    num_layers: int, options: Options, form: Callable[..., tuple[Tensor, ...]] = layers, region: int = 0
) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    w = forms.make_weights(torch.float32)
    settings = {"force": ["all_reduce_rms_norm"], **options}

    def body(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        return form(w, x, residual, num_layers)

    # Functions of one code share what was compiled for it.
    body.__code__ = body.__code__.replace(co_name=f"region{region}")
    optimized = torch.compile(body, backend="weave", dynamic=False, options=settings)

    def run(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            found: tuple[Tensor, ...] = optimized(x, residual)
            return found

    return run


def group_name() -> str:
    return str(c10d._get_default_group().group_name)


def options_of(rank: Rank) -> Options:
    case = rank.case
    return {"timeout_s": case.timeout_s, "compile_timeout_s": case.compile_timeout_s, **rank.options}


def graph(rank: Rank) -> Step:
    """All layers in one graph."""
    run = compiled(rank.num_layers, options_of(rank), rank.form)
    return lambda step: run(*inputs(rank.rank, step, rank.tokens, rank.seed))


def regions(rank: Rank) -> Step:
    """Each layer compiled apart: the second one when the first has run already."""
    runs = [compiled(1, options_of(rank), rank.form, region) for region in range(rank.num_layers)]

    def one_step(step: int) -> tuple[Tensor, ...]:
        values: tuple[Tensor, ...] = inputs(rank.rank, step, rank.tokens, rank.seed)
        for run in runs:
            values = run(*values)
        return values

    return one_step


def make_call(rank: Rank, site: str, group: str, world: int) -> ReductionCall:
    return ReductionCall(
        site=site, group=group, fabric=Fabric.SHM, world=world, hidden=forms.HIDDEN, dtype="float32",
        out_dtype="float32", max_tokens=MAX_TOKENS, one_shot_max_tokens=MAX_TOKENS if rank.case.one_shot else 0,
        post=None, norm=NormSpec(NormKind.RMS, EPS), timeout_s=rank.case.timeout_s,
    )  # fmt: skip


def run_layers(rank: Rank, calls: list[ReductionCall], step: int) -> tuple[Tensor, ...]:
    """The operator itself, layer by layer."""
    w = forms.make_weights(torch.float32)
    x, residual = inputs(rank.rank, step, rank.tokens, rank.seed)
    for call in calls:
        normalized, residual = torch.ops.weave.all_reduce_norm(
            x @ w.product, None, None, residual, None, None, w.norm, None, call.encode()
        )  # fmt: skip
        x = normalized @ w.after
    return x, residual


def reserve(rank: Rank, group: str, calls: list[ReductionCall]) -> None:
    timeout_s = rank.case.compile_timeout_s
    shm.reserve(topology.discover(group, timeout_s), memory_plan(group, calls), 0, timeout_s)


def eager(rank: Rank) -> Step:
    group = group_name()
    calls = [make_call(rank, f"layers.{i}", group, rank.case.world) for i in range(NUM_LAYERS)]
    reserve(rank, group, calls)
    return lambda step: run_layers(rank, calls, step)


def pairs(rank: Rank) -> Step:
    """Groups (0, 1), (1, 2), ... in this order: a rank's first group is its lower neighbour's."""
    groups = [(first, dist.new_group([first, first + 1])) for first in range(rank.case.world - 1)]
    mine = [(first, group.group_name) for first, group in groups if rank.rank in (first, first + 1)]
    calls = {}
    for first, name in mine:
        calls[first] = [make_call(rank, f"pair{first}.{i}", name, 2) for i in range(NUM_LAYERS)]
        reserve(rank, name, calls[first])

    def one_step(step: int) -> tuple[Tensor, ...]:
        return tuple(value for first in calls for value in run_layers(rank, calls[first], step))

    return one_step


PROGRAMS: dict[Mode, Callable[[Rank], Step]] = {
    Mode.EAGER: eager,
    Mode.GRAPH: graph,
    Mode.REGIONS: regions,
    Mode.PAIRS: pairs,
}


def run_program(rank: Rank) -> None:
    """All steps; the fault strikes where its moment comes."""
    case = rank.case
    rank.began_at = time.monotonic()
    rank.reach(Moment.START)
    rank.steps = PROGRAMS[case.mode](rank)
    for step in range(NUM_STEPS):
        rank.began_at = time.monotonic()
        if step == FAULT_STEP:
            rank.reach(Moment.BETWEEN)
            if case.moment is Moment.WITHIN and rank.rank != case.victim:
                time.sleep(LATE_S)
                rank.began_at = time.monotonic()
            rank.reach(Moment.WITHIN)
        rank.digests.append(digest(rank, step, rank.steps(step)))
    rank.began_at = time.monotonic()
    rank.reach(Moment.EXIT)


def digest(rank: Rank, step: int, got: tuple[Tensor, ...]) -> str:
    """Hash of a step's output bytes, by group; begins with "wrong" if they differ from the reference."""
    ranks = list(range(rank.case.world))
    if rank.case.mode is Mode.PAIRS:
        groups = [[first, first + 1] for first in range(rank.case.world - 1) if rank.rank in (first, first + 1)]
    else:
        groups = [ranks]
    other_residual, other_norm = rank.case.fault == "other residual", rank.case.fault == "other model"
    is_own = bool(rank.seed) or (other_norm and rank.rank == rank.case.victim)
    words = []
    for index, group in enumerate(groups):
        pair = got[2 * index : 2 * index + 2]
        seed_of = {rank.case.victim: OTHER_SEED} if other_residual else {}
        want = reference(rank.rank, group, step, seed_of, rank.case.victim if other_norm else None)
        right = all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(pair, want, strict=True))
        content = hashlib.sha256(b"".join(value.contiguous().numpy().tobytes() for value in pair)).hexdigest()[:12]
        words.append(f"{min(group)}{'own' if is_own else ''}:{content}" if right else f"wrong {content}")
    return " ".join(words)
