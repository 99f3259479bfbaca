"""A JSON report with only what is held: choices, kernels, memory, times. Read by its documented fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]
Record = dict[str, "Json"]
DIGITS = 3
OLD_NAMES = {"ll_packet": "mail", "transfer": "form"}
"""Words of today, and what they were called when the records were made."""


def rounded(value: Json) -> Json:
    """Every number that is not whole to three digits, at any depth."""
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list) else value


def compact(report: Record) -> Record:
    """Compact form of a whole report: one record a graph, without graph names, which count up within a process."""
    return {
        "graphs": [rounded(_graph(graph)) for graph in report["graphs"]],
        "fallbacks": [f"{each['step']}: {each['error']}" for each in report["fallbacks"]],
        "notes": report["notes"],
    }


def _graph(graph: Record) -> Record:
    whole = graph.get("whole") or {}
    return {
        "phase": graph["phase"],
        "tokens": graph["tokens"],
        "unfused_us": graph["unfused_us"],
        "predicted_us": graph["predicted_us"],
        "whole": [whole.get("before_us"), whole.get("after_us")],
        "work": _work(graph.get("work") or ()),
        "regime": graph.get("regime"),
        "arena": {each["group"]: _arena(each, graph["arena"]["slots"]) for each in graph["arena"]["groups"]},
        "rounding": graph.get("rounding", []),
        "stretches": [_stretches(each) for each in graph.get("sensitivity") or ()],
        "sites": [_site(site) for site in graph["sites"]],
    }


def _work(work: Sequence[Record]) -> Record:
    """Kernels outside the sites by kind: how many, and their time, in the whole model."""
    found: dict[str, list[float]] = {}
    for each in work:
        total = found.setdefault(each["kind"], [0, 0.0])
        total[0] += each["count"]
        total[1] += each["us"] * each["count"]
    return found


def _arena(group: Record, slots: Sequence[Record]) -> Record:
    """Bytes of one group and of its buffers."""
    return {
        "fabric": group["fabric"],
        "bytes": group["bytes"],
        "buffers": {each["name"]: each["bytes"] for each in slots if each["group"] == group["group"]},
    }


def old_words(text: str) -> str:
    """A line with every word as it was called when the records were made."""
    return " ".join(OLD_NAMES.get(word, word) for word in text.split(" "))


def _stretches(found: Record) -> str:
    """The choice at every token count: `site site: 1 leave, 9 rule fabric algorithm form`."""
    return f"{' '.join(found['sites'])}: " + ", ".join(
        f"{e['tokens']} {old_words(e['choice'])}" for e in found["stretches"]
    )


def _lowerings(candidate: Record) -> list[list[Json]]:
    return [
        [row["max_tokens"], *old_words(row["variant"]).split(), row["values"].get("num_ctas", 0)]
        for row in candidate.get("table") or ()
    ]


def _algorithm(candidate: Record) -> str:
    return (candidate.get("variant") or "library").split()[0]


def _parameters(candidate: Record) -> Record:
    return {
        OLD_NAMES.get(name, name): OLD_NAMES.get(value, value) if isinstance(value, str) else value
        for name, value in candidate["parameters"].items()
    }


def _site(site: Record) -> Record:
    return {
        "id": site["id"],
        "count": site["count"],
        "module": site["module"],
        "rule": site["rule"],
        "form": site.get("form"),
        "choice": site["choice"],
        "fabric": site["fabric"],
        "algorithm": _algorithm(site),
        "parameters": _parameters(site),
        "lowerings": _lowerings(site),
        "unfused_us": site["unfused_us"],
        "predicted_us": site["predicted_us"],
        "rejected": _codes(site.get("rejected")),
        "alternatives": [[_named(each), each["predicted_us"]] for each in site["alternatives"]],
    }


def _named(candidate: Record) -> str:
    """Everything of an alternative but its time, in one line."""
    parameters = " ".join(f"{name}={rounded(value)}" for name, value in _parameters(candidate).items())
    table = " ".join("/".join(map(str, row)) for row in _lowerings(candidate))
    words = (candidate["choice"], candidate["fabric"], _algorithm(candidate))
    return " | ".join((" ".join(words), parameters, table, " ".join(_codes(candidate["rejected"]))))


def _codes(rejections: Sequence[Record] | None) -> list[str]:
    return [each["code"] for each in rejections or ()]
