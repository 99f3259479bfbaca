"""GEMMs in tiles: what calibrate measures of them, and that the rule reads of a profile what was written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.measure.test_families import own_kernels, rows
from weaveopt import cost_model
from weaveopt.cost_model import Machine
from weaveopt.cost_model.tile_config import TileConfig
from weaveopt.measure.cases.gemm_comm.all_reduce import Kernel, TileKernels, call_of, cases, variant_of
from weaveopt.measure.cases.reduction.peer import PeerKernels
from weaveopt.measure.clock import Sample
from weaveopt.measure.draft import Draft
from weaveopt.measure.overlapped import Times
from weaveopt.ops.gemm_comm.all_reduce.call import ALL_REDUCE, TileOutput, decode
from weaveopt.ops.reduction.prices.workload import Workload
from weaveopt.ops.reduction.variant import Algorithm, KernelRow, Transfer
from weaveopt.records.candidate import Fabric, Rejection
from weaveopt.rewrites.gemm_all_reduce.tiles import PricedTiles, price

BULK = KernelRow(0, Algorithm.TWO_SHOT, Transfer.BULK, 16)


def kernel_us(num_bytes: int, depth: int, cut: TileConfig) -> float:
    return 20.0 + num_bytes / 4e5 + num_bytes * depth / 6e8 + cut.reducer_ctas


@pytest.fixture
def machine() -> Machine:
    """Profile that calibrate writes from made-up samples of all it measures between two ranks."""
    times: Times[Kernel] = {}
    for case in cases(quick=False):
        known = times.setdefault((2, case.hidden, case.cut, case.depth), [])
        known.append((case.bytes, Sample(kernel_us(case.bytes, case.depth, case.cut[1]), 0.01)))
    draft = Draft(torch.device("cpu"), 2, None)
    for family in (*own_kernels(), PeerKernels({(2, 4096, BULK): rows(4.0)}), TileKernels(times)):
        family.write(draft)
    return draft.machine("made_up")


def workload(tokens: int, hidden: int, depth: int, output: TileOutput = TileOutput.NORM) -> Workload:
    has_norm = output is not TileOutput.SUM
    return Workload(
        tokens, tokens, hidden, "bfloat16", 2, gemm=cost_model.Gemm(tokens, depth, hidden), has_norm=has_norm,
        num_norms=int(has_norm), sum_is_used=output is not TileOutput.NORM,
    )  # fmt: skip


def priced_us(machine: Machine, of: Workload) -> tuple[float, TileConfig]:
    found = price(machine, of, Fabric.PEER)
    assert isinstance(found, PricedTiles), found
    return sum(term.us for term in found.estimate.terms if term.name in ("gemm", "exposed")), found.cut


def test_the_price_is_the_measurement(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "made_up.json"
    path.write_text(cost_model.dumps(machine))
    assert cost_model.load(str(path)) == machine
    for case in cases(quick=False):
        depth, (output, cut) = case.depth, case.cut
        of = workload(case.tokens, case.hidden, depth, output)
        us, best = priced_us(machine, of)
        assert best.reducer_ctas == 4, "the faster of the two"
        if cut == best:
            assert us == pytest.approx(kernel_us(case.bytes, depth, cut), abs=2e-3)  # whole nanoseconds are kept


def test_nothing_is_known_beyond_what_was_measured(machine: Machine) -> None:
    for tokens in (64, 32768):
        found = price(machine, workload(tokens, 8192, 4096), Fabric.PEER)
        assert isinstance(found, Rejection) and found.code == "beyond_measured", tokens


def test_between_rows_and_depths_that_were_measured(machine: Machine) -> None:
    us, cut = priced_us(machine, workload(3000, 5120, 3072))
    assert us == pytest.approx(kernel_us(3000 * 5120 * 2, 3072, cut), rel=0.05)


def test_a_host_without_the_kernel_writes_nothing() -> None:
    draft = Draft(torch.device("cpu"), 2, None)
    for family in (*own_kernels(), TileKernels()):
        family.write(draft)
    assert "tiles" not in {name for name, _ in draft.machine("made_up").origins}


@pytest.mark.parametrize("quick", [True, False])
def test_what_is_measured_can_be_called_and_named(quick: bool) -> None:
    every = list(cases(quick))
    assert len(set(every)) == len(every) and len({case.depth for case in every}) > 1
    for case in every:
        call = call_of(case, "0", 4)
        assert decode(call.encode()) == call
        output, config = case.cut
        measured = (output.variant, config, case.depth)
        assert ALL_REDUCE.parse(variant_of(case.cut, case.depth)) == measured
