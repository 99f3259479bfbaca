"""With `verify` the clock chooses among whole graphs: variants that are slower or faster than predicted, that some rank
cannot run, or that there is neither time nor memory to run.

How long a graph takes is the test's to say: what `verify` calls sleeps first, by what it computes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.fx as fx

from tests.autotune.test_verify import reported as reported_of
from tests.house.test_toys import ROWS_HALVED, overlapping_machine, stacked
from tests.ranks import run_ranks
from weaveopt import cost_model
from weaveopt.autotune import variant_timing
from weaveopt.autotune.candidate_run import Call
from weaveopt.autotune.graph_part import HintedSizes, NotTimedError, whole_of
from weaveopt.autotune.site_timing import forget
from weaveopt.config import Config
from weaveopt.records.report import GraphReport
from weaveopt.reporting.document import to_json
from weaveopt.reporting.document_reader import from_json
from weaveopt.reporting.registry import report as live_report
from weaveopt.reporting.text import text

BASE = Config(
    verify=True, strict=True, timeout_s=20.0, compile_timeout_s=20.0, disable=("all_reduce_rms_norm",)
)  # the halves' all-reduces are the library's, and overlap


@dataclass
class SlowGraphs:
    """Makes whole graphs that sleep so long before they run; keeps the names of what it made."""

    delays_s: Mapping[str, float]
    refuses: str = ""
    made: list[str] = field(default_factory=list)

    def __call__(self, module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Call:
        targets = [str(node.target) for node in module.graph.nodes]
        products = sum("aten.mm" in each for each in targets)
        name = "halves" if any("aten.cat" in each for each in targets) else "captured" if products > 2 else "site"
        self.made.append(name)
        if name == self.refuses:
            raise RuntimeError("no memory here")

        def call(values: list[torch.Tensor]) -> object:
            time.sleep(self.delays_s.get(name, 0.0))
            return module(*values)

        return call


def reported(make: SlowGraphs, config: Config, dynamic: bool = False) -> GraphReport:
    """Report of `stacked`, whose results are compared with eager."""
    forget()
    return reported_of(make, config, ROWS_HALVED, 96, dynamic, stacked)


def seen(report: GraphReport) -> tuple[str, list[float | None], list[str], str]:
    """The variant that runs, measured times, reasons against the halves, and what the report says of the timing."""
    times = [None if each.measured is None else each.measured.us for each in report.variants]
    return report.variant, times, [why.code for why in report.variants[1].rejections], report.timed[-1]


def _cases(rank: int, predicted_fast: str, unmeasured: str) -> dict[str, object]:
    fast = replace(BASE, machine=predicted_fast)
    assert reported(SlowGraphs({}), replace(fast, verify=False)).variant == "row_halves", "the prediction"
    slow = SlowGraphs({"halves": 0.03})
    report = reported(slow, fast)
    assert slow.made.count("captured") == slow.made.count("halves") == 1
    whole = replace(live_report(None), graphs=(report,))
    assert from_json(to_json(whole)) == whole
    assert ", measured " in " ".join(text(whole).split()), text(whole)
    # A rank whose halves are quick waits for the one whose halves are not.
    alone = SlowGraphs({"halves": 0.03 * rank, "captured": 0.015})
    quick = SlowGraphs({"captured": 0.03})
    with mock.patch.object(variant_timing, "_free_bytes", return_value=0 if rank else 1 << 40):
        scarce = reported(SlowGraphs({}), fast)
    return {
        "slow": seen(report),
        "slow on one rank": seen(reported(alone, fast)),
        "quick": seen(reported(quick, replace(BASE, machine=unmeasured))),
        "refused": seen(reported(SlowGraphs({"captured": 0.03}, refuses="halves" if rank else ""), fast)),
        "broken": seen(reported(SlowGraphs({}, refuses="captured" if rank else ""), fast)),
        "no time": seen(reported(SlowGraphs({"halves": 0.03}), replace(fast, verify_budget_s=0.0))),
        "no memory": seen(scarce),
        "forced": seen(reported(SlowGraphs({"halves": 0.03}), replace(fast, force=("row_halves",)))),
        "dynamic": seen(reported(SlowGraphs({"captured": 0.03}), fast, dynamic=True)),
    }


def test_the_clock_chooses_among_variants(tmp_path: Path) -> None:
    machines = {"fast": overlapping_machine(), "unmeasured": replace(overlapping_machine(), contention=None)}
    for name, machine in machines.items():
        (tmp_path / name).write_text(cost_model.dumps(machine))
    one, two = run_ranks(_cases, 2, str(tmp_path / "fast"), str(tmp_path / "unmeasured"), timeout_s=300)
    assert one.keys() == two.keys()
    for name in one:
        assert one[name][:3] == two[name][:3], f"{name}: ranks differ"
    variant, (captured, halves), codes, line = one["slow"]
    assert (variant, codes, line) == ("captured", ["no_saving"], "variants: 2 graphs timed whole")
    assert captured < 30000 <= halves
    variant, (captured, halves), _, _ = one["slow on one rank"]
    assert variant == "captured" and captured < 30000 <= halves
    variant, (captured, halves), codes, _ = one["quick"]
    assert (variant, codes) == ("row_halves", []) and halves < 30000 <= captured
    variant, (captured, halves), codes, line = one["refused"]
    assert (variant, codes) == ("captured", ["not_run"]) and captured >= 30000 and halves is None
    assert line == "variants: 1 graph timed whole, 1 could not be run"
    for name, words in {
        "broken": "another rank could not",
        "no time": "budget of 0 s",
        "no memory": "not timed",
    }.items():
        variant, times, codes, line = one[name]
        assert (variant, times, codes) == ("row_halves", [None, None], []), f"{name}: the prediction decides"
        assert words in line
    assert "bytes of their own" in two["no memory"][3]
    assert one["forced"][0] == "row_halves"
    assert one["dynamic"][0] == "row_halves" and one["dynamic"][1][0] >= 30000


def test_made_up_inputs_are_zeros_where_numbers_are_whole() -> None:
    graphs: list[fx.Graph] = []

    def picked(table: torch.Tensor, ids: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
        return table[ids] * flags[:, None]

    def keep(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
        for node, value in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True):
            node.meta["val"] = value
        graphs.append(module.graph)
        return module

    torch._dynamo.reset()
    arguments = (torch.randn(5, 3), torch.tensor([4, 1]), torch.tensor([True, False]))
    torch.compile(picked, backend=keep, dynamic=False)(*arguments)
    part = whole_of(graphs[0], HintedSizes())
    table, ids, flags = part.real_inputs()
    assert ids.tolist() == [0, 0] and ids.dtype is torch.int64 and flags.tolist() == [True, True]
    assert table.shape == (5, 3) and table.abs().max() > 0
    assert part.num_bytes == 5 * 3 * 4 + 2 * 8 + 2
    torch.testing.assert_close(part.module(table, ids, flags)[0], table[ids])
    graphs[0].find_nodes(op="placeholder")[0].meta["val"] = "text"
    with pytest.raises(NotTimedError, match="reads a str"):
        whole_of(graphs[0], HintedSizes())
