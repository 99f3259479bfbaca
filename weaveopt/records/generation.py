"""Report of the decode loop for a model: its steps, and why calls were left to transformers' own loop."""

from __future__ import annotations

from dataclasses import dataclass

from weaveopt.records.candidate import Rejection


@dataclass(frozen=True)
class StepReport:
    """One form of decode step: a batch size, a cache length and a kind of token selection."""

    batch: int
    cache_length: int
    choice: str
    """`greedy` or `sampled`, and the names of the logits processors."""
    backend: str
    """Backend that compiled the step; `none` if it was not compiled."""
    captured: bool
    """True if steps are replays of one CUDA graph."""
    not_captured: str = ""
    """Why not; empty where it is captured."""
    not_compiled: str = ""
    """Why the model runs uncompiled inside of steps, though it was to be compiled with `backend`; empty where it does
    not."""
    choosing_not_compiled: str = ""
    """The same of what chooses tokens."""
    calls: int = 0
    steps: int = 0
    """Decode steps launched, those beyond the stop included."""
    replays: int = 0
    """Number of `steps` that were a single launch of the captured graph."""
    beyond_stop: int = 0
    """Number of `steps` that ran before the host saw that every sequence had ended; their tokens were dropped."""
    loop_us: float = 0.0
    """Time from the launch of a call's first step to the end of its last one, summed over calls."""
    step_us: float = 0.0
    """Part of `loop_us` spent inside steps, if they run on the host's processor; else 0."""

    @property
    def host_share(self) -> float | None:
        """Share of the loop that no step took, of steps on the host's processor; None where steps run elsewhere."""
        return 1 - self.step_us / self.loop_us if self.step_us and self.loop_us else None


@dataclass(frozen=True)
class LeftCall:
    """A group of calls that ran in transformers' own loop, and every reason for it."""

    loop: str
    """The method of the model that ran instead: `_sample`, `_beam_search`, ..."""
    reasons: tuple[Rejection, ...]
    count: int = 1


@dataclass(frozen=True)
class BatchedPath:
    """Steps of continuous batching that ran on one of transformers' paths."""

    path: str
    """`varlen`, for steps of any lengths, or `block_tables`, for those of one token a request."""
    backend: str
    """Backend that the path is compiled with; `none` if it is not compiled."""
    sizes: tuple[tuple[int, int], ...]
    """(tokens of a step with its padding, number of such steps), ascending."""

    @property
    def steps(self) -> int:
        return sum(number for _, number in self.sizes)


@dataclass(frozen=True)
class BatchingReport:
    """Report of all loops of continuous batching for one model."""

    paths: tuple[BatchedPath, ...] = ()
    loop_us: float = 0.0
    """Time of the passes of the loop that made a step, scheduling and bookkeeping included; without those that
    compiled."""
    step_us: float = 0.0
    """Part of `loop_us` from the launch of a step to its tokens on the host."""
    overlapped: bool = False
    """True if steps were prepared while others ran (transformers' asynchronous batching)."""

    @property
    def host_share(self) -> float | None:
        """Share of the loop in which no step ran; None where steps overlap with it, or nothing was timed."""
        return 1 - self.step_us / self.loop_us if self.loop_us and not self.overlapped else None


@dataclass(frozen=True)
class GenerationReport:
    """Report of all calls of `weaveopt.generate`, and of `generate_batch`, for one model."""

    steps: tuple[StepReport, ...] = ()
    left: tuple[LeftCall, ...] = ()
    batching: BatchingReport = BatchingReport()
