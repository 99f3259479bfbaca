"""The plots of result files. Which one a suite gets follows from what its rows hold."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import accuracy, curves
from benchmarks.record import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Sequence[Row]
Panel = tuple[int, int]
"""Ranks and hidden size."""
NOT_RED = ("tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:brown")
"""Colors of baselines; weave is red."""


def plot(title: str, rows: Rows, path: Path) -> None:
    """Writes the suite's plot to `path` (PNG)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    if accuracy.is_accuracy(rows):
        figure = _accuracy(title, accuracy.predictions(rows))
    elif all("of_fastest" in row.parameters and row.predicted_us for row in rows):
        figure = _choices(title, rows)
    elif all("ctas" in row.case for row in rows):
        figure = _ctas(title, rows)
    elif all("runs" in row.parameters and "sum" in row.case for row in rows):
        hiddens = {row.case["hidden"] for row in rows}
        figure = _latency(title, rows) if len(hiddens) <= 3 else _ratios(title, rows)
    elif found := curves.panels(rows):
        figure = _curves(title, found)
    else:
        figure = _bars(title, rows)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def label(row: Row) -> str:
    return " ".join(str(value) for value in row.case.values())


def _bars(title: str, rows: Rows) -> Figure:
    """The speed of weave over its best baseline, one bar a row."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.28 * len(rows)), layout="constrained")
    bars = axes.barh([label(row) for row in rows], [row.ratio for row in rows], color="#3b6ea5")
    axes.bar_label(bars, labels=[f"{row.ratio:.2f}x {row.best_baseline}" for row in rows], padding=3)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set_title(f"{title}: best baseline / weave")
    return figure


def _curves(title: str, panels: Sequence[curves.Panel]) -> Figure:
    """Time against size: weave and its baselines; and, on the right, the best baseline over weave."""
    figure, axes = _grid(title, len(panels), 4.4)
    for panel, here in zip(panels, axes, strict=False):
        for (name, points), color in zip(panel.baselines.items(), cycle(NOT_RED)):
            here.plot(*zip(*points, strict=True), "o-", ms=3, linewidth=1, color=color, label=name)
        weave = [row.weave_us for row in panel.rows]
        here.plot(panel.sizes, weave, "o-", ms=3, linewidth=1, color="#c03a2b", label="weave")
        _log_log(here, panel.title, panel.axis.label, "us")
        ratio = here.twinx()
        ratio.plot(panel.sizes, [row.ratio for row in panel.rows], ".", ms=4, color="gray")
        ratio.axhline(1.0, color="gray", linewidth=0.7)
        ratio.set_ylim(bottom=0.0)
        ratio.set_ylabel("best baseline / weave (gray)")
    return figure


def _accuracy(title: str, rows: Rows) -> Figure:
    """Predicted against measured, a colour a kind; and how many predictions are off by how much."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12.4, 5), layout="constrained")
    figure.suptitle(f"{title}: {len(rows)} cases")
    for kind in dict.fromkeys(str(row.case[accuracy.KIND]) for row in rows):
        found = [row for row in rows if row.case[accuracy.KIND] == kind]
        left.plot([row.weave_us for row in found], [row.predicted_us for row in found], "o", ms=3, label=kind)
    ends = [min(row.weave_us for row in rows), max(row.weave_us for row in rows)]
    left.plot(ends, ends, color="black", linewidth=1)
    _log_log(left, "predicted against measured", "measured us", "predicted us")
    off = sorted(100 * accuracy.error_of(row) for row in rows)
    right.plot(off, [100 * (index + 1) / len(off) for index in range(len(off))], color="#3b6ea5")
    for percent in (5, 10):
        right.axvline(percent, color="black", linewidth=1, linestyle=":")
    right.set_xlim(0, min(max(off), 40))
    right.set_title("share of predictions within an error")
    right.set_xlabel("error, %")
    right.set_ylabel("predictions, %")
    right.grid(alpha=0.3)
    return figure


def _choices(title: str, rows: Rows) -> Figure:
    """Predicted against measured; and the speed of the chosen form over the fastest one's, and over Inductor's."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12.4, 5), layout="constrained")
    figure.suptitle(f"{title}: {len(rows)} shapes")
    measured = [row.weave_us for row in rows]
    left.plot(measured, [row.predicted_us for row in rows], "o", ms=4, color="#c03a2b", label="kernels timed")
    ends = [min(measured), max(measured)]
    left.plot(ends, ends, color="black", linewidth=1)
    _log_log(left, "predicted against measured, whole layers", "measured us", "predicted us")
    labels = [" ".join(str(row.case[name]) for name in ("hidden", "intermediate", "tokens")) for row in rows]
    for name, color, shift in (("of_fastest", "#c03a2b", -0.2), ("over_inductor", "#3b6ea5", 0.2)):
        places = [place + shift for place in range(len(rows))]
        right.barh(places, [float(row.parameters[name]) for row in rows], 0.4, color=color, label=name)
    right.set_yticks(range(len(rows)), labels, fontsize=7)
    right.axvline(1.0, color="black", linewidth=1)
    right.set_title("speed of the chosen form over the fastest one's, and over Inductor's")
    right.legend(fontsize=8)
    return figure


def _panels(rows: Rows) -> dict[Panel, list[Row]]:
    """Rows by ranks and hidden size, by tokens; those with a whole sum are another case beside those without."""
    found: dict[Panel, list[Row]] = {}
    told_apart = {row.case.get("sum") for row in rows} > {"whole"}
    for row in sorted(rows, key=lambda row: int(row.case["tokens"])):
        if not told_apart or row.case.get("sum") != "whole":
            found.setdefault((int(row.case["ranks"]), int(row.case["hidden"])), []).append(row)
    return dict(sorted(found.items(), reverse=True))


def _grid(title: str, count: int, height: float) -> tuple[Figure, list[Axes]]:
    from matplotlib import pyplot

    columns = min(2, count)
    lines = -(-count // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(6.2 * columns, height * lines), layout="constrained", squeeze=False
    )
    figure.suptitle(title)
    flat = [each for line in axes for each in line]
    for unused in flat[count:]:
        unused.axis("off")
    return figure, flat


def _latency(title: str, rows: Rows) -> Figure:
    """Latency against tokens: weave, the best baseline, the best peer library, and the bound."""
    panels = _panels(rows)
    figure, axes = _grid(f"{title}: all-reduce + residual + RMSNorm, bf16", len(panels), 4.6)
    for ((ranks, hidden), found), here in zip(panels.items(), axes, strict=False):
        tokens = [int(row.case["tokens"]) for row in found]
        here.plot(tokens, [row.baselines[row.best_baseline] for row in found], "o-", ms=3, label="best baseline")
        peers = [(row.case["tokens"], row.parameters.get("peer_library_us")) for row in found]
        peers = [(count, us) for count, us in peers if us is not None]
        if peers:
            here.plot(*zip(*peers, strict=True), "s--", ms=3, color="gray", label="peer library (another run)")
        here.plot(tokens, [row.weave_us for row in found], "o-", ms=3, color="#c03a2b", label="weave")
        here.plot(tokens, [row.bound_us for row in found], ":", color="black", label="bandwidth bound")
        _log_log(here, f"{ranks} GPUs, hidden {hidden}", "tokens", "us")
    return figure


def _ctas(title: str, rows: Rows) -> Figure:
    """Time against the number of CTAs, a line for each token count."""
    panels = _panels(rows)
    figure, axes = _grid(f"{title}: over the best number of CTAs", len(panels), 4.2)
    for ((ranks, hidden), found), here in zip(panels.items(), axes, strict=False):
        for tokens in dict.fromkeys(row.case["tokens"] for row in found):
            line = sorted((row for row in found if row.case["tokens"] == tokens), key=lambda row: int(row.case["ctas"]))
            best = min(row.weave_us for row in line)
            ctas = [int(row.case["ctas"]) for row in line]
            here.plot(ctas, [row.weave_us / best for row in line], "o-", ms=3, label=f"{tokens} tokens, {best:.0f} us")
        _log_log(here, f"{ranks} GPUs, hidden {hidden}", "CTAs", "time / best")
        here.set_ylim(0.95, 8)
    return figure


def _ratios(title: str, rows: Rows) -> Figure:
    """Best baseline over weave against tokens, a line for each hidden size."""
    by_ranks: dict[int, dict[int, list[Row]]] = {}
    for (ranks, hidden), found in _panels(rows).items():
        by_ranks.setdefault(ranks, {})[hidden] = found
    figure, axes = _grid(f"{title}: best baseline / weave", len(by_ranks), 4.2)
    for (ranks, by_hidden), here in zip(by_ranks.items(), axes, strict=False):
        for hidden, found in sorted(by_hidden.items()):
            tokens = [int(row.case["tokens"]) for row in found]
            here.plot(tokens, [row.ratio for row in found], "o-", ms=3, label=str(hidden))
        here.axhline(1.0, color="black", linewidth=1)
        here.set_xscale("log", base=2)
        here.set_title(f"{ranks} GPUs, by hidden size")
        here.set_xlabel("tokens")
        here.legend(fontsize=7, ncols=2)
    return figure


def _log_log(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
