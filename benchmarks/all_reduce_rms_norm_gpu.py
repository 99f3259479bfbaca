"""`weave::all_reduce_norm` on the GPUs of one host: the rank program, started by benchmarks.all_reduce_rms_norm.

Suites: `all_reduce_rms_norm` (tokens 1 to 32K, hidden 8192 and 4096), `all_reduce_rms_norm_ctas` (how many CTAs the
bulk form needs), `all_reduce_rms_norm_shapes` (hidden 1024 to 16384), `all_reduce_sum` (no norm follows).

Residual and sum are sharded by tokens, as between the layers of a model; rows with `sum` `whole` are the other case:
there the norm is taken in or stays in the graph, whichever the model predicts to be faster.
`weave` is what the profile's table picks; where it leaves the site alone that is NCCL and Inductor, whose time is then
weave's. `bound` is the link's share alone: a two-shot that only pushes, at the highest rate measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from benchmarks import record
from benchmarks.all_reduce_rms_norm_variants import (
    NCCL,
    SYMM_ONE_SHOT,
    SYMM_TWO_SHOT,
    Case,
    Effort,
    Form,
    SymmetricBuffers,
    Variant,
    bulk_variants,
    ll_packet_variants,
    measure,
)
from benchmarks.gpu_ranks import Place, table
from benchmarks.peer_library import FLASHINFER_WORLD, flashinfer
from weaveopt import cost_model
from weaveopt.cost_model.kernels import norm_us
from weaveopt.measure.cases.all_reduce_norm.calls import TIMEOUT_S
from weaveopt.measure.cases.all_reduce_norm.peer import BULK_BYTES
from weaveopt.records.candidate import Fabric
from weaveopt.reductions.prices.estimate import estimate_fused
from weaveopt.reductions.prices.table import lowerings
from weaveopt.reductions.prices.workload import Workload, with_norm_apart
from weaveopt.reductions.variant import Algorithm, KernelRow

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
QUICK_TOKENS = (1, 64, 1024)


@dataclass(frozen=True)
class Asked:
    """What to measure. Empty `tokens` and `hiddens`: what the suite has."""

    suites: tuple[str, ...]
    profile: str
    tokens: tuple[int, ...] = ()
    hiddens: tuple[int, ...] = ()
    quick: bool = False


@dataclass
class Found:
    """Result rows by suite."""

    rows: dict[str, list[record.Row]] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        rows = {suite: [asdict(row) for row in rows] for suite, rows in self.rows.items()}
        path.write_text(json.dumps({"rows": rows}))

    def add_from(self, path: Path) -> None:
        saved = json.loads(path.read_text())
        for suite, rows in saved["rows"].items():
            self.rows.setdefault(suite, []).extend(record.Row(**row) for row in rows)


@dataclass(frozen=True)
class Job:
    """One case of a suite, with the variants that it needs beside the profile's choice."""

    case: Case
    variants: tuple[Variant, ...]
    chosen: Variant | None


class Bench:
    def __init__(self, place: Place, asked: Asked, keep: Path | None = None) -> None:
        """`keep`: where rows are left after each shape, so that a run cut short has those it came to."""
        self.place, self.asked, self.keep = place, asked, keep
        self.machine = cost_model.load(asked.profile)
        self.found = Found()

    def run(self) -> None:
        import torch._inductor.config as inductor_config

        import weaveopt.ops  # noqa: F401
        from weaveopt.fabrics import peer, topology
        from weaveopt.reductions.buffers import memory_plan

        inductor_config.compile_threads = 1  # one kernel at a time: no pool of processes to start
        jobs = {suite: self.jobs(suite) for suite in self.asked.suites}
        every = [job for each in jobs.values() for job in each]
        calls = [variant.call(job.case, self.place) for job in every for variant in job.variants]
        # All of it before the first capture: graphs hold the arena's addresses.
        plan = memory_plan(self.place.group, calls)
        peer.reserve(topology.discover(self.place.group, TIMEOUT_S), plan, 0, TIMEOUT_S)
        symmetric = SymmetricBuffers(self.place, max(job.case.bytes for job in every))
        with torch.no_grad():
            for suite, each in jobs.items():
                self.suite(suite, each, symmetric)

    def jobs(self, suite: str) -> list[Job]:
        hiddens = self.asked.hiddens or {CTAS: (8192,), SHAPES: SHAPE_HIDDENS}.get(suite, HIDDENS)
        tokens = self.asked.tokens or {CTAS: CTA_TOKENS, SHAPES: SHAPE_TOKENS, SUMS: SUM_TOKENS}.get(suite, TOKENS)
        if self.asked.quick and not self.asked.tokens:
            tokens = QUICK_TOKENS
        cases = [Case(count, hidden) for hidden in hiddens for count in tokens]
        return [self.job(suite, case) for case in cases if case.bytes < SHAPE_LIMIT_BYTES]

    def job(self, suite: str, case: Case) -> Job:
        chosen = self.choice(case)
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
                *(Variant(each.row, Form.NORM_APART) for each in two_shot),
            ]
        if suite == SUMS:
            variants = [Variant(each.row, Form.SUM) for each in variants]
        return Job(case, tuple(variants), chosen)

    def choice(self, case: Case) -> Variant | None:
        """What the profile's table picks for graphs of this one size; None where it leaves them to the library."""
        rows = lowerings(
            self.machine, Fabric.PEER, case.hidden, "bfloat16", self.place.world, 1, case.tokens, case.tokens
        )
        row = next((row for row in rows if case.tokens <= row.max_tokens), None)
        return None if row is None else Variant(KernelRow(case.tokens, row.algorithm, row.transfer, row.num_ctas))

    def predicted_us(self, case: Case, variant: Variant) -> float:
        workload = Workload(case.tokens, case.tokens, case.hidden, "bfloat16", self.place.world)
        if variant.form.hands_out_sum_alone:
            workload = with_norm_apart(workload)
        lowering, sharded = variant.row, variant.form is Form.SHARDED
        estimate = estimate_fused(
            self.machine, workload, Fabric.PEER, lowering.algorithm, sharded, lowering.transfer, lowering.num_ctas
        )
        norm = variant.form is Form.NORM_APART
        return estimate.us + (norm_us(self.machine, 2 * workload.message_bytes, workload.hidden) if norm else 0.0)

    def with_whole_sum(self, job: Job) -> Variant | None:
        """What the model picks where every rank needs the whole sum."""
        if job.chosen is None:
            return None
        row = job.chosen.row
        apart = (Form.NORM_APART,) if row.algorithm is Algorithm.TWO_SHOT else ()
        forms = [Variant(row, form) for form in (Form.WHOLE, *apart)]
        return min(forms, key=lambda variant: self.predicted_us(job.case, variant))

    def suite(self, suite: str, jobs: Iterable[Job], symmetric: SymmetricBuffers) -> None:
        for job in jobs:
            case = job.case
            effort = Effort()
            if suite == SHAPES:
                effort = Effort(3, 4, 5 if case.bytes > 256 << 20 else 0)
            if self.asked.quick:
                effort = Effort(2, 2)
            us = measure(self.place, case, job.variants, symmetric, effort)
            ours = "  ".join(f"{variant.name} {us[variant.name]:.1f}" for variant in job.variants)
            theirs = "  ".join(
                f"{name.removesuffix('_then_inductor')} {us[name]:.1f}" for name in BASELINES if name in us
            )
            self.place.say(f"{self.place.world} x {case.tokens:5} x {case.hidden:5}: {theirs} | {ours}")
            rows = self.rows(suite, job, us)
            self.found.rows.setdefault(suite, []).extend(rows)
            if self.keep is not None and self.place.rank == 0:
                self.found.save(self.keep)

    def rows(self, suite: str, job: Job, us: dict[str, float]) -> list[record.Row]:
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


def summary(suite: str, rows: Sequence[record.Row]) -> str:
    """The suite in a few lines, for people."""
    columns = [
        "ranks", "hidden", "tokens", "weave", "runs", "fastest", "", "best baseline", "", "ratio", "floor", "x floor",
        "peer",
    ]  # fmt: skip
    lines = []
    # Of many shapes, those that are the least worth.
    listed = sorted(rows, key=lambda row: row.ratio)[:16] if suite == SHAPES else rows
    for row in listed:
        shown = [str(row.case[name]) for name in ("ranks", "hidden", "tokens")]
        if row.case.get("sum") == "whole":
            shown[-1] += " whole"
        bound = row.bound_us or math.nan
        fastest = str(row.parameters.get("fastest", ""))
        lines.append([
            *shown, f"{row.weave_us:.1f}", str(row.parameters["runs"]),
            fastest, microseconds(row.parameters.get(f"{fastest}_us")),
            row.best_baseline.partition("_then")[0], f"{row.baselines[row.best_baseline]:.1f}",
            f"{row.ratio:.2f}", f"{bound:.1f}", f"{row.weave_us / bound:.2f}",
            microseconds(row.parameters.get("peer_library_us")),
        ])  # fmt: skip
    text = table(f"{suite}, bf16, microseconds", columns, lines)
    worst = min(rows, key=lambda row: row.ratio)
    shape = " x ".join(str(worst.case[name]) for name in ("ranks", "tokens", "hidden"))
    return f"{text}\nworst ratio {worst.ratio:.3f} ({shape}), {len(rows)} rows"


def microseconds(value: record.Scalar | None) -> str:
    return f"{value:.1f}" if isinstance(value, float) else ""
