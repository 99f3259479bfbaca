"""The rule `causal_attention` by price: it never makes a site slower, and what is left says that nothing saves."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.graphs.attention_graphs import As, Sizes, attend, ran_each, rows, seen
from tests.graphs.preview import previewed
from weaveopt.records.candidate import LEAVE
from weaveopt.records.report import Decision
from weaveopt.rewrites.causal_attention import rule
from weaveopt.rewrites.causal_attention.candidates import RULE


def _price(sizes: Sizes, machine: str, offset: int = 0, repeated: bool = True) -> Decision:
    def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if repeated:
            return attend(q, k, v, seen(q.shape[2], k.shape[2], offset))
        return rows(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))

    device = "cuda" if machine != "cpu" else "cpu"
    made = sizes.operands(torch.bfloat16)
    report = previewed(compute, made, machine=machine, device=device, force=(), static=True)
    (decision,) = report.decisions
    return decision


@pytest.mark.parametrize("machine", ["cpu", "h200x4", "h100x8"])
def test_never_slower_by_price(machine: str) -> None:
    """A rewritten site is predicted to save more than the model's own error; a site that is left says that nothing
    does."""
    outcomes = set()
    for queries, keys, batch in ((1, 512, 1), (1, 2048, 16), (64, 64, 1), (512, 512, 1), (2048, 2048, 1)):
        for repeated in (True, False):
            sizes = Sizes(batch, 8, 1 if repeated else 8, queries, keys, 64, 64)
            decision = _price(sizes, machine, keys - queries, repeated)
            assert decision.baseline is not None
            estimated = [c for c in (decision.chosen, *decision.alternatives) if c.choice == RULE and c.estimate]
            saving = {c.variant for c in estimated if c.estimate.us_with_margin < decision.baseline.us}  # type: ignore[union-attr]
            codes = {c.variant: [r.code for r in c.rejections] for c in decision.alternatives if c in estimated}
            if decision.rewritten:
                assert decision.chosen.variant in saving
                assert set(map(tuple, codes.values())) <= {("slower_candidate",), ("less_certain",), ("no_saving",)}
            else:
                assert estimated and not saving and set(map(tuple, codes.values())) == {("no_saving",)}, codes
            outcomes.add(decision.rewritten)
    assert outcomes == {True, False}, "some pay, some do not"


def test_forcing_takes_what_does_not_pay() -> None:
    """Or the tests that force the rule would not be about it."""
    operands = Sizes(kv_heads=4).operands(torch.bfloat16)

    def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, causal=True)

    free, forced = ran_each(compute, operands, [As("cpu", force=False), As("cpu")])
    assert free.chosen.choice == LEAVE and free.codes["cpu"] == ["no_saving"]
    assert forced.chosen.choice == RULE and torch.equal(free.result, forced.result)


def test_more_keys_cost_more() -> None:
    times = []
    for keys in (1024, 4096):
        decision = _price(Sizes(8, 8, 1, 1, keys, 128, 128), "h200x4", keys - 1)
        assert decision.rewritten and decision.chosen.estimate is not None
        times.append(decision.chosen.estimate.us)
    assert times[0] < times[1]


def test_a_gpu_host_without_triton_has_no_masked_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the operator would be plain torch."""
    sizes = Sizes(8, 8, 1, 1, 4096, 128, 128)
    assert "no_triton" not in _codes_of_masked(_price(sizes, "h200x4", 4095))
    monkeypatch.setattr(rule, "lacks_triton", lambda: True)
    assert _codes_of_masked(_price(sizes, "h200x4", 4095)) == ["no_triton"]


def _codes_of_masked(decision: Decision) -> list[str]:
    every = (decision.chosen, *decision.alternatives)
    return [r.code for each in every if each.variant == "masked" for r in each.rejections]
