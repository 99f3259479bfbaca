"""A few of the recorded cases: the same choices, kernels and parameters as in the record."""

from __future__ import annotations

from tests.golden import cases, compare, predictions, record, store
from tests.graphs.nonempty import some
from tests.graphs.preview import without_sensitivity

BLOCKS = ("block:chain, any number of tokens, 512 first, h200x4", "block:fp8 torchao_rows, forced, h200x4")

SENSITIVE = (f"{cases.FAMILY}gemma3_text", f"{cases.FAMILY}gpt_oss-ep")
"""Families whose cases say what would change their choices too, which is no choice itself."""


def test_choices_are_those_of_the_record() -> None:
    named = record.blocks()
    shown = [line for line in cases.QUICK if any(family in line for family in SENSITIVE)]
    new = record.record(shown, {name: named[name] for name in BLOCKS}, say=False)
    with without_sensitivity():
        new |= record.record([line for line in cases.QUICK if line not in shown], {}, say=False)
    stored = store.read(record.FILE)
    found = compare.compare({name: stored[name] for name in new}, new)
    assert len(new) == len(cases.QUICK) + len(BLOCKS)
    assert not found.of(compare.Kind.CHOICE), found.text()


def test_a_lost_choice_is_a_difference() -> None:
    stored = store.read(record.FILE)
    name = cases.QUICK[0]
    old = stored[name]
    [graph] = old["graphs"]
    site, *others = graph["sites"]
    slower = {**site, "predicted_us": site["predicted_us"] * 1.02}
    left = {**site, "choice": "leave", "fabric": "library"}
    for changed, kind in ((slower, compare.Kind.TIME), (left, compare.Kind.CHOICE)):
        found = compare.compare({name: old}, {name: {**old, "graphs": [{**graph, "sites": [changed, *others]}]}})
        assert {each.kind for each in found.found} == {kind}, found.text()
    assert not compare.compare({name: old}, {name: old}).found
    missing = compare.compare({name: old}, {name: {**old, "graphs": [{**graph, "sites": others}]}})
    assert missing.of(compare.Kind.CHOICE)


def test_predictions_are_as_good_as_in_the_record() -> None:
    new = predictions.record_all()
    for machine, kinds in some(predictions.read().items()):
        for kind, figures in some((kind, figures) for kind, figures in kinds.items() if "p90" in figures):
            assert new[machine][kind]["mean"] <= figures["mean"] + 0.005, f"{machine} {kind}"
            assert new[machine][kind]["cases"] == figures["cases"], f"{machine} {kind}"
