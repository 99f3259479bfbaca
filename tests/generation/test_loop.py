"""The loop that launches ahead, with steps that end late: what it returns, and how far it runs beyond the stop."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from weaveopt.errors import PeerTimeoutError
from weaveopt.fabrics import watchdog
from weaveopt.generation.layers import SPARE_SLOTS
from weaveopt.generation.loop import AHEAD_TOGETHER, MAX_AHEAD, DecodeLoop, HostOutputs


@dataclass
class Late:
    """An event that is there after so many looks."""

    looks: int
    left: int = 0
    fails: RuntimeError | None = None

    def record(self) -> None:
        assert self.left == 0, "a place is used again before anybody looked at it"
        self.left = self.looks

    def query(self) -> bool:
        if self.fails is not None:
            raise self.fails
        self.left = max(0, self.left - 1)
        return self.left == 0


@dataclass
class Counting:
    """Steps of two rows: step `n` makes tokens `n` and `-n`; from `stop` on nothing is unfinished."""

    step_output: Tensor
    stop: int
    steps: int = 0

    def __call__(self) -> bool:
        self.steps += 1
        self.step_output.copy_(torch.tensor([self.steps, -self.steps, int(self.steps < self.stop)]))
        return self.steps > 2


def run(
    looks: int, stop: int, max_tokens: int, fails: RuntimeError | None = None, together: bool = False
) -> tuple[DecodeLoop, list[int]]:
    step_output, heard = torch.tensor([0, 0, int(stop > 0)]), list[int]()

    def sink(tokens: Tensor) -> None:
        assert tokens[0] == -tokens[1]
        heard.append(int(tokens[0]))

    places = [torch.zeros_like(step_output) for _ in range(MAX_AHEAD + 1)]
    loop = DecodeLoop(
        step_output, HostOutputs(places, [Late(looks, fails=fails) for _ in places]), sink, max_tokens, together
    )
    steps = Counting(step_output, stop)
    loop.run(steps, lambda: None)
    assert steps.steps == loop.outcome.num_steps
    return loop, heard


@pytest.mark.parametrize("looks", [0, 1, 2, 5, 410])
@pytest.mark.parametrize(("stop", "max_tokens"), [(0, 9), (1, 9), (7, 30), (30, 30), (99, 30), (99, 1), (99, 2)])
def test_tokens_up_to_the_stop_in_order(looks: int, stop: int, max_tokens: int) -> None:
    loop, heard = run(looks, stop, max_tokens)
    assert heard == list(range(min(stop + 1, max_tokens)))
    outcome = loop.outcome
    assert outcome.num_tokens == len(heard)
    assert 0 <= outcome.num_steps + 1 - len(heard) <= MAX_AHEAD
    assert outcome.num_replays == max(0, outcome.num_steps - 2)


def test_the_host_runs_further_ahead_only_where_the_gpu_would_wait() -> None:
    """Steps that are over at the next look: the GPU had nothing to do. Late ones: two in flight are enough."""
    assert run(50, 20, 40)[0].outcome.num_steps + 1 - 21 <= 2
    assert MAX_AHEAD < SPARE_SLOTS, "steps beyond the stop may not overwrite what a window still needs"


@pytest.mark.parametrize(("stop", "max_tokens"), [(0, 9), (1, 9), (7, 30), (28, 30), (30, 30), (99, 30), (99, 1)])
def test_ranks_take_equally_many_steps_whenever_they_see_the_stop(stop: int, max_tokens: int) -> None:
    """Or the steps that one rank takes beyond the others' would wait for them in vain."""
    loops = [run(looks, stop, max_tokens, together=True) for looks in (0, 1, 2, 5, 410)]
    assert {loop.outcome.num_steps for loop, _ in loops} == {min(stop + AHEAD_TOGETHER, max_tokens) - 1}
    assert all(heard == list(range(min(stop + 1, max_tokens))) for _, heard in loops)


def test_a_failed_step_says_what_its_kernels_said(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = RuntimeError("CUDA error: unspecified launch failure")
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        run(3, 5, 9, failure)

    class Arena:
        error = PeerTimeoutError("peer rank 1 exited")

    monkeypatch.setattr(watchdog, "_watched", [Arena()])
    with pytest.raises(PeerTimeoutError, match="peer rank 1 exited"):
        run(3, 5, 9, failure)
