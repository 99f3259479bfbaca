"""Sequence-parallel sites in a report: if left, they change nothing of the others; if taken, they are as any."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce

from tests.graphs.functional_collectives import all_gather_single, reduce_scatter_single
from tests.graphs.preview import fake_group
from weaveopt import cost_model
from weaveopt.config import Config
from weaveopt.fabrics import topology
from weaveopt.preview import preview
from weaveopt.records.report import GraphReport, Report
from weaveopt.reporting import why
from weaveopt.rewrites import RULES
from weaveopt.rule import RuleSet
from weaveopt.sites import MATCHERS, SEQUENCE_PARALLEL

WORLD = 2


def layer(x: Tensor, up: Tensor, down: Tensor, out: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    hidden = all_gather_single(x, 0, dist.group.WORLD) @ up
    total = x + reduce_scatter_single(hidden.relu() @ down, "sum", 0, dist.group.WORLD)
    rows = torch.nn.functional.rms_norm(total, (total.shape[-1],), weight, 1e-5)
    summed = rows + all_reduce(rows @ out, "sum", dist.group.WORLD)
    return total, torch.nn.functional.rms_norm(summed, (total.shape[-1],), weight, 1e-5)


INPUTS = tuple(torch.zeros(*sizes) for sizes in ((32, 64), (64, 128), (128, 64), (64, 64), (64,)))


def reported(rules: RuleSet) -> GraphReport:
    torch._dynamo.reset()
    reports: list[GraphReport] = []
    with fake_group(WORLD), torch.no_grad():
        seen = preview(Config(), topology.fake(WORLD), cost_model.load("cpu"), reports.append, rules)
        torch.compile(layer, backend=seen, fullgraph=True)(*INPUTS)
    [report] = reports
    assert not report.fallbacks and report.work_failure is None
    return report


def without_their_rules() -> RuleSet:
    kinds = {matcher.kind for matcher in SEQUENCE_PARALLEL}
    return replace(RULES, site_rules=tuple(rule for rule in RULES.site_rules if not rule.kinds & kinds))


def test_every_kind_has_a_matcher_and_a_rule() -> None:
    known = {kind for rule in RULES.site_rules for kind in rule.kinds}
    assert {matcher.kind for matcher in MATCHERS} == known


def test_a_report_without_a_rule_for_them() -> None:
    """They are left, priced as they are; the decision of the other site, and the whole time, stay the same."""
    bare = without_their_rules()
    full = reported(bare)
    plain = reported(replace(bare, matchers=tuple(each for each in MATCHERS if each not in SEQUENCE_PARALLEL)))
    by_kind = {decision.site.kind: decision for decision in full.decisions}
    assert [decision.site.kind for decision in full.decisions] == ["all_gather", "reduce_scatter", "reduction"]
    [alone] = plain.decisions
    assert alone == by_kind["reduction"]
    for kind in ("all_gather", "reduce_scatter"):
        decision = by_kind[kind]
        assert decision.chosen.choice == "leave" and not decision.alternatives
        assert decision.baseline is not None and decision.baseline.us > 0
    shown = why.text(Report("toy", WORLD, None, (full,)), "reduce_scatter_tensor")
    for words in (
        "kind reduce_scatter",
        "reduce_scatter(gemm, dim=0, 'sum') + residual -> rms_norm",
        "outer 1",
        "m 64",
    ):
        assert words in shown, shown


def test_a_report_with_their_rules() -> None:
    """Chosen by the profile's curves: Gloo's collective and GEMM against the shared arena's."""
    report = reported(RULES)
    by_kind = {decision.site.kind: decision for decision in report.decisions}
    for kind, rule in (("all_gather", "all_gather_gemm"), ("reduce_scatter", "gemm_reduce_scatter")):
        decision = by_kind[kind]
        assert (decision.chosen.choice, decision.chosen.fabric.value) == (rule, "shm"), kind
        assert decision.baseline is not None and decision.chosen.estimate is not None
        terms = {term.name for term in decision.chosen.estimate.terms}
        assert {"gemm", "synchronize"} < terms and decision.chosen.estimate.us_with_margin < decision.baseline.us
        others = {each.fabric.value: [reason.code for reason in each.rejections] for each in decision.alternatives}
        assert "fabric_needs_cuda" in others["peer"] and "fabric_needs_hosts" in others["tcp"], others
