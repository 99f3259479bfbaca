"""The kernels of `weave::moe_experts` where there is no GPU: interpreted, compiled for one, and planned."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from functools import cache

import pytest

from tests.emulation.experts_compiled import CASES
from tests.emulation.experts_interpreted import CHECKS
from tests.graphs.nonempty import some
from weaveopt.kernel_memory import HOPPER_BYTES
from weaveopt.ops.experts.plan import FEW_ROWS, LEAST_ROWS, MOST_ROWS, RESIDENT, candidates, plan
from weaveopt.ops.experts.shapes import ExpertsShape

KERNELS = ["route", "gate_up", "down", "combine"]


@cache
def lines_of(module: str, interpret: bool) -> list[dict[str, object]]:
    """Runs the module in a process and returns the JSON lines that it prints."""
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": str(int(interpret))}
    done = subprocess.run(
        [sys.executable, "-m", module], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("name", CHECKS)
def test_interpreted(name: str) -> None:
    (wrong,) = [line["wrong"] for line in lines_of("tests.emulation.experts_interpreted", True) if line["name"] == name]
    assert wrong is None, wrong


@pytest.mark.parametrize("case", CASES)
def test_compiled(case: str) -> None:
    """Weights are loaded by asynchronous copies of 16 bytes, tiles of many rows go to the warp groups' tensor cores.

    In decode an SM has shared memory for as many programs as are planned, each with 1 KiB for the system.
    """
    found = {
        str(line["kernel"]): line
        for line in lines_of("tests.emulation.experts_compiled", False)
        if line["case"] == case
    }
    assert list(found) == KERNELS
    assert all(int(str(line["shared_bytes"])) <= HOPPER_BYTES for line in found.values()), found
    for name in ("gate_up", "down"):
        assert found[name]["async_bytes"] == [16], found[name]
        assert bool(found[name]["wgmma"]) == (case in ("batch", "prefill")), found[name]
        assert found[name]["wgmma"] or found[name]["mma"], found[name]
        if case.startswith("decode"):
            assert RESIDENT * (int(str(found[name]["shared_bytes"])) + 1024) <= 228 * 1024, found[name]
    assert [name for name, line in found.items() if line["waits_for_grid"]] == KERNELS[1:]


@pytest.mark.parametrize("case", CASES)
def test_compiled_with_rows_to_several_ranks(case: str) -> None:
    """Stores are as wide as where all rows go into one tensor: they cross a link."""
    lines = lines_of("tests.emulation.experts_compiled", False)
    [down] = [line for line in lines if (line["case"], line["kernel"]) == (f"{case}, to ranks", "down")]
    assert down["store_bytes"] == [16] and down["waits_for_grid"], down


@pytest.mark.parametrize("case", CASES)
def test_compiled_with_ranges_of_experts(case: str) -> None:
    """Weights are loaded as those of one tensor are, by as many bytes and multiplied by the same instructions."""
    lines = lines_of("tests.emulation.experts_compiled", False)
    for name in ("gate_up", "down"):
        [whole] = [line for line in lines if (line["case"], line["kernel"]) == (case, name)]
        [cut] = [line for line in lines if (line["case"], line["kernel"]) == (f"{case}, ranges", name)]
        assert cut == {**whole, "case": f"{case}, ranges"}


MODELS = (
    (2, 4, 6144, 16384),
    (8, 64, 2048, 768),
    (8, 64, 4096, 1536),
    (4, 64, 2880, 2880),
    (8, 128, 2048, 768),
    (1, 1, 64, 64),
)
"""Choices, experts, hidden, inner."""
SHAPES = [ExpertsShape(tokens, *sizes) for tokens in (1, 2, 8, 16, 64, 128, 512, 1024, 4096, 16384) for sizes in MODELS]


@pytest.mark.parametrize("most_bytes", [99 * 1024, 163 * 1024])
def test_plans_of_smaller_gpus_fit(most_bytes: int) -> None:
    """Triton takes at most what all stages have (`tests/emulation/small_gpus.py` compiles some)."""
    smaller = 0
    for shape, gated in itertools.product(SHAPES, (True, False)):
        how, of_hopper = plan(shape, 108, gated, most_bytes), plan(shape, 108, gated)
        for tile, rows, has_gate in ((how.gate_up, how.rows, gated), (how.down, how.rows, False)):
            assert tile.shared_bytes(rows, has_gate) <= most_bytes and tile.depth >= LEAST_ROWS and tile.num_stages >= 2
        smaller += how != of_hopper
        assert (how.rows, how.splits, how.gate_up.columns) == (
            of_hopper.rows,
            of_hopper.splits,
            of_hopper.gate_up.columns,
        )
    assert smaller > len(SHAPES) / 2


@pytest.mark.parametrize("num_sms", [78, 132])
def test_plans_fit(num_sms: int) -> None:
    for shape, gated in itertools.product(SHAPES, (True, False)):
        how = plan(shape, num_sms, gated)
        assert LEAST_ROWS <= how.rows <= MOST_ROWS
        assert how.gate_up.shared_bytes(how.rows, gated) <= HOPPER_BYTES, how
        assert how.down.shared_bytes(how.rows, False) <= HOPPER_BYTES, how
        assert how.splits == 1 or (how.rows <= FEW_ROWS and shape.inner // how.splits >= 512)
        # A program's part of a weight is as large with a gate as without one.
        assert how.gate_up.columns * (2 if gated else 1) == plan(shape, num_sms).gate_up.columns * 2


def test_rows_of_a_tile_follow_rows_of_an_expert() -> None:
    def rows(tokens: int) -> int:
        return plan(ExpertsShape(tokens, 8, 64, 2048, 768), 132).rows

    assert [rows(tokens) for tokens in (1, 8, 64, 128, 256, 512, 8192)] == [16, 16, 16, 32, 64, 128, 128]


def test_few_programs_share_the_depth() -> None:
    """The down projection of Mixtral-8x22B, four experts of 96 blocks: or half of the machine waits at the end."""
    few, many = plan(ExpertsShape(2, 2, 4, 6144, 16384), 132), plan(ExpertsShape(16, 8, 64, 2048, 768), 132)
    assert few.splits > 1 and many.splits == 1
    assert 2 * 96 * few.splits >= 0.9 * 3 * 132


def test_no_routing_needs_more_tiles() -> None:
    """All ways to divide a few rows among experts."""
    for rows, experts in itertools.product((1, 2, 7, 40), (1, 2, 3)):
        shape = ExpertsShape(rows, 1, experts, 64, 64)
        how = plan(shape, 132)
        routings = (each for each in itertools.product(range(rows + 1), repeat=experts) if sum(each) <= rows)
        for counts in some(routings):
            assert sum(-(-count // how.rows) for count in counts) <= how.max_tiles(shape)


def test_a_sweep_tries_what_was_planned_first() -> None:
    for shape in SHAPES:
        tried = list(candidates(shape, 132))
        assert tried[0] == plan(shape, 132) and len(tried) == len(set(tried)) > 10
        assert all(how.gate_up.shared_bytes(how.rows, True) <= HOPPER_BYTES for how in tried)
