"""The suite `unseen_shapes`: what is drawn, and how rows are summed up and drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import plots, record
from benchmarks.suites.unseen_shapes import summary
from benchmarks.workloads.unseen_shapes import BY_PROFILE, CPU_SPAN, GPU_SPAN, Span, draw, shape_of
from tests.graphs.nonempty import some
from weaveopt.cost_model.timed import KernelShape
from weaveopt.records.report import KernelReport


@pytest.mark.parametrize("span", [GPU_SPAN, CPU_SPAN])
def test_shapes_are_drawn_alike_and_within_the_span(span: Span) -> None:
    shapes = draw(span, 40, 7)
    assert shapes == draw(span, 40, 7) and shapes != draw(span, 40, 8) and len(set(shapes)) > 30
    for each in some(shapes):
        assert each.hidden in span.hiddens and 1 <= each.tokens <= span.most_tokens
        assert each.heads % 2 == each.kv_heads % 2 == each.heads % each.kv_heads == each.hidden % each.heads == 0
        low, high = span.ratios
        assert low * each.hidden - 64 <= each.intermediate <= high * each.hidden + 64
        assert each.intermediate % 128 == 0


def row(
    weave_us: float, others: float, predicted_us: float, gemms: int = 3, steady: dict[str, float] | None = None
) -> record.Row:
    return record.row(
        case={"hidden": 1152, "intermediate": 4096, "tokens": 77},
        weave_us=weave_us,
        baselines={"inductor": 2 * weave_us, BY_PROFILE: others},
        predicted_us=predicted_us,
        parameters={
            "of_fastest": min(1.0, others / weave_us), "over_inductor": 2.0, "by_profile_predicted_us": others / 2,
            "gemm_error": 0.01 if gemms else 0.0, "gemms": gemms, "tune_share": 0.05, "again_s": 0.1,
            **(steady or {}),
        },
    )  # fmt: skip


def test_rows_are_summed_up_and_drawn(tmp_path: Path) -> None:
    rows = [row(100.0, 100.0, 90.0), row(100.0, 80.0, 110.0, gemms=0)]
    said = summary(rows)
    assert "GEMMs alone none timed" in summary(rows[1:])
    assert "of the fastest 0.900 on average, 0.800 at least" in said
    assert "mean error 10.0%" in said and "by profiles alone 50.0%" in said and "GEMMs alone 1.0%" in said
    assert "timing: 5.0% of a compile at most, 0.100 s when known" in said
    assert summary([]) == "" and "back to back" not in said
    again = {"steady_us": 120.0, "steady_of_fastest": 0.95, "steady_over_inductor": 1.5}
    steady = [row(100.0, 100.0, 90.0, steady=again | {"steady_predicted_us": 90.0}), row(1.0, 1.0, 1.0, steady=again)]
    assert "back to back: of the fastest 0.950 on average, 0.950 at least; over Inductor 1.500, 1.500 at least; " in (
        summary(steady)
    )
    assert "predicted: mean error 25.0%, 90th 25.0%" in summary(steady), "a profile without energies predicts none"
    plots.plot("unseen_shapes", rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 5000


def test_a_kernel_is_read_from_its_report() -> None:
    shape = KernelShape("gemm", "bfloat16", 1500, (5120, 13824), "rc addmm")
    assert shape_of(KernelReport(str(shape), 1.0, 1.0, 0.02)) == shape
