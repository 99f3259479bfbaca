"""Which variant is taken, at which token counts, and why the others are not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.graphs import toys
from weaveopt.cost_model import Interval, Schedule
from weaveopt.pipeline.choose import choose
from weaveopt.pipeline.decide import DecidedGraph
from weaveopt.pipeline.timeline import Timeline
from weaveopt.records.candidate import Rejection
from weaveopt.records.price import Price, PriceSource
from weaveopt.records.report import Regime
from weaveopt.records.task import Stream, Task

CONTEXT = toys.context(replace(toys.exact(), relative_error=0.1))


def lasting(us: float, upper_us: float | None = None, error: float = 0.0) -> Timeline:
    pair = frozenset() if upper_us is None else frozenset({(Stream.COMPUTE, Stream.COMMUNICATION)})
    upper = Schedule((Interval(0.0, us if upper_us is None else upper_us),))
    price = Price.read(us, object(), error, PriceSource.MEASURED)
    return Timeline((Task(us),), Schedule((Interval(0.0, us),), pair), upper, (price,))


def decided(us: float | None, name: str = "captured", rule: str = "", upper_us: float | None = None) -> DecidedGraph:
    graph = toys.Graph()
    found = toys.decided(graph, toys.rules(toys.Toy()), CONTEXT)
    captured = replace(found.priced.captured, variant=name, rule=rule)
    timeline = None if us is None else lasting(us, upper_us, 0.1 if rule else 0.0)
    return replace(found, priced=replace(found.priced, captured=captured), timeline=timeline)


@pytest.mark.parametrize(
    ("variant", "code"),
    [
        (decided(80.0, "fast", "r"), None),
        (decided(95.0, "fast", "r"), "no_saving"),
        (decided(None, "fast", "r"), "not_priced"),
        (decided(80.0, "fast", "r", upper_us=120.0), "not_measured"),
        (decided(80.0, "fast", "r", upper_us=85.0), None),
        (decided(105.0, "fast", "r", upper_us=120.0), "no_saving"),
    ],
)
def test_a_variant_has_to_save_more_than_the_error(variant: DecidedGraph, code: str | None) -> None:
    chosen = choose([decided(100.0), variant], (), (None, None), CONTEXT)
    assert chosen.best.priced.captured.variant == ("fast" if code is None else "captured")
    assert [why.code for why in chosen.compared[1].rejections] == ([] if code is None else [code])


def test_the_captured_graph_counts_by_its_lower_bound() -> None:
    """Overlap of the captured graph that nobody measured may hide all that it could."""
    chosen = choose([decided(80.0, upper_us=120.0), decided(90.0, "fast", "r")], (), (None, None), CONTEXT)
    assert chosen.best.priced.captured.variant == "captured"


def test_of_several_the_fastest_is_taken_and_each_other_one_has_its_reason() -> None:
    why = Rejection("nothing_exposed", "no communication is exposed")
    refused = replace(decided(1.0, "refused", "s").priced.captured, rejections=(why,))
    graphs = [decided(100.0), decided(80.0, "a", "r"), decided(70.0, "b", "r"), decided(99.0, "c", "r")]
    chosen = choose(graphs, (refused,), (None,) * 4, CONTEXT)
    assert chosen.best.priced.captured.variant == "b"
    codes = {each.name: [reason.code for reason in each.rejections] for each in chosen.compared}
    assert codes == {
        "captured": [], "a": ["slower_variant"], "b": [], "c": ["no_saving"], "refused": ["nothing_exposed"],
    }  # fmt: skip


def test_a_forced_variant_is_taken_whatever_it_costs() -> None:
    forced = toys.context(CONTEXT.machine, force=("r",))
    chosen = choose([decided(100.0), decided(400.0, "slow", "r")], (), (None, None), forced)
    assert chosen.best.priced.captured.variant == "slow"


def test_a_variant_serves_only_counts_at_which_it_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The captured graph takes 100 us at any count, the variant as many as tokens: it wins up to 90."""
    graphs = [decided(100.0), decided(40.0, "fast", "r")]
    for index, each in enumerate(graphs):
        graphs[index] = replace(each, priced=replace(each.priced, captured=replace(each.priced.captured, tokens=40)))

    def at(graph: DecidedGraph, tokens: int) -> Timeline:
        return lasting(100.0) if graph.priced.captured.variant == "captured" else lasting(float(tokens), error=0.1)

    monkeypatch.setattr("weaveopt.pipeline.choose.timeline_at", at)
    monkeypatch.setattr("weaveopt.pipeline.choose.exchanged_rows", lambda sites: [(64, "float32")])
    monkeypatch.setattr("weaveopt.cost_model.token_grid", lambda *_: tuple(range(1, 513)))
    regimes = (Regime(1, 512), Regime(8, None))
    assert choose(graphs, (), regimes, CONTEXT).regime == Regime(8, 90)
    slower = [graphs[0], replace(graphs[1], timeline=lasting(200.0))]
    monkeypatch.setattr(
        "weaveopt.pipeline.choose.timeline_at",
        lambda graph, tokens: (
            lasting(100.0) if graph.priced.captured.variant == "captured" else lasting(5.0 * tokens, error=0.1)
        ),
    )
    found = choose(slower, (), regimes, CONTEXT)
    assert found.best.priced.captured.variant == "captured" and found.regime == Regime(19, 512)
