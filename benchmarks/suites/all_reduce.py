"""`weave::all_reduce_norm` on the GPUs of one host, against NCCL and torch's symmetric-memory all-reduces.

Residual and sum are sharded by tokens, as between the layers of a model; rows with `sum` `whole` are the other case:
there the norm is taken in or stays in the graph, whichever the model predicts to be faster.
`weave` is what the profile's table picks; where it leaves the site alone that is NCCL and Inductor, whose time is then
weave's. `bound` is the link's share alone: a two-shot that only pushes, at the highest rate measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks import record
from benchmarks.peer_library import FLASHINFER_WORLD, flashinfer
from benchmarks.ranks import Place
from benchmarks.suite import GPU, Asked, Needs, Setting, Suite, product
from benchmarks.timing import Effort
from benchmarks.workloads.reduction import (
    NCCL,
    SYMM_ONE_SHOT,
    SYMM_TWO_SHOT,
    Case,
    Form,
    SymmetricBuffers,
    Variant,
    bulk_variants,
    ll_packet_variants,
    measure,
)
from weaveopt import cost_model
from weaveopt.cost_model.kernels import norm_us
from weaveopt.measure.cases.reduction.calls import TIMEOUT_S
from weaveopt.measure.cases.reduction.peer import BULK_BYTES
from weaveopt.ops.reduction.prices.estimate import estimate_fused
from weaveopt.ops.reduction.prices.table import lowerings
from weaveopt.ops.reduction.prices.workload import Workload, with_unfused_norm
from weaveopt.ops.reduction.variant import Algorithm, KernelRow
from weaveopt.records.candidate import Fabric

MAIN, CTAS, SHAPES = "all_reduce_rms_norm", "all_reduce_rms_norm_ctas", "all_reduce_rms_norm_shapes"
SUMS = "all_reduce_sum"
TOKENS = tuple(1 << power for power in range(16))
HIDDENS = (8192, 4096)
MAIN_CTAS = (16, 64, 128)
WHOLE_TOKENS = (1, 64, 256, 512, 1024, 2048, 4096, 8192, 16384)
SUM_TOKENS = (1, 16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384)
CTA_TOKENS = (64, 512, 4096, 16384)
CTA_COUNTS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 132)
SHAPE_HIDDENS = (1024, 2048, 2880, 3584, 4096, 5120, 6144, 7168, 8192, 12288, 16384)
SHAPE_TOKENS = (1, 7, 100, 1000, 8192, 65536)
SHAPE_LIMIT_BYTES = 1 << 31
"""Tensors of 2 GiB and more would be about 64-bit indices, not about communication."""
BASELINES = (NCCL, SYMM_ONE_SHOT, SYMM_TWO_SHOT)


@dataclass(frozen=True)
class Job:
    """One case of a suite, with the variants that it needs beside the profile's choice."""

    case: Case
    variants: tuple[Variant, ...]
    chosen: Variant | None


class Bench:
    """One suite on this rank: the variants of each case, and the rows of their times."""

    def __init__(self, place: Place, suite: str, profile: str) -> None:
        self.place, self.suite = place, suite
        self.machine = cost_model.load(profile)

    def rows_of(self, cases: Sequence[Case]) -> Iterator[record.Row]:
        import torch._inductor.config as inductor_config

        import weaveopt.ops  # noqa: F401
        from weaveopt.fabrics import peer, topology
        from weaveopt.ops.reduction.buffers import memory_plan

        inductor_config.compile_threads = 1  # one kernel at a time: no pool of processes to start
        jobs = [self.job(case) for case in cases]
        calls = [variant.call(job.case, self.place) for job in jobs for variant in job.variants]
        # All of it before the first capture: graphs hold the arena's addresses.
        plan = memory_plan(self.place.group, calls)
        peer.reserve(topology.discover(self.place.group, TIMEOUT_S), plan, 0, TIMEOUT_S)
        symmetric = SymmetricBuffers(self.place, max(case.bytes for case in cases))
        for job in jobs:
            shapes = self.suite == SHAPES
            num_calls = 5 if shapes and job.case.bytes > 256 << 20 else 0
            effort = Effort(3, 4) if shapes else Effort(4, 5)
            yield from self.rows(job, measure(self.place, job.case, job.variants, symmetric, effort, num_calls))

    def job(self, case: Case) -> Job:
        suite, chosen = self.suite, self.choice(case)
        variants: list[Variant] = []
        if suite == CTAS:
            variants = bulk_variants(case, CTA_COUNTS)
        elif suite in (MAIN, SUMS):
            variants = ll_packet_variants(case)
            if case.bytes >= BULK_BYTES:
                variants += bulk_variants(case, MAIN_CTAS)
        variants = [each for each in variants if each.is_supported(case, self.place)]
        if suite in (MAIN, SHAPES, SUMS) and chosen is not None and chosen not in variants:
            variants.append(chosen)
        if suite == MAIN and case.tokens in WHOLE_TOKENS:
            two_shot = [each for each in variants if each.row.algorithm is Algorithm.TWO_SHOT]
            variants += [
                *(Variant(each.row, Form.WHOLE) for each in variants),
                *(Variant(each.row, Form.UNFUSED_NORM) for each in two_shot),
            ]
        if suite == SUMS:
            variants = [Variant(each.row, Form.SUM) for each in variants]
        return Job(case, tuple(variants), chosen)

    def choice(self, case: Case) -> Variant | None:
        """Variant that the profile's table picks for graphs of this one size; None: it leaves them alone."""
        rows = lowerings(
            self.machine, Fabric.PEER, case.hidden, "bfloat16", self.place.world, 1, case.tokens, case.tokens
        )
        row = next((row for row in rows if case.tokens <= row.max_tokens), None)
        return None if row is None else Variant(KernelRow(case.tokens, row.algorithm, row.transfer, row.num_ctas))

    def predicted_us(self, case: Case, variant: Variant) -> float:
        workload = Workload(case.tokens, case.tokens, case.hidden, "bfloat16", self.place.world)
        if variant.form.returns_sum_alone:
            workload = with_unfused_norm(workload)
        lowering, sharded = variant.row, variant.form is Form.SHARDED
        estimate = estimate_fused(
            self.machine, workload, Fabric.PEER, lowering.algorithm, sharded, lowering.transfer, lowering.num_ctas
        )
        norm = variant.form is Form.UNFUSED_NORM
        return estimate.us + (norm_us(self.machine, 2 * workload.message_bytes, workload.hidden) if norm else 0.0)

    def with_whole_sum(self, job: Job) -> Variant | None:
        """Variant that the model picks where every rank needs the whole sum."""
        if job.chosen is None:
            return None
        row = job.chosen.row
        apart = (Form.UNFUSED_NORM,) if row.algorithm is Algorithm.TWO_SHOT else ()
        forms = [Variant(row, form) for form in (Form.WHOLE, *apart)]
        return min(forms, key=lambda variant: self.predicted_us(job.case, variant))

    def rows(self, job: Job, us: dict[str, float]) -> list[record.Row]:
        suite = self.suite
        case: dict[str, record.Scalar] = {
            "ranks": self.place.world,
            "hidden": job.case.hidden,
            "tokens": job.case.tokens,
            "dtype": "bfloat16",
        }
        baselines = {name: us[name] for name in BASELINES if name in us}
        measured = {f"{variant.name}_us": round(us[variant.name], 3) for variant in job.variants}
        if suite == CTAS:
            best = min(us[variant.name] for variant in job.variants)
            return [
                self.row(
                    {**case, "ctas": variant.row.num_ctas}, us, variant, baselines, job.case,
                    {"over_best": round(us[variant.name] / best, 3)},
                )
                for variant in job.variants
            ]  # fmt: skip
        rows = []
        alone, sharded = suite == SUMS, [each for each in job.variants if each.form is Form.SHARDED]
        measured_whole = [each for each in job.variants if each.form is not Form.SHARDED]
        for whole, candidates in ((False, sharded), (True, measured_whole)):
            if (alone and not whole) or (whole and not measured_whole):
                continue
            sum_out = {"sum": "whole" if whole else "sharded"}
            chosen = self.with_whole_sum(job) if whole else job.chosen
            if alone:
                chosen = None if job.chosen is None else Variant(job.chosen.row, Form.SUM)
            fastest = min(candidates, key=lambda variant: us[variant.name], default=None)
            extra: dict[str, record.Scalar] = dict(measured)
            if fastest is not None:
                extra["fastest"] = fastest.name
            peer = flashinfer(job.case.hidden, job.case.tokens)
            if self.place.world == FLASHINFER_WORLD and peer is not None and not whole:
                extra["peer_library_us"] = peer
            rows.append(self.row({**case, **sum_out}, us, chosen, baselines, job.case, extra))
        return rows

    def row(
        self, case: dict[str, record.Scalar], us: dict[str, float], variant: Variant | None,
        baselines: dict[str, float], shape: Case, extra: dict[str, record.Scalar],
    ) -> record.Row:  # fmt: skip
        return record.row(
            case=case,
            weave_us=baselines[NCCL] if variant is None else us[variant.name],
            baselines=baselines,
            predicted_us=None if variant is None else self.predicted_us(shape, variant),
            bound_us=shape.floor_us(self.place.world),
            parameters={"runs": "leave" if variant is None else variant.name, **extra},
        )


def suite_of(name: str, about: str, tokens: tuple[int, ...], hiddens: tuple[int, ...]) -> Suite[Case]:
    """One of the four suites, of all combinations of tokens and hidden sizes below 2 GiB."""
    settings = (
        Setting("tokens", tokens, quick=(1, 64, 1024)),
        Setting("hiddens", hiddens, quick=hiddens[:1]),
        Setting("profile", "", "machine profile that chooses and predicts (default: MACHINE if shipped, else h200x4)"),
    )

    def profile_of(asked: Asked) -> str:
        return asked.of(settings[2]) or (asked.machine if asked.machine in cost_model.names() else "h200x4")

    def cases(asked: Asked) -> list[Case]:
        every = product(lambda hidden, count: Case(count, hidden), asked.of(settings[1]), asked.of(settings[0]))
        return [case for case in every if case.bytes < SHAPE_LIMIT_BYTES]

    def rows(place: Place, cases: Sequence[Case], asked: Asked) -> Iterator[record.Row]:
        return Bench(place, name, profile_of(asked)).rows_of(cases)

    return Suite(
        name, about, Needs(GPU, 2, worlds=(8, 4, 2)), cases, rows, ours=("one_shot", "two_shot"), baselines=BASELINES,
        predicted="the profile's price of the variant that it chooses",
        bound="the link's share alone: a two-shot that only pushes, at the highest rate measured", settings=settings,
    )  # fmt: skip


SUITES = (
    suite_of(MAIN, "all-reduce + residual + RMSNorm: all variants, 1 to 32K tokens", TOKENS, HIDDENS),
    suite_of(CTAS, "how many CTAs the bulk form needs", CTA_TOKENS, (8192,)),
    suite_of(SHAPES, "the profile's choice alone at many shapes", SHAPE_TOKENS, SHAPE_HIDDENS),
    suite_of(SUMS, "all-reduces that no norm follows", SUM_TOKENS, HIDDENS),
)
