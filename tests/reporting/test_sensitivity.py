"""What would change a decision: exact boundaries by token count, and constants of the machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weaveopt import cost_model
from weaveopt.config import resolve
from weaveopt.fabrics import topology
from weaveopt.pipeline.decide import decide
from weaveopt.records.candidate import Rejection
from weaveopt.records.report import Decision, GraphReport, Sensitivity, Stretch
from weaveopt.records.site import Product, Site, Workload
from weaveopt.reporting import sections
from weaveopt.reporting.constants import changes
from weaveopt.reporting.sensitivity import in_a_chain, sensitivities, stretches, words
from weaveopt.rewrites import RULES, names
from weaveopt.rule import Context

RULE = "all_reduce_rms_norm"


def _winner(tokens: int) -> str:
    return "mail" if tokens < 25 else "bulk" if tokens < 1408 else "leave" if tokens < 6000 else "bulk"


@pytest.mark.parametrize("asked", [1, 24, 25, 700, 1407, 1408, 6000, 100_000])
def test_boundaries_are_exact_wherever_one_asks_from(asked: int) -> None:
    expected = (Stretch(1, "mail"), Stretch(25, "bulk"), Stretch(1408, "leave"), Stretch(6000, "bulk"))
    assert stretches(_winner, asked, 100_000) == expected


def test_a_stretch_inside_one_step_is_seen_from_within() -> None:
    def winner(tokens: int) -> str:
        return "odd" if 40_003 <= tokens < 40_009 else "even"

    assert stretches(winner, 40_005, 60_000) == (Stretch(1, "even"), Stretch(40_003, "odd"), Stretch(40_009, "even"))
    assert stretches(winner, 10, 60_000) == (Stretch(1, "even"),)
    assert stretches(lambda _: "always", 5, 1) == (Stretch(1, "always"),)


def _context(machine: str, world: int, **options: tuple[str, ...]) -> Context:
    known = cost_model.load(machine)
    return Context(resolve(options, rules=names()), known, {"0": topology.fake(world, device=known.device)})


def _site(tokens: int, world: int) -> Site:
    product = Product(tokens, 1024, 8192)
    workload = Workload(tokens, tokens, 8192, "bfloat16", world, product=product, sum_may_shard=True)
    return Site("site", RULE, "0", "model.layers.0.mlp.down_proj", ("all_reduce",), workload)


def _decided(site: Site, context: Context) -> Decision:
    return decide(in_a_chain(site), RULES, context)[0]


def _found(tokens: int, world: int, context: Context) -> tuple[Sensitivity, Context]:
    graph = GraphReport("g", "prefill", tokens, (_decided(_site(tokens, world), context),))
    (found,) = sensitivities(graph, RULES, context)
    return found, context


@pytest.mark.parametrize(("machine", "world"), [("h100x8", 8), ("h200x4", 4), ("cpu", 2)])
def test_every_stretch_is_what_the_step_decides(machine: str, world: int) -> None:
    found, context = _found(2048, world, _context(machine, world))
    assert found.stretches[0].tokens == 1
    for before, stretch in zip((None, *found.stretches), found.stretches, strict=False):
        assert words(_decided(_site(stretch.tokens, world), context).chosen) == stretch.choice
        if before is not None:
            assert before.choice != stretch.choice
            assert words(_decided(_site(stretch.tokens - 1, world), context).chosen) == before.choice
    holding = [stretch for stretch in found.stretches if stretch.tokens <= 2048]
    assert holding[-1].choice == found.choice == words(_decided(_site(2048, world), context).chosen)


def test_gpus_have_several_stretches() -> None:
    found, _ = _found(2048, 4, _context("h200x4", 4))
    assert len(found.stretches) >= 3
    assert found.stretches[0].choice == f"{RULE} peer one_shot mail"


def test_a_constant_that_turns_the_choice_is_named() -> None:
    found, context = _found(2048, 8, _context("h100x8", 8))
    assert found.choice == f"{RULE} multimem two_shot direct"
    constants = dict(found.constants)
    assert constants["relative_error ×2"] == "leave"
    assert constants["fabrics.multimem bandwidth -20 %"] == "leave"
    assert constants["fabrics.multimem bandwidth +25 %"] == found.choice
    doubtful = replace(context.machine, relative_error=2 * context.machine.relative_error)
    assert words(_decided(_site(2048, 8), replace(context, machine=doubtful)).chosen) == "leave"


def test_each_change_changes_one_constant() -> None:
    machine = cost_model.load("h200x4")
    found = dict(changes(machine, "bfloat16"))
    assert len(found) == len({changed.name for changed in found.values()}) == 4 * len(machine.fabric_costs) + 6
    assert not any(name.startswith("inter_host") for name in found)
    assert len(dict(changes(machine, "bfloat16", hosts=2))) == len(found) + 4
    for name, changed in found.items():
        back = replace(changed, name=machine.name)
        assert back != machine, name
        block = name.split(" ")[0].split(".")[0]
        kept = {"fabrics": "fabric_costs", "relative_error": "relative_error"}.get(block, block)
        assert replace(back, **{kept: getattr(machine, kept)}) == machine, name


def test_a_measured_curve_is_slowed_as_the_model_reads_it() -> None:
    machine = cost_model.load("h100x8")
    (before,) = next(costs.curves for costs in machine.fabric_costs if costs.fabric.value == "library")
    found = dict(changes(machine, "bfloat16"))

    def curve(name: str) -> list[float]:
        costs = next(c for c in found[f"fabrics.library {name}"].fabric_costs if c.fabric.value == "library")
        return [point.us for point in costs.curves[0].points]

    us = [point.us for point in before.points]
    assert curve("latency ×2") == pytest.approx([each + us[0] for each in us])
    assert curve("bandwidth -20 %") == pytest.approx([us[0] + (each - us[0]) / 0.8 for each in us])


def test_sites_of_one_workload_are_asked_once_and_refused_ones_never() -> None:
    context = _context("h200x4", 4)
    decision = _decided(_site(512, 4), context)
    twin = replace(decision, site=replace(decision.site, id="twin", count=9))
    refused = replace(
        decision, site=replace(decision.site, id="no", rejections=(Rejection("dtype_changes", "not supported"),))
    )
    unread = replace(decision, site=replace(decision.site, id="unread", workload=None))
    (found,) = sensitivities(GraphReport("g", "prefill", 512, (decision, refused, twin, unread)), RULES, context)
    assert found.sites == ("site", "twin")


def test_a_choice_that_rests_on_another_site_is_left_out() -> None:
    context = _context("h200x4", 4)
    decision = _decided(_site(512, 4), context)
    assert decision.rewritten
    overlapped = replace(decision, chosen=decision.alternatives[0])
    assert sensitivities(GraphReport("g", "prefill", 512, (overlapped,)), RULES, context) == ()


def test_disabled_rules_stay_disabled() -> None:
    found, _ = _found(512, 4, _context("h200x4", 4, disable=(RULE,)))
    assert found.stretches == (Stretch(1, "leave"),)
    assert set(dict(found.constants).values()) == {"leave"}


def test_the_words_show_the_neighbours_of_the_count_decided_for() -> None:
    table = tuple(
        Stretch(tokens, f"{RULE} peer {kernel}")
        for tokens, kernel in ((1, "a"), (10, "b"), (20, "c"), (30, "d"), (40, "e"), (5000, "f"))
    )
    constants = (("memory bandwidth -20 %", f"{RULE} peer d"), ("relative_error ×2", "leave"))
    found = Sensitivity(("s",), 39, f"{RULE} peer d", table, constants)
    assert sections.sensitivity_lines(found) == (
        "tokens: … from 10 peer b; from 20 peer c; from 30 peer d (here: 39); from 40 peer e; from 5,000 peer f",
        "constants: leave with relative_error ×2 (1 of 2 changes turn it)",
    )
    first = replace(found, tokens=3, choice=f"{RULE} peer a", constants=constants[:1])
    assert sections.sensitivity_lines(first)[0] == (
        "tokens: up to 9 peer a (here: 3); from 10 peer b; from 20 peer c …"
    )
    steady = Sensitivity(("s",), 3, "leave", (Stretch(1, "leave"),), (("relative_error ×2", "leave"),))
    assert sections.sensitivity_lines(steady) == (
        "tokens: at every count leave (here: 3)",
        "constants: none of 1 changes turns it (the JSON report lists them)",
    )
