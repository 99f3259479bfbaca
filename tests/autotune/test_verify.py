"""With `verify` the clock decides: profiles that are wrong on purpose, ranks that differ, ranks that fail or die.

How long a candidate takes is the test's to say: what `verify` calls sleeps first, by the operations that it runs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
import torch.fx as fx

from tests.emulation.machines import made_up
from tests.graphs import forms
from tests.graphs.executing import executing
from tests.house.test_toys import LOCAL, chain, chain_inputs, scaled, second_candidate
from tests.house.toys import FastTanh
from tests.ranks import collect, run_ranks
from tests.ranks.tcp_ranks import become_host
from weaveopt import cost_model
from weaveopt.autotune.candidate_run import Call, Make
from weaveopt.autotune.site_timing import forget
from weaveopt.config import Config
from weaveopt.records.candidate import LEAVE
from weaveopt.records.report import Decision, GraphReport
from weaveopt.reporting.document import to_json
from weaveopt.reporting.document_reader import from_json
from weaveopt.reporting.registry import report as live_report
from weaveopt.reporting.text import text
from weaveopt.rewrites import RULES
from weaveopt.rule import RuleSet

FUSED, TOY, BETWEEN_HOSTS = "all_reduce_rms_norm", "library_sum", "hierarchical_all_reduce"
BASE = Config(verify=True, strict=True, timeout_s=20.0, compile_timeout_s=20.0)
ROWS = 8


@dataclass
class Slow:
    """Makes what sleeps so long before it runs: `""` stands for the site as it is. Keeps what it made."""

    delays_s: Mapping[str, float]
    refuses: str = ""
    dies: str = ""
    made: list[str] = field(default_factory=list)

    def __call__(self, module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Call:
        words = " ".join(str(node.target) for node in module.graph.nodes)
        names = {"sum_norm": TOY, "weave.": "fused", "scaled_tanh": "fast_tanh"}
        name = next((known for word, known in names.items() if word in words), "")
        self.made.append(name)
        if name == self.refuses != "":
            raise RuntimeError("no such kernel here")

        def call(values: list[torch.Tensor]) -> object:
            if name == self.dies != "":
                os._exit(3)
            time.sleep(self.delays_s.get(name, 0.0))
            return module(*values)

        return call


@pytest.fixture(autouse=True)
def nothing_was_timed() -> None:
    forget()


def decided(make: Slow, config: Config, rules: RuleSet, rows: int = ROWS) -> Decision:
    return reported(make, config, rules, rows).decisions[0]


def reported(
    make: Make,
    config: Config,
    rules: RuleSet,
    rows: int = ROWS,
    dynamic: bool = False,
    fn: Callable[..., torch.Tensor] = chain,
) -> GraphReport:
    """Report of the only graph of `fn`, whose results are compared with eager."""
    torch._dynamo.reset()
    reports: list[GraphReport] = []
    inputs = chain_inputs(rows)
    for each in (inputs[0], inputs[2]) if dynamic else ():
        torch._dynamo.mark_dynamic(each, 0)
    with torch.no_grad():
        backend = executing(config, reports, rules, make)
        compiled = torch.compile(fn, backend=backend, dynamic=None if dynamic else False)
        torch.testing.assert_close(compiled(*inputs), fn(*inputs), rtol=1e-4, atol=1e-4)
    (report,) = reports
    return report


def measured(decision: Decision) -> dict[str, float]:
    """Measured times of the candidates that were timed, by name."""
    every = [(each.choice, each.estimate) for each in (decision.chosen, *decision.alternatives)]
    return {name: each.measured.us for name, each in [*every, (LEAVE, decision.baseline)] if each and each.measured}


def codes(decision: Decision, choice: str) -> set[str]:
    return {why.code for each in decision.alternatives if each.choice == choice for why in each.rejections}


def wrong_profile(path: Path) -> str:
    """The fused kernel is said to take far longer than the library, which takes 12 ms and up in this test."""
    machine = made_up({1: 100.0, 4096: 100.0}, {1: 90000.0, 4096: 90000.0}, forms.HIDDEN * 4, error=0.02)
    path.write_text(cost_model.dumps(machine))
    return str(path)


def _cases(rank: int, profile: str) -> dict[str, object]:
    config = replace(BASE, machine=profile)
    rules = second_candidate(1.0)  # the toy is said to take 1 us
    slow = Slow({TOY: 0.02, "": 0.012})
    without = decided(slow, replace(config, verify=False), rules)
    assert without.chosen.choice == TOY and slow.made == [] and measured(without) == {}
    report = reported(slow, config, rules)
    first = report.decisions[0]
    assert sorted(slow.made) == sorted(["", TOY, "fused"])
    again = reported(slow, config, rules)
    assert len(slow.made) == 3 and measured(again.decisions[0]) == measured(first), "timed twice"
    assert again.timed == (f"{first.site.id}: 3 candidates, timed before",)
    shown = text(replace(live_report(None), graphs=(report,)))
    assert "verify: " in shown and shown.count("measured") >= 2 and f"{measured(first)[LEAVE]:,.1f}" in shown
    whole = replace(live_report(None), graphs=(report,))
    assert from_json(to_json(whole)) == whole
    # The nearest token count stands for others nearby, scaled by the prediction.
    near = reported(slow, config, rules, rows=ROWS + 4)
    assert len(slow.made) == 3 and near.timed[0].endswith(f"timed before, at {ROWS} tokens")
    forced = decided(slow, replace(config, force=(TOY,)), rules)
    disabled = decided(slow, replace(config, disable=(FUSED,)), rules)
    broke = reported(slow, replace(config, verify_budget_s=0.0), rules, rows=100)
    assert "budget of 0 s" in broke.timed[0]
    # The rank that the toy is slow on is not the one that the fused kernel is slow on: both take the least maximum.
    apart = Slow({TOY: 0.004, "fused": 0.012, "": 0.03} if rank else {TOY: 0.024, "fused": 0.002, "": 0.03})
    unlike = decided(apart, config, rules, rows=300)
    failing = Slow({"": 0.012}, refuses="fused" if rank else "")
    refused = decided(failing, config, rules, rows=900)
    growing = Slow({TOY: 0.02, "": 0.012})
    dynamic = reported(growing, config, rules, rows=2000, dynamic=True)
    assert dynamic.regime is not None and growing.made
    forget()
    torch._dynamo.reset()
    inputs = chain_inputs(ROWS)
    with torch.no_grad():
        compiled = torch.compile(chain, backend="weave", options={"verify": True, "strict": True}, dynamic=False)
        torch.testing.assert_close(compiled(*inputs), chain(*inputs), rtol=1e-4, atol=1e-4)
    through_inductor = live_report(None).graphs[-1]
    return {
        "first": (first.chosen.choice, measured(first), codes(first, TOY)),
        "near": near.decisions[0].chosen.choice,
        "forced": forced.chosen.choice,
        "disabled": disabled.chosen.choice,
        "broke": (broke.decisions[0].chosen.choice, measured(broke.decisions[0])),
        "unlike": (unlike.chosen.choice, measured(unlike)),
        "refused": (refused.chosen.choice, "not_run" in codes(refused, FUSED)),
        "through Inductor": len(measured(through_inductor.decisions[0])) > 1,
        "dynamic": (dynamic.decisions[0].chosen.choice, measured(dynamic.decisions[0])),
    }


def test_the_clock_decides_on_ranks(tmp_path: Path) -> None:
    one, two = run_ranks(_cases, 2, wrong_profile(tmp_path / "wrong.json"))
    assert one == two, "ranks differ"
    choice, times, against = one["first"]
    assert choice == FUSED and against == {"slower_candidate"}
    assert times[FUSED] < 12000 <= times[LEAVE] and times[TOY] >= 20000
    assert one["near"] == FUSED
    assert one["forced"] == TOY, "a rule that is forced is taken whatever it takes"
    assert one["disabled"] == LEAVE
    assert one["broke"] == (TOY, {}), "without time the prediction decides"
    choice, times = one["unlike"]
    assert choice == FUSED and 12000 <= times[FUSED] < 24000 <= times[TOY]
    assert one["refused"][1] and one["refused"][0] != FUSED
    choice, times = one["dynamic"]
    assert choice == FUSED and times[TOY] >= 20000
    assert one["through Inductor"]


def _between_hosts(rank: int) -> tuple[str, dict[str, float]]:
    become_host(rank, 2, 2)
    found = decided(Slow({"": 0.03}), BASE, RULES)
    return found.chosen.choice, measured(found)


def test_hosts_are_timed_too() -> None:
    one, two = run_ranks(_between_hosts, 2)
    assert one == two and one[0] == BETWEEN_HOSTS
    assert one[1][BETWEEN_HOSTS] < 30000 <= one[1][LEAVE]


def _one_dies(rank: int, profile: str) -> None:
    config = replace(BASE, machine=profile, timeout_s=2.0, compile_timeout_s=2.0)
    decided(Slow({}, dies="fused" if rank else ""), config, second_candidate(1.0))


def test_a_rank_that_dies_ends_it(tmp_path: Path) -> None:
    start = time.monotonic()
    left, dead = collect(_one_dies, 2, wrong_profile(tmp_path / "wrong.json"), timeout_s=60)
    assert "exit code 3" in dead.error and "Error" in left.error and time.monotonic() - start < 40


@pytest.mark.parametrize(("verify", "choice"), [(False, "fast_tanh"), (True, LEAVE)])
def test_a_local_site_of_one_rank(verify: bool, choice: str) -> None:
    torch._dynamo.reset()
    reports: list[GraphReport] = []
    backend = executing(replace(BASE, verify=verify), reports, LOCAL, Slow({"fast_tanh": 0.005}))
    with torch.no_grad():
        torch.compile(scaled, backend=backend, dynamic=False)(torch.randn(ROWS, forms.HIDDEN))
    (decision,) = reports[0].decisions
    assert decision.chosen.choice == choice
    assert measured(decision).keys() == ({LEAVE, "fast_tanh"} if verify else set())


def test_what_its_time_may_rest_on_is_not_made_up() -> None:
    """Whole numbers say which expert, or how far a cache is filled: such sites keep their predicted times."""

    def picked(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * positions)

    torch._dynamo.reset()
    reports: list[GraphReport] = []
    make = Slow({})
    with torch.no_grad():
        dear = replace(LOCAL, site_rules=(FastTanh(us=1e6),))
        compiled = torch.compile(picked, backend=executing(BASE, reports, dear, make), dynamic=False)
        compiled(torch.randn(ROWS, forms.HIDDEN), torch.arange(forms.HIDDEN))
    assert make.made == [] and "torch.int64" in reports[0].timed[0]
    assert measured(reports[0].decisions[0]) == {}
