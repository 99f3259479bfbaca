"""Sensitivity of a decision: exact boundaries by token count, and constants of the machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.graphs import toys
from tests.graphs.reductions import Reductions
from tests.graphs.toys import Offer
from tests.graphs.traces import context_of, framed, traced_chain
from weaveopt import cost_model
from weaveopt.pipeline.decide import DecidedGraph, decide
from weaveopt.pipeline.machine_changes import changes
from weaveopt.pipeline.price import price
from weaveopt.pipeline.problem import ProblemTemplate
from weaveopt.pipeline.sensitivity import sensitivities, stretches, words
from weaveopt.records.report import ChoiceRange, Decision, Sensitivity
from weaveopt.records.site import TokenCounts
from weaveopt.reporting import sections
from weaveopt.rewrites import RULES
from weaveopt.rule import Context

RULE = "all_reduce_rms_norm"
MIDDLE = 1
"""Index of the middle one of three sites in a row: it reads a sharded residual and may leave its sum sharded."""


def _winner(tokens: int) -> str:
    return "mail" if tokens < 25 else "bulk" if tokens < 1408 else "leave" if tokens < 6000 else "bulk"


@pytest.mark.parametrize("asked", [1, 24, 25, 700, 1407, 1408, 6000, 100_000])
def test_boundaries_are_exact_wherever_one_asks_from(asked: int) -> None:
    expected = (ChoiceRange(1, "mail"), ChoiceRange(25, "bulk"), ChoiceRange(1408, "leave"), ChoiceRange(6000, "bulk"))
    assert stretches(_winner, asked, 100_000) == expected


def test_a_stretch_inside_one_step_is_seen_from_within() -> None:
    def winner(tokens: int) -> str:
        return "odd" if 40_003 <= tokens < 40_009 else "even"

    assert stretches(winner, 40_005, 60_000) == (
        ChoiceRange(1, "even"),
        ChoiceRange(40_003, "odd"),
        ChoiceRange(40_009, "even"),
    )
    assert stretches(winner, 10, 60_000) == (ChoiceRange(1, "even"),)
    assert stretches(lambda _: "always", 5, 1) == (ChoiceRange(1, "always"),)


def _context(machine: str, world: int, **options: tuple[str, ...]) -> Context:
    known = cost_model.load(machine)
    return context_of(traced_chain([1024], world=world), known, world, **options)


def _decided(tokens: int, world: int, context: Context, asked: int = 0) -> DecidedGraph:
    """A chain of three sites, captured with `tokens` and decided for `asked`."""
    captured = traced_chain([1024] * 3, tokens, 8192, world)
    frame = framed(captured, context)
    counts = dict.fromkeys(range(3), TokenCounts(asked)) if asked else {}
    return decide(price(captured, frame, frame.problem(counts), context), RULES, context)


def _middle(decided: DecidedGraph) -> Decision:
    return decided.decisions[MIDDLE]


def _found(tokens: int, world: int, context: Context) -> Sensitivity:
    decided = _decided(tokens, world, context)
    (found,) = (each for each in sensitivities(decided, context) if _middle(decided).site.id in each.sites)
    return found


@pytest.mark.parametrize(("machine", "world"), [("h100x8", 8), ("h200x4", 4), ("cpu", 2)])
def test_every_stretch_is_what_the_step_decides(machine: str, world: int) -> None:
    context = _context(machine, world)
    decided = _decided(2048, world, context)
    assert len(sensitivities(decided, context)) == 2, "the last one's sum is not read"
    found = _found(2048, world, context)

    def choice_at(tokens: int) -> str:
        return words(_middle(_decided(2048, world, context, tokens)).chosen)

    assert found.stretches[0].tokens == 1
    for before, stretch in zip((None, *found.stretches), found.stretches, strict=False):
        assert choice_at(stretch.tokens) == stretch.choice
        if before is not None:
            assert before.choice != stretch.choice
            assert choice_at(stretch.tokens - 1) == before.choice
    holding = [stretch for stretch in found.stretches if stretch.tokens <= 2048]
    assert holding[-1].choice == found.choice == words(_middle(decided).chosen)


def test_gpus_have_several_stretches() -> None:
    found = _found(2048, 4, _context("h200x4", 4))
    assert len(found.stretches) >= 3
    assert found.stretches[0].choice == f"{RULE} peer one_shot ll_packet"


def test_a_constant_that_turns_the_choice_is_named() -> None:
    context = _context("h100x8", 8)
    found = _found(2048, 8, context)
    assert found.choice == f"{RULE} multimem two_shot direct"
    constants = dict(found.constants)
    assert constants["relative_error ×2"] == "leave"
    assert constants["fabrics.multimem bandwidth -20 %"] == "leave"
    assert constants["fabrics.multimem bandwidth +25 %"] == found.choice
    doubtful = replace(context.machine, relative_error=2 * context.machine.relative_error)
    assert words(_middle(_decided(2048, 8, replace(context, machine=doubtful))).chosen) == "leave"


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
    (before,) = next(c.curves_of("all_reduce") for c in machine.fabric_costs if c.fabric.value == "library")
    found = dict(changes(machine, "bfloat16"))

    def curve(name: str) -> list[float]:
        costs = next(c for c in found[f"fabrics.library {name}"].fabric_costs if c.fabric.value == "library")
        return [point.us for point in costs.curves_of("all_reduce")[0].points]

    us = [point.us for point in before.points]
    assert curve("latency ×2") == pytest.approx([each + us[0] for each in us])
    assert curve("bandwidth -20 %") == pytest.approx([us[0] + (each - us[0]) / 0.8 for each in us])


def test_sites_of_one_kind_are_asked_once_and_refused_ones_never() -> None:
    made = Reductions(512, 8192, 4)
    for refused in (False, False, True):
        made.site(made.input(512, 8192), 1024, refused=refused)
    context = context_of(made.captured(), cost_model.load("h200x4"), 4)
    frame = ProblemTemplate(made.captured(), made.sites, RULES, context)
    decided = decide(price(made.captured(), frame, frame.problem(), context), RULES, context)
    (found,) = sensitivities(decided, context)
    assert found.sites == ("s0", "s1")


def test_a_choice_that_the_count_alone_does_not_give_is_left_out() -> None:
    """The reported decision is another one than the step makes for that count: nothing is said of it."""
    context = _context("h200x4", 4)
    decided = _decided(512, 4, context)
    assert _middle(decided).rewritten
    left = tuple(replace(each, chosen=each.alternatives[0]) for each in decided.decisions)
    assert sensitivities(replace(decided, decisions=left), context) == ()


def test_sites_with_as_many_tokens_change_together() -> None:
    """Two sites that only pay together are both asked about at every count."""
    graph = toys.chain([[Offer(-5.0, shared_us=10.0)], [Offer(-1.0)]])
    context = toys.context(toys.exact())
    decided = toys.decided(graph, toys.rules(toys.Chained()), context)
    assert [d.rewritten for d in decided.decisions] == [True, True]
    found = sensitivities(decided, context)
    assert [each.sites for each in found] == [("s0",), ("s1",)]
    assert {each.choice for each in found} == {"chained shm"}
    assert all(stretch.choice in ("chained shm", "leave") for each in found for stretch in each.stretches)
    assert found[0].stretches == found[1].stretches


def test_disabled_rules_stay_disabled() -> None:
    found = _found(512, 4, _context("h200x4", 4, disable=RULES.names))
    assert found.stretches == (ChoiceRange(1, "leave"),)
    assert set(dict(found.constants).values()) == {"leave"}


def test_the_words_show_the_neighbours_of_the_count_decided_for() -> None:
    table = tuple(
        ChoiceRange(tokens, f"{RULE} peer {kernel}")
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
    steady = Sensitivity(("s",), 3, "leave", (ChoiceRange(1, "leave"),), (("relative_error ×2", "leave"),))
    assert sections.sensitivity_lines(steady) == (
        "tokens: at every count leave (here: 3)",
        "constants: none of 1 change turns it (the JSON report lists them)",
    )
