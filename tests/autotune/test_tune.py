"""Local kernels timed on ranks: agreement when ranks time differently, budgets, symbolic sizes, and what costs nothing.

How long a kernel takes is the test's to say, but for the last tests, which call kernels.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tests.graphs import forms
from tests.graphs.executing import executing
from tests.graphs.nonempty import some
from tests.graphs.preview import fake_group
from tests.house import toys
from tests.house.test_toys import chain, chain_inputs
from tests.ranks import run_ranks
from weaveopt import backend, cost_model
from weaveopt.autotune import kernel_exchange, kernel_timing, tune
from weaveopt.autotune.asked_kernels import AskedKernel, AskedPrices
from weaveopt.autotune.kernel_calls import Operands
from weaveopt.autotune.kernel_timing import KernelTimings, TuningCpuClock, time_kernels
from weaveopt.config import Config
from weaveopt.cost_model import Gemm, gemm_us
from weaveopt.cost_model.gemm import was_measured
from weaveopt.cost_model.timed import KernelShape, KernelTime
from weaveopt.fabrics import topology
from weaveopt.measure.clock import Launch
from weaveopt.preview import preview
from weaveopt.records.candidate import LEAVE, Estimate, Term
from weaveopt.records.report import GraphReport, Report
from weaveopt.records.site import TokenCounts
from weaveopt.reporting.document import to_json
from weaveopt.reporting.document_reader import from_json
from weaveopt.reporting.registry import report as live_report
from weaveopt.reporting.text import text
from weaveopt.rewrites import RULES
from weaveopt.rule import Context, FoundSite, Proposal, RuleSet

TOY = "library_sum"
ROWS, WIDTH = 8, 40
"""Rows of the chain, and the columns of the GEMM that the toy's price rests on, which no graph has."""
BASE = Config(strict=True, timeout_s=20.0, compile_timeout_s=20.0, disable=("all_reduce_rms_norm",), tune_budget_s=5.0)


@dataclass(frozen=True)
class PricedByGemm(toys.LibrarySum):
    """Takes as long as a GEMM that only its price asks for."""

    def propose(
        self, found: FoundSite, tokens: TokenCounts, context: Context, usable_only: bool = False
    ) -> Sequence[Proposal]:
        us = gemm_us(context.machine, Gemm(tokens.hint, forms.HIDDEN, WIDTH), "float32")
        priced = Estimate((Term("kernel", us),))
        proposals = super().propose(found, tokens, context, usable_only)
        return [replace(each, candidate=replace(each.candidate, estimate=priced)) for each in proposals]


TOYS = replace(RULES, site_rules=(RULES.named("all_reduce_rms_norm"), PricedByGemm(0.0)))


@dataclass
class FakeClock:
    """Times kernels as the test says: by their number of columns, else the profile's; keeps what it was asked."""

    us_by_columns: Mapping[int, float]
    steep: bool = False
    """True if the time grows with the cube of the rows beyond `ROWS`."""
    dies: bool = False
    spread: float = 0.02
    """Spread of the single times of every kernel."""
    num_calls: int = 0
    asked: tuple[KernelShape, ...] = ()

    def __call__(
        self, kernels: Sequence[AskedKernel], device: torch.device, budget_s: float, weight_bytes: int
    ) -> KernelTimings:
        self.num_calls += 1
        self.asked = tuple(kernel.shape for kernel in kernels)
        if self.dies:
            raise RuntimeError("no kernel runs here")
        times = []
        for kernel in kernels:
            us = self.us_by_columns.get(kernel.shape.rest[-1], kernel.us)
            grown = (kernel.shape.size / ROWS) ** 3 if self.steep else 1.0
            times.append(KernelTime(kernel.shape, us * grown, self.spread))
        return KernelTimings(tuple(times))


def compiled_chain(
    clock: FakeClock, config: Config, rows: int = ROWS, dynamic: bool = False, inner: int = forms.INNER,
    rules: RuleSet = TOYS,
) -> GraphReport:  # fmt: skip
    """Report of the only graph, whose results are compared with eager."""
    torch._dynamo.reset()
    reports: list[GraphReport] = []
    x, product, *others = chain_inputs(rows)
    inputs = (x[:, :inner].contiguous(), product[:inner].contiguous(), *others)
    for each in (inputs[0], inputs[2]) if dynamic else ():
        torch._dynamo.mark_dynamic(each, 0)
    tune.time_kernels = clock
    try:
        with torch.no_grad():
            made = torch.compile(
                chain, backend=executing(config, reports, rules, tunes=True), dynamic=None if dynamic else False
            )
            torch.testing.assert_close(made(*inputs), chain(*inputs), rtol=1e-4, atol=1e-4)
    finally:
        tune.time_kernels = time_kernels
    (report,) = reports
    return report


def choice(report: GraphReport) -> str:
    (decision,) = report.decisions
    return decision.chosen.choice


def times_of(report: GraphReport) -> dict[str, float]:
    return {kernel.kernel: kernel.us for kernel in report.kernels}


def whole_of(report: GraphReport) -> Report:
    return replace(live_report(None), graphs=(report,))


TOY_KERNEL = f"gemm float32 {ROWS}x{forms.HIDDEN}x{WIDTH}"


def _agreement(rank: int, folder: str) -> dict[str, object]:
    config = replace(BASE, tune_cache=f"{folder}/first")
    quick = compiled_chain(FakeClock({WIDTH: 0.5}), config)
    # One rank alone says that the toy is slow; another one, that a GEMM of the graph is.
    apart = FakeClock({WIDTH: 90000.0} if rank else {WIDTH: 0.5, forms.HIDDEN: 700.0})
    slow = compiled_chain(apart, replace(BASE, tune_cache=f"{folder}/second"))
    again = FakeClock({})
    known = compiled_chain(again, replace(BASE, tune_cache=f"{folder}/second"))
    with mock.patch.dict(sys.modules, {"msgspec": None}):
        unread = compiled_chain(FakeClock({WIDTH: 90000.0}), replace(BASE, tune_cache=f"{folder}/second"))
    assert unread.tuned.endswith("none read from disk: msgspec is not installed"), unread.tuned
    # Ranks of different hosts may know different kernels.
    mixed_clock = FakeClock({WIDTH: 90000.0})
    mixed = compiled_chain(mixed_clock, replace(BASE, tune_cache=f"{folder}/{'second' if rank else 'third'}"))
    failing = compiled_chain(FakeClock({WIDTH: 0.5}, dies=rank == 1), replace(BASE, tune_cache=f"{folder}/fourth"))
    off = FakeClock({})
    without = compiled_chain(off, replace(config, tune_budget_s=0.0))
    shown, whole = text(whole_of(slow)), whole_of(slow)
    assert from_json(to_json(whole)) == whole
    assert "kernels timed in" in shown and f"{TOY_KERNEL}: timed 90,000.0 us" in shown
    assert mixed_clock.num_calls <= 1
    return {
        "quick": (choice(quick), times_of(quick)),
        "slow": (choice(slow), times_of(slow)),
        "known": (choice(known), times_of(known), again.num_calls),
        "mixed": (choice(mixed), times_of(mixed)),
        "failing": (choice(failing), times_of(failing)),
        "off": (without.tuned, without.kernels, off.num_calls),
    }


def test_all_ranks_use_the_longest_times(tmp_path: Path) -> None:
    one, two = run_ranks(_agreement, 2, str(tmp_path))
    assert one == two, "ranks differ"
    assert one["quick"][0] == TOY and one["quick"][1][TOY_KERNEL] == 0.5
    name, times = one["slow"]
    assert name == LEAVE and times[TOY_KERNEL] == 90000.0
    assert times[f"gemm float32 {ROWS}x{forms.INNER}x{forms.HIDDEN} rr"] == 700.0
    assert one["known"] == (LEAVE, times, 0), "a second compile times nothing"
    assert one["mixed"] == (LEAVE, times)
    assert one["failing"][0] == TOY and one["failing"][1][TOY_KERNEL] == 0.5
    assert one["off"] == ("", (), 0)


def _other_shapes(rank: int, folder: str) -> tuple[dict[str, float], bool]:
    """Uneven shards: each rank's GEMM has a depth of its own, and all know of both."""
    config = replace(BASE, tune_cache=folder, strict=False)
    report = compiled_chain(FakeClock({WIDTH: 0.5}), config, inner=forms.INNER - 16 * rank)
    return times_of(report), bool(report.fallbacks)


def test_ranks_of_different_shapes_converge(tmp_path: Path) -> None:
    (one, failed), (two, failed_too) = run_ranks(_other_shapes, 2, str(tmp_path))
    assert not failed and not failed_too
    assert one.keys() != two.keys() and one[TOY_KERNEL] == two[TOY_KERNEL] == 0.5


def _missing_peer(rank: int, folder: str) -> tuple[str, float]:
    kernel_exchange.LONGEST_WAIT_S = 1.0
    config = replace(BASE, tune_cache=folder, tune_budget_s=0.0 if rank else 5.0)
    began = time.monotonic()
    try:
        compiled_chain(FakeClock({WIDTH: 0.5}), config)
    except BackendCompilerFailed as error:
        return str(error), time.monotonic() - began
    finally:
        kernel_exchange.LONGEST_WAIT_S = 60.0
        kernel_exchange.forget()
    return "", time.monotonic() - began


def test_a_peer_that_does_not_come_costs_the_times_alone(tmp_path: Path) -> None:
    """Options that differ are the error that they always were, after a bounded wait."""
    for message, took_s in run_ranks(_missing_peer, 2, str(tmp_path)):
        assert "tune_budget_s" in message and took_s < 20.0


def _failing_step(rank: int, folder: str) -> tuple[int, int]:
    real = backend.recognize

    def failing(*arguments: object) -> object:
        raise RuntimeError("no site was ever seen like this")

    backend.recognize = failing if rank else real  # type: ignore[assignment]
    try:
        report = compiled_chain(FakeClock({WIDTH: 0.5}), replace(BASE, tune_cache=folder, strict=False))
    finally:
        backend.recognize = real
    return report.num_rewritten, len(report.fallbacks)


def test_a_step_that_fails_on_one_rank_keeps_no_peer_waiting(tmp_path: Path) -> None:
    began = time.monotonic()
    assert [rewritten for rewritten, _ in run_ranks(_failing_step, 2, str(tmp_path))] == [0, 0]
    assert time.monotonic() - began < 40.0


def _symbolic(rank: int, folder: str) -> tuple[list[int], tuple[int, int | None]]:
    clock = FakeClock({WIDTH: 0.5}, steep=True)
    config = replace(BASE, tune_cache=folder, max_tokens=4096)
    report = compiled_chain(clock, config, dynamic=True)
    assert report.regime is not None
    sizes = sorted({shape.size for shape in clock.asked if shape.rest == (forms.HIDDEN, WIDTH)})
    return sizes, (report.regime.min_tokens, report.regime.max_tokens)


def test_a_regime_ends_where_timed_kernels_say(tmp_path: Path) -> None:
    """The profile says that the toy wins at every count; timed at three counts it gets dear with the tokens."""
    (sizes, regime), others = run_ranks(_symbolic, 2, str(tmp_path))
    assert (sizes, regime) == others
    assert len(sizes) == 3 and ROWS in sizes and sizes[0] < ROWS < sizes[2]
    assert regime[1] is not None and ROWS <= regime[1] < 4096


def test_a_graph_without_sites_costs_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refused(*arguments: object) -> object:
        raise AssertionError("a price was asked for")

    monkeypatch.setattr(tune, "AskedPrices", refused)
    monkeypatch.setattr(tune, "KernelStore", refused)
    torch._dynamo.reset()
    reports: list[GraphReport] = []
    compiled = torch.compile(
        lambda x: torch.tanh(x @ x), backend=executing(replace(BASE, tune_cache=str(tmp_path)), reports, tunes=True)
    )
    compiled(torch.ones(4, 4))
    (report,) = reports
    assert report.tuned == "" and report.kernels == () and not list(tmp_path.iterdir())


def asked(*shapes: KernelShape) -> list[AskedKernel]:
    return [AskedKernel(shape, 100.0) for shape in shapes]


def gemm(rows: int, layout: str = "rc") -> KernelShape:
    return KernelShape("gemm", "float32", rows, (64, 32), layout)


CPU = torch.device("cpu")


def test_kernels_are_timed_within_a_budget() -> None:
    kernels = asked(gemm(16), gemm(32), gemm(64))
    found = time_kernels(kernels, CPU, 10.0, 1 << 20)
    assert [each.shape for each in found.times] == [kernel.shape for kernel in kernels]
    assert all(0.0 < each.us < 1e5 for each in some(found.times)) and not found.left and not found.failed
    spent = time_kernels(kernels, CPU, 0.0, 1 << 20)
    assert spent.times == () and list(spent.left) == [kernel.shape for kernel in kernels]
    # A long one that does not fit leaves the rest to shorter ones.
    long = replace(kernels[0], us=1e9)
    some_left = time_kernels([long, *kernels[1:]], CPU, 10.0, 1 << 20)
    assert some_left.left == (long.shape,) and len(some_left.times) == 2


def test_compiling_a_kernel_leaves_the_library_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the time of the site as it is, nothing is chosen on a GPU without a profile; and one kernel that fails
    costs its own time alone."""
    real = kernel_timing.launch_of

    def launch_of(shape: KernelShape, operands: Operands) -> Launch | None:
        if shape.size == 16:
            time.sleep(0.3)
        if shape.size == 64:
            raise NotImplementedError("no such kernel")
        return real(shape, operands)

    monkeypatch.setattr(kernel_timing, "launch_of", launch_of)
    monkeypatch.setattr(kernel_timing, "LOADING_S", 0.2)
    kernels = asked(gemm(64), gemm(16), gemm(32))
    for is_own, num_timed in ((True, 2), (False, 1)):
        monkeypatch.setattr(kernel_timing, "is_own", lambda shape, is_own=is_own: is_own and shape.size == 16)
        found = time_kernels(kernels, CPU, 10.0, 1 << 20)
        assert len(found.times) == num_timed and [each.size for each in found.left] == [32] * (2 - num_timed)
        assert [each.size for each in found.failed] == [64]


def test_the_clock_of_gpus_is_made_outside_of_a_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a compile are fake: a clock made of them captured an empty graph, and every kernel after failed."""
    made: list[bool] = []

    def clock() -> TuningCpuClock:
        made.append(isinstance(torch.empty(1), FakeTensor))
        return TuningCpuClock()

    monkeypatch.setattr(kernel_timing, "_gpu_clock", functools.cache(clock))
    monkeypatch.setattr(TuningCpuClock, "release", lambda _: None, raising=False)
    with FakeTensorMode():
        assert isinstance(torch.empty(1), FakeTensor)
        time_kernels((), torch.device("cuda"), 1.0, 1 << 20)
    assert made == [False]


def test_what_cannot_be_called_alone_is_left() -> None:
    unknown = asked(KernelShape("fft", "float32", 4, (4,)), KernelShape("gemm", "float8_e4m3fn", 4, (4, 4)))
    found = time_kernels(unknown, CPU, 10.0, 1 << 20)
    assert found.times == () and list(found.failed) == [kernel.shape for kernel in unknown]


def test_explain_names_choices_that_hang_on_an_unmeasured_price() -> None:
    """A price that is in all choices alike turns none; that of the toy alone does."""
    torch._dynamo.reset()
    unsure = replace(cost_model.load("cpu"), relative_error=1e4)
    reports: list[GraphReport] = []
    with fake_group(2), torch.no_grad():
        seen = preview(BASE, topology.fake(2), unsure, reports.append, TOYS, ask_sensitivity=True)
        torch.compile(chain, backend=seen, dynamic=False)(*chain_inputs(ROWS))
    (report,) = reports
    (decision,) = report.decisions
    assert [doubt.kernel for doubt in report.doubts] == [TOY_KERNEL]
    (doubt,) = report.doubts
    assert doubt.sites == (decision.site.id,) and doubt.loss_us > 0.0 and report.kernels == ()
    assert f"hangs on a price between measured ones: {decision.site.id}" in text(whole_of(report))


def test_a_measured_size_is_told_from_one_between() -> None:
    machine = cost_model.load("h100x2")
    assert was_measured(machine, KernelShape("gemm", "bfloat16", 2048, (4096, 8192)))
    assert not was_measured(machine, KernelShape("gemm", "bfloat16", 1500, (4096, 8192)))
    assert not was_measured(machine, KernelShape("gemm", "float64", 2048, (4096, 8192)))


def test_finding_out_what_matters_is_bounded() -> None:
    """Without time for it, kernels are taken longest first."""
    torch._dynamo.reset()
    seen: list[tuple[AskedKernel, ...]] = []

    class Watched(AskedPrices):
        def weighed(
            self, kernels: Sequence[AskedKernel], relative_error: float, longest_s: float = 1e9
        ) -> tuple[AskedKernel, ...]:
            seen.append(super().weighed(kernels, 1e4, 0.0))
            return super().weighed(kernels, relative_error, longest_s)

    tune.AskedPrices = Watched  # type: ignore[misc]
    try:
        with fake_group(2), torch.no_grad():
            backend_seen = preview(
                BASE, topology.fake(2), cost_model.load("cpu"), lambda _: None, TOYS, ask_sensitivity=True
            )
            torch.compile(chain, backend=backend_seen, dynamic=False)(*chain_inputs(ROWS))
    finally:
        tune.AskedPrices = AskedPrices  # type: ignore[misc]
    (kernels,) = seen
    times = [kernel.us for kernel in kernels]
    assert len(times) > 1 and times == sorted(times, reverse=True)
    assert all(kernel.loss_us == 0.0 for kernel in some(kernels))


def test_a_busy_host_gets_no_second_pass() -> None:
    calls: list[int] = []

    def slow(index: int) -> None:
        calls.append(index)
        time.sleep(0.004)

    late = TuningCpuClock(ends=time.perf_counter() - 1.0).alone(slow, 10.0)
    assert len(calls) == 2 + TuningCpuClock.FEWEST_CALLS and late.us >= 4000.0
    calls.clear()
    TuningCpuClock().alone(slow, 10.0)
    assert len(calls) >= 2 + 2 * TuningCpuClock.FEWEST_CALLS
