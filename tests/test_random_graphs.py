"""Random programs on two ranks: rewritten they compute what they do without a compiler, and no step fails.

Another part of them: GRAPH_SEED=7000 GRAPHS=300.
"""

from __future__ import annotations

import os

import torch

from tests.graphs.executing import executing
from tests.graphs.random_graphs import Program
from tests.ranks import run_ranks
from tests.ranks.simulated import TEST_ALL
from weaveopt.config import Config
from weaveopt.records.report import GraphReport

FIRST_SEED = int(os.environ.get("GRAPH_SEED", "144"))
NUM_GRAPHS = int(os.environ.get("GRAPHS", "80" if TEST_ALL else "8"))
TOLERANCE = 1e-4
"""Relative to a result's largest element: sums of several layers, in another order."""


def _wrong(got: torch.Tensor, want: torch.Tensor) -> bool:
    alike = (got.shape, got.dtype) == (want.shape, want.dtype)
    return not alike or not bool((got - want).abs().max() <= TOLERANCE * want.abs().max())  # NaN is wrong too


def run_programs(rank: int, seeds: range) -> tuple[list[str], int]:
    """Complaints, and the number of rewritten sites."""
    complaints, num_rewritten = [], 0
    for seed in seeds:
        torch._dynamo.reset()
        program, reports = Program.of(seed, rank), list[GraphReport]()
        config = Config(force=program.force, timeout_s=30.0, compile_timeout_s=60.0, max_tokens=256)
        compiled = torch.compile(program.run, backend=executing(config, reports), dynamic=len(program.shapes) > 1)
        with torch.no_grad():
            for x in program.inputs() * 2:
                wanted = program.run(x.clone())
                for at, (got, want) in enumerate(zip(compiled(x.clone()), wanted, strict=True)):
                    if _wrong(got, want):
                        complaints.append(f"{program.text}: result {at} of {tuple(x.shape)} is wrong")
        for report in reports:
            num_rewritten += report.num_rewritten
            complaints += [f"{program.text}: {each}" for each in (*report.fallbacks, *report.failed_rules)]
    return complaints, num_rewritten


def test_random_programs_compute_as_eager() -> None:
    seeds = range(FIRST_SEED, FIRST_SEED + NUM_GRAPHS)
    for complaints, num_rewritten in run_ranks(run_programs, 2, seeds, timeout_s=60 + 2 * NUM_GRAPHS):
        assert not complaints, "\n".join(complaints)
        assert num_rewritten > NUM_GRAPHS, "hardly anything was rewritten"
