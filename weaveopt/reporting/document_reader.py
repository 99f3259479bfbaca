"""The report from its JSON, with the first field that is not as expected named."""

from __future__ import annotations

from typing import TypeVar

from weaveopt.errors import WeaveError
from weaveopt.records.candidate import Algorithm, Candidate, Estimate, Fabric, Form, Lowering, Rejection, Term
from weaveopt.records.memory import BufferPlan, Placement, RegionNeed, Slot
from weaveopt.records.report import (
    Decision,
    Fallback,
    GraphReport,
    MachineSummary,
    Regime,
    Report,
    Sensitivity,
    Stretch,
    Work,
    WorkFailure,
)
from weaveopt.records.site import Product, Site, Workload
from weaveopt.reporting.json_reader import Reader

SCHEMA = 1
"""Raised when a field changes its meaning or goes away; a new field does not raise it."""


def from_json(text: str) -> Report:
    """The report that `to_json` wrote. Raises `WeaveError` naming the first field that is not as expected."""
    root = Reader.of(text)
    schema = root["schema"].integer()
    if schema != SCHEMA:
        raise WeaveError(f"report has schema {schema}; this weaveopt reads schema {SCHEMA}")
    machine = root["machine"]
    return Report(
        model=root["model"].text(),
        world=root["group"]["world"].integer(),
        machine=None
        if machine.missing
        else MachineSummary(machine["name"].text(), machine["measured"].flag(), machine["origins"].values()),
        graphs=tuple(_read_graph(graph) for graph in root["graphs"]),
        fallbacks=_read_fallbacks(root["fallbacks"]),
        notes=root["notes"].texts(),
    )


def _read_graph(graph: Reader) -> GraphReport:
    arena = graph["arena"]
    return GraphReport(
        name=graph["name"].text(),
        phase=graph["phase"].text(),
        tokens=graph["tokens"].integer(),
        decisions=tuple(_read_decision(site) for site in graph["sites"]),
        plans=tuple(
            BufferPlan(
                group=group["group"].text(),
                bytes=group["bytes"].integer(),
                slots=tuple(
                    Slot(slot["offset"].integer(), slot["bytes"].integer(), slot["owners"].texts())
                    for slot in arena["slots"]
                    if slot["group"].text() == group["group"].text()
                ),
                placements=tuple(_read_placement(placement) for placement in group["placements"]),
                fabric=Fabric.SHM if group.optional("fabric").missing else _member(Fabric, group["fabric"]),
                regions=_read_regions(group.optional("regions")),
            )
            for group in arena["groups"]
        ),
        rounding=graph["rounding"].texts(),
        fallbacks=_read_fallbacks(graph["fallbacks"]),
        steps_us=graph["steps_us"].values(),
        work=tuple(map(_read_work, graph.optional_list("work"))),
        work_failure=_read_work_failure(graph.optional("work_failure")),
        sensitivity=tuple(map(_read_sensitivity, graph.optional_list("sensitivity"))),
        regime=_read_regime(graph.optional("regime")),
    )


def _read_regime(regime: Reader) -> Regime | None:
    if regime.missing:
        return None
    end = regime["max_tokens"]
    return Regime(regime["min_tokens"].integer(), None if end.missing else end.integer())


def _read_work(work: Reader) -> Work:
    return Work(
        module=work["module"].text(),
        kind=work["kind"].text(),
        us=work["us"].number(),
        after=work["after"].integer(),
        count=work["count"].integer(),
    )


def _read_work_failure(failure: Reader) -> WorkFailure | None:
    return None if failure.missing else WorkFailure(failure["exception"].text(), failure["message"].text())


def _read_sensitivity(found: Reader) -> Sensitivity:
    return Sensitivity(
        sites=found["sites"].texts(),
        tokens=found["tokens"].integer(),
        choice=found["choice"].text(),
        stretches=tuple(Stretch(row["tokens"].integer(), row["choice"].text()) for row in found["stretches"]),
        constants=found["constants"].values(),
    )


def _read_fallbacks(fallbacks: Reader) -> tuple[Fallback, ...]:
    return tuple(Fallback(f["graph"].text(), f["step"].text(), f["error"].text()) for f in fallbacks)


def _read_regions(regions: Reader) -> RegionNeed | None:
    if regions.missing:
        return None
    return RegionNeed(
        mailbox_bytes=regions["mailbox_bytes"].integer(),
        staging_bytes=regions["staging_bytes"].integer(),
        output_bytes=regions["output_bytes"].integer(),
        partial_bytes=regions["partial_bytes"].integer(),
    )


def _read_lowering(row: Reader) -> Lowering:
    return Lowering(
        max_tokens=row["max_tokens"].integer(),
        algorithm=_member(Algorithm, row["algorithm"]),
        form=_member(Form, row["form"]),
        num_ctas=row["num_ctas"].integer(),
    )


def _read_placement(placement: Reader) -> Placement:
    return Placement(
        site=placement["site"].text(),
        partial_offset=placement["partial_offset"].integer(),
        output_offset=placement["output_offset"].integer(),
        partial_bytes=placement["partial_bytes"].integer(),
        max_tokens=placement["max_tokens"].integer(),
        residual_sharded=placement["residual_sharded"].flag(),
        sum_sharded=placement["sum_sharded"].flag(),
        normed_lands=not (lands := placement.optional("normed_lands")).missing and lands.flag(),
    )


def _read_decision(site: Reader) -> Decision:
    return Decision(
        site=Site(
            id=site["id"].text(),
            rule=site["rule"].text(),
            group=site["group"].text(),
            module=site["module"].text(),
            collectives=site["collectives"].texts(),
            workload=None if site["workload"].missing else _read_workload(site["workload"]),
            form=site["form"].text(),
            rejections=_read_rejections(site["rejected"]),
            count=site["count"].integer(),
        ),
        chosen=_read_candidate(site, rejected_key="choice_rejected"),
        alternatives=tuple(_read_candidate(candidate) for candidate in site["alternatives"]),
        unfused=None
        if site["unfused_terms"].missing
        else Estimate(_read_terms(site["unfused_terms"]), site["unfused_relative_error"].number()),
    )


def _read_workload(workload: Reader) -> Workload:
    product = workload["product"]
    return Workload(
        tokens=workload["tokens"].integer(),
        max_tokens=workload["max_tokens"].integer(),
        hidden=workload["hidden"].integer(),
        dtype=workload["dtype"].text(),
        world=workload["world"].integer(),
        hosts=workload["hosts"].integer(),
        product=None
        if product.missing
        else Product(product["m"].integer(), product["k"].integer(), product["n"].integer()),
        num_partials=workload["num_partials"].integer(),
        num_norms=workload["num_norms"].integer(),
        has_residual=workload["has_residual"].flag(),
        sum_is_used=workload["sum_is_used"].flag(),
        sum_may_shard=workload["sum_may_shard"].flag(),
        out_dtype="" if workload.optional("out_dtype").missing else workload["out_dtype"].text(),
        min_tokens=0 if workload.optional("min_tokens").missing else workload["min_tokens"].integer(),
    )


def _read_candidate(candidate: Reader, rejected_key: str = "rejected") -> Candidate:
    estimate = (
        None
        if candidate["terms"].missing
        else Estimate(_read_terms(candidate["terms"]), candidate["relative_error"].number())
    )
    return Candidate(
        choice=candidate["choice"].text(),
        fabric=_member(Fabric, candidate["fabric"]),
        algorithm=_member(Algorithm, candidate["algorithm"]),
        parameters=candidate["parameters"].values(),
        estimate=estimate,
        rejections=_read_rejections(candidate[rejected_key]),
        lowerings=tuple(map(_read_lowering, candidate.optional_list("lowerings"))),
    )


Member = TypeVar("Member", Fabric, Algorithm, Form)


def _member(kind: type[Member], value: Reader) -> Member:
    try:
        return kind(value.text())
    except ValueError:
        raise WeaveError(
            f"{value.path}: found {value.text()!r}, expected one of {', '.join(m.value for m in kind)}"
        ) from None


def _read_terms(terms: Reader) -> tuple[Term, ...]:
    return tuple(Term(term["name"].text(), term["us"].number()) for term in terms)


def _read_rejections(rejections: Reader) -> tuple[Rejection, ...]:
    return tuple(Rejection(r["code"].text(), r["message"].text(), r["values"].values()) for r in rejections)
