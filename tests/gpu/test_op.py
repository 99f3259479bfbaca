"""The fused op on GPUs: against the reference, in CUDA graphs, in sub-groups, and when ranks die, stall or differ."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch

from tests.gpu.launch import ENVIRONMENT, needs_cuda_part, run_program, run_ranks, trapping
from tests.gpu.programs import Ranks

FAULT_TIMEOUT_S = 90.0


@needs_cuda_part
@pytest.mark.multigpu
@pytest.mark.parametrize("world", [2, 4])
def test_equals_the_reference_bitwise_alike_and_from_graphs(world: int) -> None:
    printed = run_ranks(world, "tests.gpu.op_ranks")
    assert printed.count("every stage passed") == world


@needs_cuda_part
@pytest.mark.gpu
def test_ranks_of_one_process_agree_with_the_reference() -> None:
    """Groups of up to 8 ranks, on one GPU."""
    assert "calls agree with the reference and on all ranks" in run_program("tests.gpu.one_process")


@dataclass(frozen=True)
class Told:
    """Printed results of a scenario, by rank; a rank that was killed or stopped printed nothing."""

    results: dict[int, dict[str, object]]
    stderr: str

    def text(self, rank: int, when: str) -> str:
        return str(self.results[rank][when])

    def seconds(self, rank: int) -> float:
        return float(str(self.results[rank]["seconds"]))


def run_scenario(scenario: str, devices: tuple[int, ...]) -> Told:
    """Ranks that fail do not end the others, as they would under torchrun."""
    results: dict[int, dict[str, object]] = {}
    errors = ""
    with trapping(devices):
        ranks = Ranks([(scenario, str(device)) for device in devices], "tests.gpu.fault_ranks", ENVIRONMENT)
        deadline = time.monotonic() + FAULT_TIMEOUT_S
        # The last rank may be stopped for good: it is ended once the others are through.
        for rank, program in enumerate(ranks.programs):
            gone = rank == len(devices) - 1 and scenario.startswith(("killed", "stalled"))
            ended = program.end(0.1 if gone else max(deadline - time.monotonic(), 1.0))
            errors += ended.err
            for line in ended.out.splitlines():
                if line.startswith("{"):
                    results[rank] = json.loads(line)
    return Told(results, errors)


GONE = tuple(
    f"{how}{kernel}{graph}" for how in ("killed", "stalled") for kernel in ("", " bulk") for graph in ("", " graph")
)
CONTINUED = ("continued", "continued bulk", "continued graph")
DIFFERING = ("differing tokens", "differing sites bulk")
SCENARIOS = (*GONE, *CONTINUED, *DIFFERING)


@pytest.fixture(scope="module")
def told() -> dict[str, Told]:
    """All scenarios, as many at once as there are pairs of GPUs."""
    pairs = [(2 * i, 2 * i + 1) for i in range(torch.cuda.device_count() // 2)]
    outcomes: dict[str, Told] = {}

    def run_some(index: int) -> None:
        for scenario in SCENARIOS[index :: len(pairs)]:
            outcomes[scenario] = run_scenario(scenario, pairs[index])

    with ThreadPoolExecutor(len(pairs)) as pool:
        list(pool.map(run_some, range(len(pairs))))
    return outcomes


@needs_cuda_part
@pytest.mark.multigpu
@pytest.mark.parametrize("scenario", GONE)
def test_a_rank_that_is_gone_ends_the_other(scenario: str, told: dict[str, Told]) -> None:
    outcome = told[scenario]
    assert 0 in outcome.results, f"rank 0 hung or died:\n{outcome.stderr[-4000:]}"
    text = outcome.text(0, "later")
    assert text.startswith("PeerTimeoutError: the arena is unusable since an earlier call failed."), text
    assert "site layers.0 with 5 tokens" in text and "rank 0: peer rank 1" in text
    assert outcome.text(0, "at_once"), "the call that could not finish raised nothing"
    assert outcome.stderr.count("weaveopt: PeerTimeoutError: ") == 1, outcome.stderr[-4000:]
    if scenario.startswith("killed"):
        assert "rank 1 exited" in text and outcome.seconds(0) < 10
    else:
        assert "did not signal within 4 s" in text and 3 < outcome.seconds(0) < 10


@needs_cuda_part
@pytest.mark.multigpu
@pytest.mark.parametrize("scenario", CONTINUED)
def test_a_rank_that_comes_back_hears_that_the_other_gave_up(scenario: str, told: dict[str, Told]) -> None:
    """The other one caught its error and lives on."""
    outcome = told[scenario]
    assert set(outcome.results) == {0, 1}, f"a rank hung or died:\n{outcome.stderr[-4000:]}"
    assert "rank 0: peer rank 1 did not signal within 4 s" in outcome.text(0, "later")
    assert "rank 1: peer rank 0 gave up waiting itself" in outcome.text(1, "later") and outcome.seconds(1) < 4
    assert outcome.stderr.count("weaveopt: PeerTimeoutError: ") == 2, outcome.stderr[-4000:]


@needs_cuda_part
@pytest.mark.multigpu
@pytest.mark.parametrize("scenario", DIFFERING)
def test_ranks_that_differ_are_told_so(scenario: str, told: dict[str, Told]) -> None:
    outcome = told[scenario]
    assert set(outcome.results) == {0, 1}, f"a rank hung or died:\n{outcome.stderr[-4000:]}"
    own, other = ("5 tokens", "6 tokens") if "tokens" in scenario else ("site layers.0", "site layers.1")
    texts = [outcome.text(rank, "later") for rank in (0, 1)]
    assert any("AgreementError" in text and own in text and other in text for text in texts), texts
    assert all(outcome.seconds(rank) < 15 for rank in (0, 1))


@needs_cuda_part
@pytest.mark.multigpu
@pytest.mark.parametrize("scenario", ["caught", "caught graph"])
def test_a_rank_that_gave_up_and_lives_ends_the_waits_of_all(scenario: str) -> None:
    """Rank 0 gives up on rank 2 after 4 s, and goes on. Rank 1 began to wait 2 s later, and rank 2 comes last."""
    if torch.cuda.device_count() < 3:
        pytest.skip(f"needs 3 CUDA GPUs, found {torch.cuda.device_count()}")
    outcome = run_scenario(scenario, (0, 1, 2))
    assert set(outcome.results) == {0, 1, 2}, f"a rank hung or died:\n{outcome.stderr[-4000:]}"
    first, second, late = (outcome.text(rank, "later") for rank in range(3))
    assert "peer rank 2 did not signal within 4 s" in first
    assert "peer rank 0 gave up waiting itself" in second and outcome.seconds(1) < 3.2, "4 s by its own timeout"
    assert "gave up waiting itself" in late and outcome.seconds(2) < 2.0
