"""The report in one screen: what its headline counts, what would make the model faster, and how it fits a terminal."""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.graphs.uncertain import estimate_of
from weaveopt.errors import OptionError
from weaveopt.records.candidate import Candidate, Fabric, Rejection
from weaveopt.records.report import Decision, GraphBreak, GraphReport, MachineSummary, Report, Variant
from weaveopt.reporting import compare, document, levers, reasons, screen, terminal
from weaveopt.reporting import text as render
from weaveopt.reporting.headline import headline, headline_line, machine_line
from weaveopt.reporting.printed_report import printed
from weaveopt.reporting.timeline import total

GOLDEN = Path(__file__).parent / "golden" / "screen.txt"
LINES = 30
RULE = "all_reduce_rms_norm"


def _changed(report: Report, change: Callable[[Decision], Decision]) -> GraphReport:
    """The graph with its rewritten decisions changed."""
    graph = report.graphs[0]
    return replace(graph, decisions=tuple(change(d) if d.rewritten else d for d in graph.decisions))


def _one_line(text: str) -> str:
    return " ".join(text.split())


def test_the_screen_is_the_golden_one(whole: Report) -> None:
    text = screen.text(whole)
    assert text == GOLDEN.read_text(encoding="utf-8")
    assert len(text.splitlines()) < LINES < len(render.text(whole).splitlines())


def test_a_printed_report_is_short_and_has_all_behind_methods(whole: Report) -> None:
    report = pickle.loads(pickle.dumps(printed(whole)))
    assert str(report) == screen.text(whole)
    assert report.full() == render.text(whole)
    assert "chosen: all_reduce_rms_norm on shm" in report.why("o_proj")
    assert ".full() and .why(SITE)" in str(report)
    with pytest.raises(OptionError, match="no such site"):
        report.why("nothing")


@pytest.mark.parametrize("slower, shown", [((1.0, 1.002), False), ((1.2, 1.0), True), ((1.25, 1.1), True)])
def test_times_at_the_power_limit_are_of_the_whole_model(
    whole: Report, slower: tuple[float, float], shown: bool
) -> None:
    """As the first figures of the line: power is known of the captured layers, which stand for more."""
    before, after = (total(whole.graphs[0], fused=fused).us for fused in (False, True))
    captured = Variant(
        "captured", baseline_us=before / 50, predicted_us=after / 50,
        baseline_steady_us=before / 50 * slower[0], steady_us=after / 50 * slower[1],
    )  # fmt: skip
    graph = replace(whole.graphs[0], variants=(captured,), variant="captured")
    line = headline_line(graph, whole.machine)
    times = f"{before:,.1f} -> {after:,.1f} us"
    steady = f"run after run, at the power limit: {before * slower[0]:,.1f} -> {after * slower[1]:,.1f} us"
    assert times in line and (steady in line) == shown
    assert ("power limit" in line) == shown


def test_kernels_that_never_ran_are_beside_the_headline_and_not_in_it(whole: Report, tmp_path: Path) -> None:
    def on_switch(decision: Decision) -> Decision:
        down = decision.site.module.endswith("down_proj")
        chosen = replace(decision.chosen, fabric=Fabric.MULTIMEM, variant="two_shot direct")
        return replace(decision, chosen=chosen) if down else decision

    graph = _changed(whole, on_switch)
    found = headline(graph)
    saved = total(graph, fused=False).us - total(graph, fused=True).us
    assert found.before.us - found.counting.us == pytest.approx(saved / 2)
    assert (found.never_ran, found.num_within_error) == (("multimem two_shot direct",), 0)
    line = headline_line(graph, whole.machine)
    before, counting, chosen = found.before.us, found.counting.us, found.chosen.us
    assert f"{before / counting:.2f} times as fast, partly by constants of datasheets; " in line
    assert f"{before / chosen:.2f} times as fast with kernels that have never run (multimem two_shot direct)" in line
    text = screen.text(replace(whole, graphs=(graph,)))
    assert "(64%)" in text and "(…) is not in the next line's first figure" in text
    assert headline_line(graph, whole.machine) in _one_line(text), "beside it, in one line"
    written = document.to_json(replace(whole, graphs=(graph,)))
    assert '"never_ran": [\n' in written and '"within_error": 0' in written
    file = tmp_path / "report.json"
    file.write_text(written, encoding="utf-8")
    both = _one_line(compare.text(file, file))
    assert all(f"{letter} {line}" in both for letter in "AB")


@pytest.mark.parametrize(("saved_us", "counts"), [(60.5, True), (58.5, False), (-5.0, False)])
def test_a_gain_within_the_error_is_not_in_the_headline(whole: Report, saved_us: float, counts: bool) -> None:
    """The baseline is 450.5 us ± a tenth, what it is rewritten to is as uncertain, and neither error has to do with the
    other."""

    def saving(decision: Decision) -> Decision:
        return replace(decision, chosen=replace(decision.chosen, estimate=estimate_of(0.1, ("gemm", 450.5 - saved_us))))

    graph = _changed(whole, saving)
    found = headline(graph)
    assert (found.counting == found.before) is not counts
    assert found.num_within_error == (0 if counts else 16)
    line = headline_line(graph, whole.machine)
    error = math.hypot(45.05, 0.1 * (450.5 - saved_us)) / 450.5
    said = f"16 rewrites that save no more than the error of {error:.0%} not counted"
    assert (said in line) is not counts and ("times as fast" in line) is counts
    assert '"within_error": 0' in document.to_json(replace(whole, graphs=(graph,))) or not counts


@pytest.mark.parametrize(
    ("origins", "stands_in_for", "shown", "beside"),
    [
        (
            (("a.b", "paper: x"), ("c", "estimate y")),
            (),
            "(nothing measured on it)",
            "by constants of estimates and papers",
        ),
        ((("a.b", "paper: x"), ("c", "measured y")), (), "(not all measured)", "partly by constants of papers"),
        ((("a.b", "measured y"),), ("RTX",), "stands in for RTX", "by constants of big"),
    ],
)
def test_what_prices_come_from_is_beside_the_headline(
    whole: Report,
    origins: tuple[tuple[str, str], ...],
    stands_in_for: tuple[str, ...],
    shown: str,
    beside: str,
) -> None:
    machine = MachineSummary("big", False, origins, stands_in_for)
    assert shown in machine_line(machine)
    assert f"times as fast, {beside}; " in headline_line(whole.graphs[0], machine)
    measured = replace(machine, measured=True, stands_in_for=())
    assert "constants" not in headline_line(whole.graphs[0], measured)


def _with(decision: Decision, *codes: str, fabric: Fabric = Fabric.SHM, us: float | None = None) -> Decision:
    """The decision with one more candidate, which is rejected for `codes`."""
    estimate = None if us is None else estimate_of(0.1, ("reduce", us))
    rejections = tuple(Rejection(code, f"because of {code}") for code in codes)
    more = Candidate("gemm_all_reduce", fabric, "tiles", estimate=estimate, rejections=rejections)
    return replace(decision, alternatives=(*decision.alternatives, more))


def test_what_was_not_measured_says_what_to_run(whole: Report) -> None:
    graph = _changed(whole, lambda decision: _with(decision, "not_measured", "contention_not_measured"))
    (lever,) = levers.levers(replace(whole, graphs=(graph,)))
    assert lever.us == pytest.approx(16 * 60.0), "communication that nothing hides, as chosen"
    command = "torchrun --nproc-per-node 2 -m weaveopt calibrate"
    assert lever.sentence() == f"not measured: gemm_all_reduce on shm: run `{command}` on such a machine"
    blocked = _changed(whole, lambda decision: _with(decision, "not_measured", "dtype_not_supported"))
    absent = _changed(whole, lambda decision: _with(decision, "not_measured", "fabric_needs_hosts", fabric=Fabric.TCP))
    unpriced = _changed(
        whole, lambda decision: _with(replace(decision, chosen=decision.alternatives[0], alternatives=()))
    )
    for other in (blocked, absent, unpriced):
        assert levers.levers(replace(whole, graphs=(other,))) == ()


@pytest.mark.parametrize(
    ("codes", "us", "words"),
    [
        (("no_saving",), 460.5, "left: gemm_all_reduce on shm (tiles) would be slower by 10.0 us each"),
        (
            ("no_saving",),
            440.5,
            "left: gemm_all_reduce on shm (tiles) would save 10.0 us each, within the error of 44.1 us",
        ),
        (("no_saving",), 450.5, "left: gemm_all_reduce on shm (tiles) would be as fast"),
        (("dtype_not_supported",), None, "gemm_all_reduce: dtype_not_supported: because of dtype_not_supported"),
    ],
)
def test_a_place_that_is_left_says_by_how_much_or_why(
    whole: Report, codes: tuple[str, ...], us: float | None, words: str
) -> None:
    def left(decision: Decision) -> Decision:
        alone = replace(decision, chosen=decision.alternatives[0], alternatives=())
        return _with(alone, *codes, us=us)

    (lever,) = levers.levers(replace(whole, graphs=(_changed(whole, left),)))
    places = "model.layers.*.self_attn.o_proj ×8, model.layers.*.mlp.down_proj ×8"
    assert lever.sentence() == f"{places}: {words}"
    assert lever.us == pytest.approx(16 * 300.0)


def test_levers_are_five_at_most_breaks_first_and_the_rest_by_time(whole: Report) -> None:
    site = whole.graphs[0].decisions[1]
    baseline = site.baseline
    assert baseline is not None

    def left(number: int) -> Decision:
        alone = replace(site, chosen=replace(site.alternatives[0], estimate=baseline), alternatives=())
        named = replace(alone.site, id=str(number), module=f"m{number}", count=number)
        return _with(replace(alone, site=named), f"reason_{number}")

    graph = replace(whole.graphs[0], decisions=tuple(left(number) for number in range(1, 8)))
    broken = replace(whole, graphs=(graph,), breaks=(GraphBreak("a print", "model.py:3 in forward", "take it out", 2),))
    lines = levers.lever_lines(broken)
    assert lines[0] == ("", "graph break ×2 at model.py:3 in forward: a print (take it out)")
    assert [us for us, _ in lines[1:4]] == ["2,100.0 us", "1,800.0 us", "1,500.0 us"]
    assert lines[4] == ("", "and 4 more")
    assert len(lines) == levers.MOST
    assert "graph break ×2" in screen.text(broken)


def test_many_graphs_stay_one_screen(whole: Report) -> None:
    graph = whole.graphs[0]
    small = [replace(graph, name=f"small{number}", decisions=graph.decisions[:2], work=()) for number in range(20)]
    siteless = replace(graph, name="nothing", phase="inference", tokens=0, decisions=(), work=())
    text = screen.text(replace(whole, graphs=(*small, siteless, siteless, graph)))
    assert f"({graph.name})" in text and "and 18 graphs with sites that take less time" in text
    assert "2 graphs without a site" in text and "0 tokens" not in text
    assert len(text.splitlines()) < 2 * LINES
    assert "\ninference (nothing)\n" in render.text(replace(whole, graphs=(siteless,)))


def test_a_fabric_that_cannot_be_there_is_one_line_for_all_sites(report: Report) -> None:
    decisions = report.graphs[0].decisions
    assert reasons.absent_fabrics(decisions) == {"peer": "peer joins GPUs (device=cpu)"}
    text = render.text(report)
    assert text.count("peer") == 1 and "no_kernel" not in text
    assert "no fabric here: peer joins GPUs (device=cpu)" in text
    reached = _changed(report, lambda decision: _with(decision, "no_saving", fabric=Fabric.PEER, us=999.0))
    assert reasons.absent_fabrics(reached.decisions) == {}


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_nothing_of_the_screen_is_cut(whole: Report, width: int) -> None:
    text = screen.text(whole, width)
    assert all(len(line) <= width for line in text.splitlines())
    first_column = "".join(line.split(" ")[0] for line in text.splitlines())
    assert "model.layers.*.self_attn.o_projmodel.layers.*.mlp.down_proj" in first_column
    assert all(text.count(figure) == 2 for figure in ("450.5", "160.0", "64%"))


def test_columns_no_color_and_dumb_terminals_are_honoured(whole: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for name in ("COLUMNS", "NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    assert terminal.width_of() == terminal.DEFAULT_WIDTH
    assert terminal.colored(Terminal()) and not terminal.colored(io.StringIO())
    assert "\x1b[" in screen.text(whole, color=True) and "\x1b[" not in screen.text(whole)
    monkeypatch.setenv("COLUMNS", "72")
    assert terminal.width_of(Terminal()) == terminal.width_of(io.StringIO()) == 72
    assert max(map(len, str(printed(whole)).splitlines())) <= 72
    monkeypatch.setenv("COLUMNS", "wide")
    assert terminal.width_of() == terminal.DEFAULT_WIDTH
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        monkeypatch.setenv(name, value)
        assert not terminal.colored(Terminal())
        monkeypatch.delenv(name)
