"""A GPU without a profile: attention is decided by timed kernels alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch

import weaveopt
from tests.graphs.batching import compiled, prompts, tokens
from tests.graphs.generating import build
from tests.graphs.nonempty import some
from tests.rewrites.test_causal_attention_prices import Sizes, _price
from weaveopt import backend, cost_model
from weaveopt.autotune import asked_kernels, tune
from weaveopt.autotune.asked_kernels import AskedKernel, AskedPrices
from weaveopt.autotune.device_class import device_class
from weaveopt.autotune.kernel_timing import KernelTimings
from weaveopt.autotune.tune import Tuned
from weaveopt.config import Config
from weaveopt.cost_model.timed import ByProfile, KernelShape, KernelTime
from weaveopt.pipeline.context import GraphContext
from weaveopt.pipeline.problem import ProblemTemplate
from weaveopt.pipeline.token_counts import SymbolicCounts
from weaveopt.records.candidate import LEAVE, Rejection
from weaveopt.records.price import Price, PriceSource
from weaveopt.records.report import Decision
from weaveopt.records.site import TokenCounts
from weaveopt.rewrites.causal_attention.candidates import RULE
from weaveopt.rule import CapturedGraph, Context, FoundSite, RuleSet

SIZES = Sizes(8, 8, 1, 1, 4096, 128, 128)
"""A decode step that the rule rewrites wherever there is a profile."""
WHY = Rejection("machine_not_measured", "no profile of this GPU")


@dataclass(frozen=True)
class Times:
    """Table of kernels that take as long as the profile says; that of the site as it is so many times that."""

    share: float = 1.0
    only: tuple[str, ...] = ("gemm", "bmm", "attention")

    def has(self, shape: KernelShape) -> bool:
        return shape.kernel.startswith(self.only)

    def slowdown(self, kernel: str, by_profile: Callable[[KernelShape], float]) -> float:
        return 1.0

    def us(self, shape: KernelShape, by_profile: ByProfile) -> float:
        us = by_profile(shape.size)
        if not shape.kernel.startswith(self.only):
            return us
        repeated = "8x8x8x128" in str(shape)
        return Price.read(float(us) * (self.share if repeated else 1.0), shape, 0.02, PriceSource.TIMED)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> list[Times]:
    """The table of the next compile; empty: nothing was timed."""
    found: list[Times] = []
    real = backend.context

    def stand_in(captured: CapturedGraph, *arguments: object) -> GraphContext:
        made = real(captured, *arguments)  # type: ignore[arg-type]
        machine = replace(made.context.machine, stands_in=True)
        return replace(made, context=replace(made.context, machine=machine, not_measured=WHY))

    def tuned(*_: object) -> Tuned:
        return Tuned(times=found[0]) if found else Tuned()  # type: ignore[arg-type]

    monkeypatch.setattr(backend, "context", stand_in)
    monkeypatch.setattr(backend, "tune", tuned)
    return found


def codes(decision: Decision) -> set[str]:
    every: Iterable[Rejection] = (why for each in decision.alternatives for why in each.rejections)
    return {why.code for why in every}


def test_nothing_timed_leaves_it(times: list[Times]) -> None:
    decision = _price(SIZES, "h200x4", 4095)
    assert decision.chosen.choice == LEAVE and "machine_not_measured" in codes(decision)


def test_timed_kernels_decide(times: list[Times]) -> None:
    times.append(Times())
    decision = _price(SIZES, "h200x4", 4095)
    assert decision.chosen.choice == RULE and "machine_not_measured" not in codes(decision)
    assert decision.saving_us > decision.saving_error_us > 0.0
    times[0] = Times(share=0.05)
    assert _price(SIZES, "h200x4", 4095).chosen.choice == LEAVE, "here the library is the faster"


def test_times_of_other_kernels_decide_nothing(times: list[Times]) -> None:
    times.append(Times(only=("fft",)))
    decision = _price(SIZES, "h200x4", 4095)
    assert decision.chosen.choice == LEAVE and "no_saving" in codes(decision)
    [estimate, *_] = some([each.estimate for each in decision.alternatives if each.estimate is not None])
    assert estimate.error_us == pytest.approx(estimate.us)


@pytest.mark.parametrize(
    ("machine", "option", "budget_s"),
    [("h100x2", None, 5.0), ("cpu", None, 0.0), ("h100x2", 3.0, 3.0), ("cpu", 3.0, 3.0), ("h100x2", 0.0, 0.0)],
)
def test_kernels_are_timed_by_default_on_gpus(machine: str, option: float | None, budget_s: float) -> None:
    context = Context(Config(tune_budget_s=option), cost_model.load(machine), {})
    assert tune._most_s(context) == budget_s


@pytest.mark.parametrize(("first", "hint"), [(1, 300), (2, 4096), (40, 40)])
def test_every_count_has_a_timed_one_next_to_it(monkeypatch: pytest.MonkeyPatch, first: int, hint: int) -> None:
    """On GPUs without a profile, and in no more steps than that takes; on others three counts are timed."""
    symbolic = SymbolicCounts(hint, {}, first, None, 1, False)
    monkeypatch.setattr(asked_kernels, "symbolic_counts", lambda *_: symbolic)
    monkeypatch.setattr(asked_kernels, "tokens_at", lambda _, sites, tokens: {0: TokenCounts(tokens)})
    known = Context(Config(), cost_model.load("h100x8"), {})
    unknown = replace(known, machine=replace(known.machine, stands_in=True))
    timed = {}
    for name, context in (("known", known), ("unknown", unknown)):
        found = asked_kernels._counts(mock.Mock(), mock.Mock(), context)
        timed[name] = sorted({hint, *(each.hint for counts in found for each in counts.values())})
    assert len(timed["known"]) <= 3 and len(timed["unknown"]) <= 7
    assert timed["unknown"][0] == first and timed["unknown"][-1] == known.config.max_tokens
    assert all(after <= before * asked_kernels.WIDEST_STEP for before, after in pairwise(timed["unknown"]))


def asked_in_batched_steps(machine: str) -> list[AskedKernel]:
    """Kernels of a batched step of one layer, in the order in which they would be timed."""
    found: list[AskedKernel] = []

    def asked(
        captured: CapturedGraph, sites: Sequence[FoundSite], rules: RuleSet, context: Context, *_: object
    ) -> Tuned:
        prices = AskedPrices(captured, ProblemTemplate(captured, sites, rules, context), context)
        weighed = prices.weighed(prices.kernels(), context.machine.relative_error)
        found.extend(sorted(weighed, key=lambda each: each.worth, reverse=True))
        return Tuned()

    torch._dynamo.reset()
    model = build("llama", num_hidden_layers=1, head_dim=64).to(torch.bfloat16)
    with mock.patch.object(backend, "tune", asked):
        tokens(model, prompts(12), compiled({"machine": machine, "strict": True, "disable": ["merged_gemm"]}), new=2)
    return found


def test_kernels_that_decide_are_timed_before_others(times: list[Times]) -> None:
    """Without a time a kernel of which nothing is known is never chosen, however short it is."""
    found = asked_in_batched_steps("h100x8")
    decisive = [each for each in found if each.loss_us > 0.0]
    assert [each.shape.kernel.split()[1] for each in decisive] == ["paged", "masked", "sdpa"]
    assert decisive == found[:3] and decisive == sorted(decisive, key=lambda each: each.us)
    assert {each.shape.kernel.split()[0] for each in found[3:]} == {"gemm", "attention"}
    assert not any(each.is_known for each in found)


@pytest.mark.parametrize("left", ["", "sdpa", "paged"])
def test_a_step_is_decided_by_what_was_timed(
    times: list[Times], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, left: str
) -> None:
    """Without the time of the site as it is nothing is chosen, without that of a kernel not that kernel."""
    taken_us = {"paged": 50.0, "masked": 900.0, "sdpa": 1500.0}

    def timed(kernels: Sequence[AskedKernel], device: torch.device, budget_s: float, _: int) -> KernelTimings:
        assert device.type == "cuda" and 0.0 < budget_s <= tune.GPU_BUDGET_S
        rows = [(each, each.shape.kernel.split()[1:2]) for each in kernels]
        found = [(each, taken_us[name[0]] if name else each.us) for each, name in rows if name != [left]]
        return KernelTimings(tuple(KernelTime(each.shape, us, 0.01) for each, us in found))

    monkeypatch.setattr(backend, "tune", tune.tune)
    monkeypatch.setattr(tune, "time_kernels", timed)
    monkeypatch.setattr(tune, "_against", lambda *_: None)
    monkeypatch.setattr(tune, "runs_on_gpu", lambda _: True)
    monkeypatch.setattr(tune, "device_class", lambda *_: device_class("cpu", 1))
    options = {
        "machine": "h100x8", "strict": True, "tune_budget_s": tune.GPU_BUDGET_S, "tune_cache": str(tmp_path),
        "disable": ["merged_gemm"],
    }  # fmt: skip
    torch._dynamo.reset()
    model = build("llama", num_hidden_layers=1, head_dim=64).to(torch.bfloat16)
    assert len(tokens(model, prompts(12), compiled(options), new=2)) == 12
    [graph] = weaveopt.report(model).graphs
    [decision] = [each for each in graph.decisions if each.site.kind == "attention"]
    assert decision.chosen.variant == {"": "paged", "sdpa": "", "paged": "masked"}[left]
    assert {each.kernel.split()[1] for each in graph.kernels} & {"paged", "sdpa"} == {"paged", "sdpa"} - {left}


@pytest.mark.parametrize("only", [("attention",), ("attention sdpa",)])
def test_a_paged_cache_is_read_by_request_once_that_was_timed(times: list[Times], only: tuple[str, ...]) -> None:
    """No profile but those of two GPUs has times of that kernel."""
    times.append(Times(only=only))
    model = build("llama", num_hidden_layers=1, head_dim=64).to(torch.bfloat16)
    torch._dynamo.reset()
    assert (
        len(
            tokens(
                model, prompts(12), compiled({"machine": "h100x8", "strict": True, "disable": ["merged_gemm"]}), new=2
            )
        )
        == 12
    )
    [graph] = weaveopt.report(model).graphs
    [decision] = [each for each in graph.decisions if each.site.kind == "attention"]
    if len(only[0].split()) > 1:
        assert decision.chosen.variant != "paged" and "not_measured" in codes(decision)
    else:
        assert decision.chosen.variant == "paged" and "not_measured" not in codes(decision)
