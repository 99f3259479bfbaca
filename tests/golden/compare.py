"""Two sets of records side by side: what is chosen, what memory it takes, what is predicted, and the reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from tests.golden.compact import Json, Record

TOLERANCE = 0.005
"""Relative difference of two times that is not counted."""
MOST_LINES = 40


class Kind(StrEnum):
    """Kinds of difference. Only the first kind is a loss by itself."""

    CHOICE = "(a) choices"
    MEMORY = "(b) arena bytes"
    TIME = "(c) estimates"
    SWITCH = "(d) token counts at which another choice wins"
    REASON = "(e) reasons, alternatives, wording"


CHOSEN = ("count", "choice", "fabric", "algorithm", "parameters", "lowerings")
REASONS = ("id", "module", "rule", "form", "rejected")
OF_GRAPH = {
    "phase": Kind.CHOICE, "tokens": Kind.CHOICE, "regime": Kind.CHOICE, "rounding": Kind.REASON,
    "stretches": Kind.SWITCH,
}  # fmt: skip


@dataclass(frozen=True)
class Difference:
    kind: Kind
    case: str
    where: str
    before: Json
    after: Json
    group: str = ""
    """Group of times that a difference of times belongs to."""
    relative: float = 0.0


@dataclass
class Differences:
    found: list[Difference] = field(default_factory=list)
    times: Counter[str] = field(default_factory=Counter)
    """How many times of each group were compared."""

    def of(self, kind: Kind) -> list[Difference]:
        return [each for each in self.found if each.kind is kind]

    def text(self) -> str:
        lines = []
        for kind in Kind:
            found = self.of(kind)
            lines.append(f"{kind}: {len(found)} differ in {len({each.case for each in found})} case(s)")
            if kind is Kind.TIME:
                lines += self._times(found)
                found = sorted(found, key=lambda each: -each.relative)[:10]
            for each in found[:MOST_LINES]:
                lines.append(f"  {each.case} | {each.where}: {each.before} -> {each.after}")
            if len(found) > MOST_LINES:
                lines.append(f"  ... and {len(found) - MOST_LINES} more")
        return "\n".join(lines)

    def _times(self, found: list[Difference]) -> Iterator[str]:
        for group, count in sorted(self.times.items()):
            errors = [each.relative for each in found if each.group == group]
            most = f", by {max(errors):.2%} at most" if errors else ""
            yield f"  {group}: {len(errors)} of {count} differ by more than {TOLERANCE:.1%}{most}"


def compare(before: Mapping[str, Record], after: Mapping[str, Record]) -> Differences:
    """Cases of `before`; those that only `after` has are not looked at."""
    result = Differences()
    for name, old in before.items():
        if name not in after:
            result.found.append(Difference(Kind.CHOICE, name, "case", "recorded", "missing"))
            continue
        _case(name, old, after[name], result)
    return result


def _case(name: str, old: Record, new: Record, result: Differences) -> None:
    def say(kind: Kind, where: str, before: Json, after: Json) -> None:
        if before != after:
            result.found.append(Difference(kind, name, where, before, after))

    say(Kind.CHOICE, "exit code", old.get("exit"), new.get("exit"))
    for part in ("error", "notes"):
        say(Kind.REASON, part, old.get(part), new.get(part))
    say(Kind.CHOICE, "fallbacks", old.get("fallbacks"), new.get("fallbacks"))
    graphs, others = old.get("graphs", []), new.get("graphs", [])
    say(Kind.CHOICE, "graphs", len(graphs), len(others))
    for index, (graph, other) in enumerate(zip(graphs, others, strict=False)):
        where = f"graph {index}"
        for part, kind in OF_GRAPH.items():
            say(kind, f"{where} {part}", graph[part], other[part])
        for group in sorted({*graph["arena"], *other["arena"]}):
            say(Kind.MEMORY, f"{where} arena {group}", _memory(graph, group), _memory(other, group))
        _times(name, where, graph, other, result)
        for site, match in _pairs(graph["sites"], other["sites"]):
            _site(name, f"{where} {_name(site or match)}", site, match, result)


def _memory(graph: Record, group: str) -> Json:
    """Fabric and bytes of a group's arena; how it is divided is the kernels' affair."""
    found = graph["arena"].get(group) or {}
    return [found.get("fabric"), found.get("bytes")]


def _pairs(old: list[Record], new: list[Record]) -> Iterator[tuple[Record | None, Record | None]]:
    """Sites by id; those whose id is gone by the module, in their order; then the sites that only one side has."""
    ids = {site["id"]: site for site in new}
    left = [site for site in new if site["id"] not in {each["id"] for each in old}]
    for site in old:
        match = ids.get(site["id"]) or next((each for each in left if each["module"] == site["module"]), None)
        if match in left:
            left.remove(match)
        yield site, match
    for site in left:
        yield None, site


def _name(site: Record | None) -> str:
    return "" if site is None else f"{site['id']} {site['module']}".strip()


def _site(name: str, where: str, old: Record | None, new: Record | None, result: Differences) -> None:
    if old is None or new is None:
        # A further site that is left as it is takes nothing away.
        lost = old is not None or (new is not None and new["choice"] != "leave")
        kind = Kind.CHOICE if lost else Kind.REASON
        result.found.append(Difference(kind, name, where, _choice(old), _choice(new)))
        return
    for part in (*CHOSEN, *REASONS):
        before, after = old.get(part), new.get(part)
        if (before or None) != (after or None):  # the file leaves out empty lists
            kind = Kind.CHOICE if part in CHOSEN else Kind.REASON
            result.found.append(Difference(kind, name, f"{where} {part}", before, after))
    for part in ("unfused_us", "predicted_us"):
        _time(name, f"{where} {part}", f"site {part}", old[part], new[part], result)
    known, others = dict(old.get("alternatives", ())), dict(new.get("alternatives", ()))
    for text, us in known.items():
        if text not in others:
            result.found.append(Difference(Kind.REASON, name, f"{where} alternative", text, "none such"))
        else:
            _time(name, f"{where} {text}", "alternative", us, others[text], result)
    for text in others:
        if text not in known:
            result.found.append(Difference(Kind.REASON, name, f"{where} alternative", "none such", text))


def _choice(site: Record | None) -> Json:
    return "no such site" if site is None else f"{site['choice']} {site['fabric']}"


def _times(name: str, where: str, old: Record, new: Record, result: Differences) -> None:
    for part in ("unfused_us", "predicted_us"):
        _time(name, f"{where} {part}", f"graph {part}", old[part], new[part], result)
    for part, before, after in zip(("before", "after"), old["whole"], new["whole"], strict=True):
        _time(name, f"{where} whole {part}", "whole model", before, after, result)
    for kind in sorted({*old["work"], *new["work"]}):
        counts, others = old["work"].get(kind, [0, 0.0]), new["work"].get(kind, [0, 0.0])
        if counts[0] != others[0]:
            result.found.append(Difference(Kind.REASON, name, f"{where} kernels {kind}", counts[0], others[0]))
        _time(name, f"{where} {kind}", "work outside sites", counts[1], others[1], result)


def _time(name: str, where: str, group: str, old: Json, new: Json, result: Differences) -> None:
    result.times[group] += 1
    if old is None or new is None:
        relative = 0.0 if old is new else float("inf")
    else:
        relative = abs(new - old) / max(abs(old), 1e-9) if old != new else 0.0
    # Records have three digits, so the last one of a short time says nothing.
    if relative > TOLERANCE and (old is None or new is None or abs(new - old) > 0.0015):
        result.found.append(Difference(Kind.TIME, name, where, old, new, group, relative))
