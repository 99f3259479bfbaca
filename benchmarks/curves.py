"""Time against size, a panel a case: how rows of attention and of the decode loop are drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.record import Row

LEAST_POINTS = 2


@dataclass(frozen=True)
class Axis:
    """Size along which a panel's rows grow."""

    label: str
    size: Callable[[Row], int]


TOKENS = Axis("tokens", lambda row: int(row.case["seq"]))
BATCH = Axis("sequences", lambda row: int(row.case["batch"]))
PROMPT = Axis("tokens", lambda row: int(row.case["tokens"]))
OF_A_RANK = Axis("tokens of each rank", lambda row: int(row.case["tokens"]))
FILLED = Axis(
    "filled keys of all sequences and heads",
    lambda row: int(row.case["batch"]) * int(row.case["filled"]) * int(row.case["key_heads"]),
)

HOSTS = Axis("hosts", lambda row: int(row.case["hosts"]))


@dataclass(frozen=True)
class Panel:
    title: str
    axis: Axis
    rows: tuple[Row, ...]
    """Sorted by size."""

    @property
    def sizes(self) -> list[int]:
        return [self.axis.size(row) for row in self.rows]

    @property
    def baselines(self) -> dict[str, list[tuple[int, float]]]:
        """Sizes and times of each, of the rows that have it."""
        found: dict[str, list[tuple[int, float]]] = {}
        for row in self.rows:
            for name, us in row.baselines.items():
                found.setdefault(name, []).append((self.axis.size(row), us))
        return found


def axis_of(row: Row) -> Axis | None:
    """None for other suites, and for cases that stand for themselves (positions that the caller gave)."""
    case = row.case
    if "links" in case:
        return HOSTS
    if "routing" in case and "kernels" in case:
        return OF_A_RANK
    if not ("model" in case or "head_size" in case) or "positions" in case:
        return None
    if case.get("phase") == "decode" and "filled" in case:
        return FILLED
    if case.get("phase") == "prefill" and "tokens" in case:
        return PROMPT
    if case.get("phase") == "decode" or "choice" in case:
        return BATCH
    return TOKENS if "seq" in case else None


def panel_of(row: Row) -> str:
    """The part of a case that stays the same along the axis."""
    if "links" in row.case:
        costly = f", {row.case['overhead_us']:g} us a message" if row.case["overhead_us"] else ""
        return (
            f"{row.case['kib']:5d} KiB, {row.case['ranks_per_host']} ranks and {row.case['links']} NICs a host{costly}"
        )
    kept = [str(row.case[key]) for key in ("model", "phase", "choice", "routing", "kernels") if key in row.case]
    masks = {True: ["with a mask"], False: ["causal"]}
    return ", ".join(kept + masks.get(bool(row.case["mask"]), []) if "mask" in row.case else kept)


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Those with several sizes; empty where rows are of another kind, or hold one size each."""
    found: dict[tuple[str, str], tuple[Axis, list[Row]]] = {}
    for row in rows:
        axis = axis_of(row)
        if axis is not None:
            found.setdefault((panel_of(row), axis.label), (axis, []))[1].append(row)
    made = [
        Panel(title, axis, tuple(sorted(of_panel, key=axis.size)))
        for (title, _), (axis, of_panel) in sorted(found.items())
    ]
    return [panel for panel in made if len(set(panel.sizes)) >= LEAST_POINTS]
