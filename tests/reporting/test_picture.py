"""The timeline as a picture: files that open, what they show, and what is refused."""

from __future__ import annotations

import importlib.util
import io
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from weaveopt.cli import explain
from weaveopt.cli.main import main
from weaveopt.errors import OptionError
from weaveopt.records.candidate import Fabric
from weaveopt.records.report import Report
from weaveopt.records.task import ScheduledTask, Stream
from weaveopt.reporting import picture

pyplot = pytest.importorskip("matplotlib.pyplot", reason="matplotlib is optional")


def _words(svg: bytes) -> str:
    """Text of the picture: matplotlib draws letters as paths and leaves each text in a comment."""
    parser = ElementTree.XMLParser(target=ElementTree.TreeBuilder(insert_comments=True))
    root = ElementTree.fromstring(svg, parser=parser)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    return "\n".join(str(node.text).strip() for node in root.iter() if node.tag is ElementTree.Comment)


@pytest.mark.parametrize("num_graphs", [1, 2])
def test_a_png_opens_with_a_row_of_panels_a_graph(whole: Report, num_graphs: int) -> None:
    content = picture.draw(replace(whole, graphs=whole.graphs * num_graphs), "png")
    assert content.startswith(b"\x89PNG\r\n")
    height, width, _ = pyplot.imread(io.BytesIO(content)).shape
    dots = picture.DOTS_PER_INCH
    assert (width, height) == (round(picture.INCHES_WIDE * dots), round(picture.INCHES_HIGH * num_graphs * dots))
    pixels = pyplot.imread(io.BytesIO(content))[..., :3].reshape(-1, 3)
    white = (pixels > 0.99).all(axis=1).mean()
    assert 0.3 < white < 0.95, f"{white:.0%} of the picture is empty"


def test_an_svg_says_what_happens_before_and_after(whole: Report) -> None:
    words = _words(picture.draw(whole, "svg"))
    assert "tiny, 2 ranks on cpu: predicted" in words
    assert "layers 0…1 (×8), before: 1,061.0 us, 600.0 (57%) of it exposed communication" in words
    assert "layers 0…1 (×8), after: 480.0 us, 120.0 (25%) of it exposed communication" in words
    assert "whole model: ×2.13" in words
    assert "8.75 ms" in words and "4.10 ms" in words
    for name in ("compute", "communication", "all_reduce", "gemm", "reduce", "gemm", "attention"):
        assert name in words.splitlines(), name


def test_a_variant_that_runs_is_drawn_by_its_schedule(whole: Report) -> None:
    before = (
        ScheduledTask("gemm", Stream.COMPUTE, 0.0, 4.0),
        ScheduledTask("all_to_all", Stream.COMMUNICATION, 4.0, 5.0),
    )
    after = (
        ScheduledTask("gemm", Stream.COMPUTE, 0.0, 4.0),
        ScheduledTask("all_to_all", Stream.COMMUNICATION, 2.0, 5.0),
    )
    graph = replace(whole.graphs[0], schedule_before=before, schedule=after)
    words = _words(picture.draw(replace(whole, graphs=(graph,)), "svg"))
    assert "the layers that were captured, before: 9.0 us" in words
    assert "the layers that were captured, after: 7.0 us" in words
    assert "all_to_all" in words.splitlines() and "attention" not in words.splitlines()


def test_sites_alone_are_called_so(report: Report) -> None:
    words = _words(picture.draw(report, "svg"))
    assert "layers 0…1 (×8), sites alone, before: 901.0 us" in words
    assert "all sites: ×2.82" in words


def test_what_a_gain_rests_on_is_in_the_picture(whole: Report) -> None:
    graph = whole.graphs[0]
    switch = tuple(
        replace(d, chosen=replace(d.chosen, fabric=Fabric.MULTIMEM)) if d.rewritten else d for d in graph.decisions
    )
    words = _words(picture.draw(replace(whole, graphs=(replace(graph, decisions=switch),)), "svg"))
    assert "whole model: ×1.00, ×2.13" in words and "with kernels that have never run" in words
    assert "predicted, partly by constants of datasheets" in words


def test_a_graph_without_anything_to_run_is_drawn_empty(report: Report) -> None:
    empty = replace(report, graphs=(replace(report.graphs[0], decisions=()),))
    assert "no part" in _words(picture.draw(empty, "svg"))
    with pytest.raises(OptionError, match="no graph to draw"):
        picture.draw(replace(report, graphs=()), "png")


@pytest.mark.parametrize(
    ("words", "suffix", "magic"),
    [
        ("", "png", b"\x89PNG"),
        ("--format png", "picture", b"\x89PNG"),
        ("", "SVG", b"<?xml"),
        ("--format svg", "svg", b"<?xml"),
    ],
)
def test_the_format_follows_the_option_or_the_name(
    words: str, suffix: str, magic: bytes, whole: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explain, "explain", lambda *_: whole)
    file = tmp_path / f"timeline.{suffix}"
    assert main(["explain", "tiny", *words.split(), "--output", str(file)]) == 0
    assert file.read_bytes().startswith(magic)


def test_without_matplotlib_one_line_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "matplotlib" else find(name))
    monkeypatch.setattr(explain, "explain", lambda *_: pytest.fail("captured before the check"))
    file = tmp_path / "timeline.png"
    assert main(["explain", "llama-3.3-70b", "--tp", "8", "--output", str(file)]) == 2
    assert capsys.readouterr().err == "weaveopt: error: a picture needs matplotlib: pip install matplotlib\n"
    assert not file.exists()
