"""The parts of the benchmarks that need no GPU: cases and variants, rows, curves, pages and plots."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import accuracy, clocks, plots, record, results_table, timing, traces
from benchmarks.__main__ import main
from benchmarks.peer_library import flashinfer
from benchmarks.ranks import Place
from benchmarks.record import Row
from benchmarks.suite import Asked, UsageError
from benchmarks.suites import all_reduce as gpu
from benchmarks.timing import order_of
from benchmarks.workloads.prediction import CPU, GPU
from benchmarks.workloads.reduction import NCCL, SYMM_ONE_SHOT, SYMM_TWO_SHOT, Case, Form, Variant
from weaveopt.measure.cases import gemm, memory
from weaveopt.measure.cases.reduction import peer, shm
from weaveopt.ops.reduction.buffers import MAILBOXES, buffers_of_call
from weaveopt.ops.reduction.call import decode
from weaveopt.ops.reduction.operands import EpilogueOperands
from weaveopt.ops.reduction.reference import reference
from weaveopt.ops.reduction.variant import Algorithm, KernelRow, Transfer

PLACE = Place(0, 4, torch.device("cpu"))


def bench(suite: str, world: int = 4) -> gpu.Bench:
    return gpu.Bench(Place(0, world, PLACE.device), suite, "h200x4")


def jobs_of(found: gpu.Bench) -> list[gpu.Job]:
    [suite] = [suite for suite in gpu.SUITES if suite.name == found.suite]
    return [found.job(case) for case in suite.cases(Asked("h200x4"))]


def times(job: gpu.Job, world: int) -> dict[str, float]:
    floor = job.case.floor_us(world) + 5
    us = {variant.name: floor * (1 + 0.01 * place) for place, variant in enumerate(job.variants)}
    return us | {NCCL: 2 * floor, SYMM_ONE_SHOT: 1.9 * floor, SYMM_TWO_SHOT: 1.8 * floor}


def all_rows(found: gpu.Bench) -> list[Row]:
    return [row for job in jobs_of(found) for row in found.rows(job, times(job, found.place.world))]


def test_flashinfer_times_are_of_the_faster_form() -> None:
    assert flashinfer(8192, 1) == 5.81
    assert flashinfer(8192, 256) == 37.5
    assert flashinfer(4096, 2048) == 121.0
    assert flashinfer(8192, 4096) is None
    assert flashinfer(8192, 3) is None
    assert flashinfer(5120, 1) is None


@pytest.mark.parametrize(("suite", "least"), [(gpu.MAIN, 32), (gpu.CTAS, 4), (gpu.SHAPES, 60), (gpu.SUMS, 20)])
def test_suites_have_their_cases(suite: str, least: int) -> None:
    jobs = jobs_of(bench(suite))
    assert len(jobs) >= least
    for job in jobs:
        names = [variant.name for variant in job.variants]
        assert len(set(names)) == len(names)
        for variant in job.variants:
            call = variant.call(job.case, PLACE)
            assert decode(call.encode()) == call
            assert all(buffer.num_bytes < 4 << 30 for buffer in buffers_of_call(call) if buffer.name == MAILBOXES)


def test_a_call_means_what_inductor_is_given() -> None:
    case = Case(5, 64)
    call = Variant(KernelRow(5, Algorithm.ONE_SHOT, Transfer.LL_PACKET), Form.WHOLE).call(
        case, Place(0, 2, PLACE.device)
    )
    torch.manual_seed(0)
    first, second, residual = (torch.randn(5, 64).bfloat16() for _ in range(3))
    weight = torch.rand(64).bfloat16()
    normed, total, *_ = reference([first, second], EpilogueOperands(residual=residual, weight=weight), call)
    want_total, want_normed = memory.add_norm((first.float() + second.float()).bfloat16(), residual, weight)
    torch.testing.assert_close(total, want_total, rtol=2e-2, atol=4e-2)
    torch.testing.assert_close(normed, want_normed, rtol=3e-2, atol=6e-2)


def test_rows_of_the_main_suite() -> None:
    rows = all_rows(bench(gpu.MAIN))
    sharded = [row for row in rows if row.case["sum"] == "sharded"]
    assert len(sharded) == len(gpu.TOKENS) * len(gpu.HIDDENS)
    assert len(rows) == len(sharded) + len(gpu.WHOLE_TOKENS) * len(gpu.HIDDENS)
    assert all(row.bound_us is not None and row.bound_us < row.weave_us for row in rows)
    assert all(set(row.baselines) == {NCCL, SYMM_ONE_SHOT, SYMM_TWO_SHOT} for row in rows)
    assert any(row.predicted_us is not None for row in rows)
    assert "peer_library_us" in sharded[0].parameters
    assert f"{len(rows)} rows, least ratio" in record.summary(gpu.MAIN, rows)


@pytest.mark.parametrize("suite", [gpu.MAIN, gpu.CTAS, gpu.SHAPES, gpu.SUMS])
def test_pages_and_plots(tmp_path: Path, suite: str) -> None:
    four, two = (all_rows(bench(suite, world=world)) for world in (4, 2))
    record.save(tmp_path / "rows.json", [*four, *two])
    rows = record.load(tmp_path / "rows.json")
    assert rows == [*four, *two] and len(four) == len(two)
    file = {
        "suite": suite, "machine": "made-up", "host": {"processor": "x", "cores": 1, "gpus": "4 x y"},
        "date": "2026-11-20", "commit": None, "versions": {"cuda": "13.0"}, "rows": [vars(row) for row in rows],
    }  # fmt: skip
    (tmp_path / "suite.json").write_text(json.dumps(file))
    read = results_table.read(tmp_path / "suite.json")
    page = results_table.page([read])
    assert page.count("\n| ") == len(rows) + 1
    assert "4 x y, x, 1 cores" in page
    assert ("FlashInfer" in page) == (suite in (gpu.MAIN, gpu.SHAPES))
    plots.plot(suite, read.rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def predicted(kind: str, us: float, guess: float) -> Row:
    return record.row(case={"kind": kind, "m": int(us)}, weave_us=us, baselines={"measured": us}, predicted_us=guess)


def chosen(of_best: float, of_leaving: float, tokens: int) -> Row:
    parameters = {"chosen": "bulk", "of_best": of_best, "of_leaving": of_leaving}
    case = {"kind": accuracy.CHOICE, "ranks": 4, "hidden": 8192, "tokens": tokens}
    return record.row(case=case, weave_us=10.0, baselines={"leave": 10.0 * of_leaving}, parameters=parameters)


def test_errors_are_told_by_kind_and_for_all() -> None:
    rows = [predicted("product", 100.0, 90.0), predicted("product", 100.0, 130.0), predicted("add_norm", 10.0, 10.0)]
    rows += [chosen(1.0, 1.5, 64), chosen(0.98, 1.0, 512)]
    product, norm, everything = accuracy.errors(rows)
    assert (product.kind, product.cases) == ("product", 2)
    assert (product.mean, product.largest) == pytest.approx((0.2, 0.3))
    assert norm.mean == 0 and everything.cases == 3 and everything.mean == pytest.approx(0.4 / 3)
    found = accuracy.choices(rows)
    assert found.best is not None and found.best.sites == 2 and found.best.least == 0.98
    assert found.best.mean == pytest.approx(0.99)
    assert found.leaving is not None and found.leaving.worst == "4 x 512 x 8192" and found.leaving.slower == 0


def test_accuracy_has_its_own_table_and_plot(tmp_path: Path) -> None:
    rows = [predicted("product", us, 1.1 * us) for us in (5.0, 50.0, 500.0)] + [chosen(1.0, 1.2, 64)]
    text = results_table.accuracy_table(tuple(rows))
    assert "| product | 3 | 10.0% | 10.0% | 10.0% |" in text and "1 sites" in text
    pytest.importorskip("matplotlib")
    plots.plot("prediction", rows, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 10_000


def test_predictions_are_of_cases_that_no_profile_holds() -> None:
    for cases, grid, tokens in ((GPU, gemm.GPU_GRID, peer.TOKENS), (CPU, gemm.CPU_GRID, shm.TOKENS)):
        assert not set(cases.product_sides) & set(grid.n) & set(grid.k)
        assert len(set(cases.site_tokens) & set(tokens)) <= 1
    assert not set(GPU.ctas) & set(peer.BULK_CTAS)


def test_cases_of_an_earlier_run_stay_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setenv("BENCHMARK_COMMIT", "0123456789abcdef")

    def row(seq: int, us: float) -> record.Row:
        return record.row(case={"seq": seq}, weave_us=us, baselines={"inductor": 10.0})

    record.write("layers", "cpu", [row(1, 8.0), row(2, 9.0)])
    monkeypatch.setenv("BENCHMARK_COMMIT", "fedcba9876543210")
    path = record.write("layers", "cpu", [row(2, 7.0)], beside=True)
    assert record.write("layers", "cpu", [row(2, 6.0)], beside=True) == path
    suite = results_table.read(path)
    assert [(entry.case["seq"], entry.weave_us) for entry in suite.rows] == [(2, 6.0), (1, 8.0)]
    earlier = str(suite.rows[1].parameters["earlier_run"])
    assert earlier.endswith(", 0123456") and "earlier_run" not in suite.rows[0].parameters
    assert earlier in results_table.table(suite)
    record.write("layers", "cpu", [row(2, 7.0)])
    assert len(results_table.read(path).rows) == 1


def test_no_file_has_rows_of_two_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)

    def write(gpus: str, seq: int) -> Path:
        monkeypatch.setattr(record, "_gpus", lambda: {"gpus": gpus})
        row = record.row(case={"seq": seq}, weave_us=1.0, baselines={"inductor": 10.0})
        return record.write("layers", "h200x4", [row], beside=True)

    write("2 x NVIDIA H200", 1)
    path = write("1 x NVIDIA H200", 2)
    with pytest.raises(UsageError, match="rows of NVIDIA H200, and this is NVIDIA H100 80GB HBM3: name another"):
        write("2 x NVIDIA H100 80GB HBM3", 3)
    assert len(results_table.read(path).rows) == 2


def test_clocks_are_means_of_the_settled_samples() -> None:
    idle, held = "1980, Not Active, 300.5", "1500, Active, 700.0"
    lines = ["345, Not Active, 90.0", *[idle] * 2, *[held] * 6, "[N/A], Active, 1.0", "15", "1500, Active"]
    found = clocks.parse("\n".join(lines))
    assert found is not None
    assert found.sm_mhz == pytest.approx((1980 + 6 * 1500) / 7) and found.limited == pytest.approx(6 / 7)
    assert found.watts == pytest.approx((300.5 + 6 * 700.0) / 7)
    assert clocks.parse("") is None
    assert clocks.parse("[N/A], Active, 700.0") is None


def test_a_layer_is_cut_out_of_a_trace(tmp_path: Path) -> None:
    """The second last of the second run: from its attention to the next one's."""
    names = ("cudnn_generated_fort_native_sdpa", "nvjet_sm90_hsh", "ncclDevKernel_AllReduce", "triton_red_fused_add")
    events: list[dict[str, object]] = [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 1.0}]
    for number in range(2 * 4 * len(names)):
        name = names[number % len(names)]
        events.append({"ph": "X", "cat": "kernel", "name": name, "ts": 10.0 * number, "dur": 9.0})
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    found = traces.layer(traces.read(path), layers=4)
    assert [traces.LAYER.of(kernel) for kernel in found] == ["attention", "GEMM", "exchange", "other"]
    assert found[0].begin == 10.0 * len(names) * (4 + 2)
    push = traces.Kernel("void weave::gpu::push_tiles<__nv_bfloat16, 256>(PushedTiles)", 0.0, 1.0)
    assert traces.LAYER.of(push) == "GEMM and exchange"
    traces.draw([("before", found), ("after", found[:2])], tmp_path / "layer.png")
    assert (tmp_path / "layer.png").stat().st_size > 1000


def test_exchanges_under_computation_are_read_from_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half of the first exchange runs under a GEMM on another stream, and 25 us of the second under two kernels that
    overlap. Copies, kernels of the same stream and those that compute and exchange hide nothing."""
    kernels = [
        ("nvjet_sm90_tst", 0.0, 10.0, 7), ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 5.0, 10.0, 20),
        ("triton_red_fused_add", 30.0, 20.0, 7), ("nvjet_sm90_tst", 40.0, 20.0, 8),
        ("void weave::gpu::posted<__nv_bfloat16>", 35.0, 30.0, 20), ("triton_poi_fused", 40.0, 30.0, 20),
        ("Memcpy DtoD (Device -> Device)", 5.0, 60.0, 9), ("void weave::gpu::push_tiles<__nv_bfloat16>", 0.0, 90.0, 9),
    ]  # fmt: skip
    path = tmp_path / "trace.json.gz"
    events = [
        {"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur, "args": {"stream": stream}}
        for name, ts, dur, stream in kernels
    ]
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    assert traces.hidden(traces.read(path)) == traces.Hidden(40.0, 5.0 + 25.0)
    assert main(["hidden", str(path), "--least", "0.75"]) == 0
    assert capsys.readouterr().out == "trace.json.gz: 0.04 ms of exchanges, 0.03 ms (75%) under computation\n"
    assert main(["hidden", str(path), "--least", "0.76"]) == 1
    with pytest.raises(UsageError, match="found no exchange"):
        traces.hidden(traces.read(path)[:1])


def test_a_call_of_experts_is_cut_out_of_a_trace(tmp_path: Path) -> None:
    """It is the last call; GEMMs in one kernel and in two are distinguished."""
    gemms = [f"weave::moe_experts::grouped_gemm<bf16, (weave::moe_experts::Product){which}>" for which in (0, 3)]
    names = ("route", *gemms, "weave::moe_experts::both_gemms<bf16>", "combine")
    kernels = [traces.Kernel(name, 10.0 * at, 9.0) for at, name in enumerate(names * 3)]
    found = traces.last_call(kernels)
    assert [traces.EXPERTS.of(kernel) for kernel in found] == [
        "routing", "first GEMM", "second GEMM", "both GEMMs", "sum",
    ]  # fmt: skip
    assert found[0].begin == 10.0 * len(names) * 2
    with pytest.raises(UsageError, match="found 1 sums"):
        traces.last_call(kernels[: len(names)])
    traces.draw([("experts", found)], tmp_path / "experts.png", traces.EXPERTS)
    assert (tmp_path / "experts.png").stat().st_size > 1000


def test_steps_take_turns_on_the_hosts_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first round and warm calls do not count, each round begins with a barrier, a time is the median."""
    done: list[str] = []
    monkeypatch.setattr(timing, "barrier", lambda: done.append("barrier"))
    monkeypatch.setattr(timing, "slowest", list)
    clock = 0.0

    def step(name: str, seconds: float) -> None:
        nonlocal clock
        done.append(name)
        clock += seconds if done.count(name) > 2 else 1000.0

    steps = {name: partial(step, name, seconds) for name, seconds in (("a", 1e-6), ("b", 3e-6))}
    us = timing.host_us(PLACE, steps, timing.Effort(4, 3), warm=1, now=lambda: clock)
    assert us == pytest.approx({"a": 1.0, "b": 3.0}, rel=1e-3)
    assert done.count("a") == done.count("b") == 1 + 4 * (1 + 3)
    assert done.count("barrier") == 2 * 5
    done.clear()
    timing.host_us(replace(PLACE, quick=True), steps, timing.Effort(4, 3), warm=0, meets=True, now=lambda: clock)
    assert done.count("a") == 1 + 2 * 2 and done.count("barrier") == len(done) / 2


def test_rounds_have_orders_of_their_own() -> None:
    steps = ["cublas", "sequence", "strong", "tiles"]
    rounds = [order_of(steps, turn) for turn in range(8)]
    assert rounds == [order_of(steps, turn) for turn in range(8)], "ranks would wait for each other"
    assert all(sorted(each) == steps for each in rounds)
    before_tiles = {each[each.index("tiles") - 1] for each in rounds if each[0] != "tiles"}
    assert before_tiles == set(steps) - {"tiles"}
