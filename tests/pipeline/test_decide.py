"""The chosen set is the best one of those that go together; every refusal is kept; ties break alike everywhere."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from tests.graphs import toys
from tests.graphs.toys import Offer
from tests.graphs.uncertain import estimate_of
from weaveopt.pipeline.decide import DecidedGraph
from weaveopt.records.candidate import LEAVE, Candidate, Rejection
from weaveopt.records.report import Decision
from weaveopt.rule import FoundSite, SiteRule

NODE_US = toys.node_us()
RULE = toys.Toy()
REFUSED = Offer(5.0, rejections=(Rejection("no_kernel", "none"),))


def decided(graph: toys.Graph, *others: SiteRule, **settings: object) -> tuple[Decision, ...]:
    known = toys.context(toys.exact(), **settings)
    return toys.decided(graph, toys.rules(RULE, *others), known).decisions


def codes(decision: Decision) -> list[list[str]]:
    return [[reason.code for reason in candidate.rejections] for candidate in decision.alternatives]


@pytest.mark.parametrize("seed", range(40))
def test_the_set_is_the_best_one(seed: int) -> None:
    """Against brute force over all subsets of up to nine sites that share nodes at random."""
    rng = random.Random(seed)
    graph = toys.Graph()
    nodes = [graph.node() for _ in range(8)]
    for _ in range(rng.randint(1, 9)):
        graph.site([Offer(rng.uniform(1.0, 0.9 * NODE_US))], rng.sample(nodes, rng.randint(1, 3)))
    decisions = decided(graph)

    def saving(chosen: tuple[int, ...]) -> float:
        sets = [graph.sites[i].nodes for i in chosen]
        if any(a & b for a, b in itertools.combinations(sets, 2)):
            return -1.0
        return sum(RULE.propose(graph.sites[i], graph.sites[i].site.tokens, known)[0].plan.saves_us for i in chosen)  # type: ignore[attr-defined]

    known = toys.context()
    indices = range(len(graph.sites))
    best = max(saving(s) for size in range(len(indices) + 1) for s in itertools.combinations(indices, size))
    got = tuple(i for i in indices if decisions[i].rewritten)
    assert saving(got) == pytest.approx(best)
    for decision in decisions:
        if not decision.rewritten:
            assert codes(decision) == [["overlaps"]]


def test_a_rewrite_needs_a_saving_and_says_so() -> None:
    graph = toys.Graph()
    graph.site([Offer(-0.01 * NODE_US)])
    (decision,) = decided(graph)
    assert decision.chosen.choice == LEAVE and decision.baseline is not None
    assert decision.baseline.us == pytest.approx(NODE_US) and decision.chosen.estimate == decision.baseline
    (reason,) = decision.alternatives[0].rejections
    assert reason.code == "no_saving" and dict(reason.values)["unfused_us"] == round(NODE_US, 2)


def test_leaving_is_a_candidate_where_a_site_is_rewritten() -> None:
    graph = toys.Graph()
    graph.site([Offer(5.0)])
    (decision,) = decided(graph)
    assert decision.rewritten and decision.alternatives[0] == Candidate(LEAVE, estimate=decision.baseline)


def test_force_overrides_the_model_and_disable_overrides_force() -> None:
    graph = toys.Graph()
    graph.site([Offer(-NODE_US)])
    (forced,) = decided(graph, force=("toy",))
    (disabled,) = decided(graph, force=("toy",), disable=("toy",))
    assert forced.rewritten and forced.saving_us < 0
    assert not disabled.rewritten and disabled.alternatives[0].rejections[0].code == "disabled"


def test_all_reasons_of_all_candidates_are_kept() -> None:
    graph = toys.Graph()
    graph.site([Offer(5.0), REFUSED])
    (decision,) = decided(graph, disable=("toy",))
    assert codes(decision) == [["disabled"], ["no_kernel", "disabled"]]


def test_a_site_that_was_not_matched_keeps_its_reasons() -> None:
    """No rule is asked; the reasons stand at the site itself."""
    graph, reason = toys.Graph(), Rejection("no_norm_follows", "nothing", (("node", "add"),))
    found = graph.site([Offer(5.0)])
    graph.sites = [FoundSite(replace(found.site, rejections=(reason,)), found.nodes)]
    RULE.asked.clear()
    (decision,) = decided(graph)
    assert decision.chosen.choice == LEAVE and decision.alternatives == () and decision.site.rejections == (reason,)
    assert decision.baseline is not None and decision.baseline.us == pytest.approx(NODE_US)
    assert RULE.asked == []


def test_ties_go_to_the_earlier_site() -> None:
    graph = toys.Graph()
    node = graph.node()
    graph.site([Offer(5.0)], [node])
    graph.site([Offer(5.0)], [node])
    assert [row.rewritten for row in decided(graph)] == [True, False]


def test_two_rules_at_one_place_are_two_candidates_of_one_site() -> None:
    """The cheaper one wins, whichever is registered first; of equal ones the first."""
    other = toys.Toy("other", error=0.5)
    for rule_set in (toys.rules(RULE, other), toys.rules(other, RULE)):
        graph = toys.Graph()
        graph.site([Offer(0.8 * NODE_US)])
        (decision,) = toys.decided(graph, rule_set, toys.context(toys.exact())).decisions
        assert decision.chosen.choice == "toy", "the other one is charged its error"
        assert [c.choice for c in decision.alternatives] == [LEAVE, "other"]
        assert codes(decision)[1] == ["slower_candidate"]


def test_rules_are_asked_only_about_kinds_that_they_know() -> None:
    graph, other = toys.Graph(), toys.Toy("other", kinds=frozenset({"mixture"}))
    graph.site([Offer(5.0)])
    (decision,) = decided(graph, other)
    assert decision.chosen.choice == "toy" and [c.choice for c in decision.alternatives] == [LEAVE]
    assert other.asked == []


def test_what_a_candidate_leaves_in_place_is_part_of_its_estimate() -> None:
    graph = toys.Graph()
    first, second = graph.node(), graph.node()
    graph.site([Offer(5.0, consumes=frozenset([first]))], [first, second])
    (decision,) = decided(graph)
    assert decision.baseline is not None and decision.baseline.us == pytest.approx(2 * NODE_US)
    assert decision.rewritten and decision.saving_us == pytest.approx(5.0)
    assert decision.chosen.estimate is not None
    assert [term.name for term in decision.chosen.estimate.terms] == ["memory", "all"]
    assert decision.chosen.estimate.us == pytest.approx(2 * NODE_US - 5.0)


def test_a_candidate_may_not_take_other_nodes() -> None:
    graph = toys.Graph()
    graph.site([Offer(5.0, consumes=frozenset([graph.node()]))], [graph.node()])
    with pytest.raises(AssertionError, match="takes other nodes"):
        decided(graph)


def test_candidates_that_take_different_nodes_of_two_sites_go_together() -> None:
    """Sites may share a node; only what would replace it twice excludes each other."""
    graph = toys.Graph()
    a, b, c = graph.node(), graph.node(), graph.node()
    graph.site([Offer(9.0), Offer(5.0, variant="narrow", consumes=frozenset([a]))], [a, b])
    graph.site([Offer(8.0)], [b, c])
    first, second = decided(graph)
    assert (first.chosen.variant, second.rewritten) == ("narrow", True)
    assert codes(first)[1] == ["overlaps"]


def test_a_graph_takes_what_its_kernels_and_decisions_take() -> None:
    graph = toys.Graph()
    graph.site([Offer(5.0)])
    graph.node()
    graph.site([Offer(-5.0)])
    found = toys.decided(graph, toys.rules(RULE), toys.context(toys.exact()))
    assert found.priced.baseline is not None and found.priced.baseline.us == pytest.approx(3 * NODE_US)
    assert found.predicted_us == pytest.approx(3 * NODE_US - 5.0)
    assert [each.found.site.id for each in found.chosen] == ["s0"]
    variant = found.variant
    assert (variant.name, variant.baseline_us, variant.predicted_us) == (
        "captured", found.priced.baseline.us, found.predicted_us
    )  # fmt: skip


@pytest.mark.parametrize("saves_us", [-5.0, 5.0])
def test_nodes_of_two_sites_are_counted_once(saves_us: float) -> None:
    graph = toys.Graph()
    a, b, c = graph.node(), graph.node(), graph.node()
    graph.site([Offer(saves_us)], [a, b])
    graph.site([], [b, c])
    found = toys.decided(graph, toys.rules(RULE), toys.context(toys.exact()))
    assert found.priced.baseline is not None and found.priced.baseline.us == pytest.approx(3 * NODE_US)
    assert found.predicted_us == pytest.approx(3 * NODE_US - max(saves_us, 0.0))


class Settling(toys.Toy):
    """Says of every site of its own how many are rewritten."""

    def settle(self, chosen: object, context: object) -> object:
        rows = [each for each in chosen if each.proposal.candidate.choice == self.name]  # type: ignore[attr-defined]
        return {
            each.found.site.id: replace(
                each.proposal, candidate=replace(each.proposal.candidate, notes=(f"of {len(rows)}",))
            )
            for each in rows
        }


def test_a_rule_settles_its_own_sites_after_the_decision() -> None:
    graph = toys.Graph()
    for saves_us in (5.0, -5.0, 5.0):
        graph.site([Offer(saves_us)])
    found: DecidedGraph = toys.decided(graph, toys.rules(Settling()), toys.context(toys.exact()))  # type: ignore[arg-type]
    assert [d.chosen.notes for d in found.decisions] == [("of 2",), (), ("of 2",)]
    assert [each.proposal.candidate.notes for each in found.chosen] == [("of 2",)] * 2


def test_the_best_candidate_is_charged_its_error() -> None:
    graph = toys.Graph()
    graph.site([Offer(0.1 * NODE_US)])
    known = toys.context(toys.exact())
    for error, rewritten in ((0.11, True), (0.12, False)):
        (decision,) = toys.decided(graph, toys.rules(toys.Toy(error=error)), known).decisions
        assert decision.rewritten is rewritten
        estimate = estimate_of(error, ("all", 0.9 * NODE_US))
        offered = decision.chosen if rewritten else decision.alternatives[0]
        assert offered.estimate is not None and offered.estimate.us_with_margin == pytest.approx(
            estimate.us_with_margin
        )


def test_sites_with_equal_facts_and_other_kernels_have_prices_of_their_own() -> None:
    """Facts need not determine all that a site costs as it is: whether the graph reads something of it, say."""
    graph = toys.Graph()
    graph.site([Offer(5.0)], kind="alike")
    graph.site([Offer(5.0)], [graph.node(), graph.node()], kind="alike")
    baselines = [decision.baseline.us for decision in decided(graph) if decision.baseline is not None]
    assert baselines == pytest.approx([NODE_US, 2 * NODE_US])


def test_a_profile_that_only_stands_in_rewrites_nothing_but_what_is_forced() -> None:
    why = Rejection("machine_not_measured", "no profile of this GPU")
    for force, rewritten in ((), False), ((RULE.name,), True):
        graph = toys.Graph()
        graph.site([Offer(0.5 * NODE_US)])
        known = replace(toys.context(toys.exact(), force=force), not_measured=why)
        (decision,) = toys.decided(graph, toys.rules(RULE), known).decisions
        assert decision.rewritten is rewritten
        assert rewritten or codes(decision) == [["machine_not_measured"]]
