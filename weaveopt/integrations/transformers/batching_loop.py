"""transformers' loop of continuous batching, watched: the steps it made, and the rank whose loss ended it.

`install` wraps three methods of transformers' classes. Loops whose steps this backend does not compile run as they are.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from weaveopt.errors import PeerTimeoutError, WeaveError
from weaveopt.fabrics import topology
from weaveopt.integrations.transformers.kept_managers import (
    KeptProcessor,
    begin_loop,
    check_dtype,
    follow_weights,
    note_captured_steps,
)
from weaveopt.records.generation import BatchedPath, BatchingReport

VARLEN, BLOCK_TABLES = "varlen", "block_tables"


class CompileSettings(Protocol):
    """transformers' CompileConfig."""

    backend: object


class BatchingConfig(Protocol):
    """transformers' ContinuousBatchingConfig, resolved."""

    varlen_compile_config: CompileSettings | None
    decode_compile_config: CompileSettings | None
    use_async_batching: bool | None


class TensorParallelRanks(Protocol):
    """transformers' DistributedHelper: the tensor-parallel group of the model."""

    tp_size: int
    tp_group: dist.ProcessGroup | None
    global_rank: int


class Inputs(Protocol):
    """Inputs of one step."""

    num_q_tokens: int
    use_block_table: bool


class Processor(KeptProcessor, Protocol):
    """transformers' ContinuousBatchProcessor; in asynchronous loops `inputs_and_outputs` holds two pairs."""

    cb_config: BatchingConfig


class CapturingRunner(Protocol):
    """transformers' ModelRunner, which runs and captures steps, those of the warm-up too."""

    cb_config: BatchingConfig
    inputs_and_outputs: Any


class Manager(Protocol):
    """transformers' ContinuousBatchingManager."""

    model: torch.nn.Module
    continuous_batching_config: BatchingConfig
    distributed_helper: TensorParallelRanks
    current_batch: int
    """Steps of this loop so far."""


@dataclass
class LoopCounts:
    """Steps of one model's loops so far."""

    steps: dict[tuple[str, str, int], int] = field(default_factory=dict)
    """(path, backend, tokens with their padding) -> number of steps."""
    num_steps: int = 0
    loop_s: float = 0.0
    """Time of the passes of the loop that made a step, without those that compiled."""
    step_s: float = 0.0
    """Part of `loop_s` from the launch of a step to its tokens."""
    last_s: float = 0.0
    overlapped: bool = False
    """True if a loop prepared steps while others ran, so that its times do not add up."""


_counts: weakref.WeakKeyDictionary[torch.nn.Module, LoopCounts] = weakref.WeakKeyDictionary()


def report_of(model: torch.nn.Module | None) -> BatchingReport:
    """The steps that loops made for `model`, or for all models if it is None."""
    found = [counts for each, counts in _counts.items() if model is None or each is model]
    sizes: dict[tuple[str, str], dict[int, int]] = {}
    for counts in found:
        for (path, backend, tokens), number in counts.steps.items():
            of_path = sizes.setdefault((path, backend), {})
            of_path[tokens] = of_path.get(tokens, 0) + number
    return BatchingReport(
        paths=tuple(BatchedPath(*key, tuple(sorted(sizes[key].items()))) for key in sorted(sizes, reverse=True)),
        loop_us=sum(counts.loop_s for counts in found) * 1e6,
        step_us=sum(counts.step_s for counts in found) * 1e6,
        overlapped=any(counts.overlapped for counts in found),
    )


@functools.cache
def install() -> None:
    """Watch loops whose steps are compiled with the backend `weave`."""
    from transformers.generation.continuous_batching.continuous_api import (
        ContinuousBatchingManager,
        ContinuousBatchProcessor,
    )
    from transformers.generation.continuous_batching.model_runner import ModelRunner

    body: Callable[..., bool] = ContinuousBatchingManager._generation_loop_body
    step: Callable[..., None] = ContinuousBatchProcessor._generation_step
    compute: Callable[..., None] = ModelRunner.compute_batch

    @functools.wraps(body)
    def watched_body(self: Manager, batch_processor: Processor, bootstrapping: bool) -> bool:
        if not _is_ours(self.continuous_batching_config):
            return body(self, batch_processor, bootstrapping)
        if self.current_batch == 0:
            begin_loop(self.model, batch_processor)
        counts = _counts.setdefault(self.model, LoopCounts())
        num_steps, num_graphs, began = counts.num_steps, _num_graphs(), perf_counter()
        try:
            goes_on = body(self, batch_processor, bootstrapping)
        except WeaveError:
            raise
        except Exception as error:
            _raise_if_lost(self.distributed_helper, error)
            raise
        if counts.num_steps > num_steps and _num_graphs() == num_graphs:
            counts.loop_s += perf_counter() - began
            counts.step_s += counts.last_s
        return goes_on

    @functools.wraps(step)
    def watched_step(self: Processor, model: torch.nn.Module) -> None:
        if not _is_ours(self.cb_config):
            step(self, model)
            return
        check_dtype(model, self)
        counts = _counts.setdefault(model, LoopCounts())
        key, began = _kind(self), perf_counter()
        step(self, model)
        counts.last_s = perf_counter() - began
        counts.steps[key] = counts.steps.get(key, 0) + 1
        counts.num_steps += 1
        counts.overlapped |= bool(self.cb_config.use_async_batching)

    @functools.wraps(compute)
    def watched_compute(self: CapturingRunner, model: torch.nn.Module, batch_data: dict[str, object]) -> None:
        if not _is_ours(self.cb_config):
            compute(self, model, batch_data)
            return
        num_graphs = _num_graphs()
        note_captured_steps(self.inputs_and_outputs)
        compute(self, model, batch_data)
        if _num_graphs() != num_graphs:
            follow_weights(model, self.inputs_and_outputs)

    ModelRunner.compute_batch = watched_compute
    ContinuousBatchingManager._generation_loop_body = watched_body
    ContinuousBatchProcessor._generation_step = watched_step


def _is_ours(config: BatchingConfig) -> bool:
    both = config.varlen_compile_config, config.decode_compile_config
    return any(each is not None and each.backend == "weave" for each in both)


def _kind(processor: Processor) -> tuple[str, str, int]:
    inputs = processor.inputs_and_outputs
    pairs = getattr(inputs, "io_pairs", None)
    current: Inputs = inputs if pairs is None else pairs[inputs.current_pair].host_io
    config = processor.cb_config
    settings = config.decode_compile_config if current.use_block_table else config.varlen_compile_config
    backend = "none" if settings is None else str(settings.backend)
    return BLOCK_TABLES if current.use_block_table else VARLEN, backend, current.num_q_tokens


def _num_graphs() -> int:
    """Graphs that Dynamo compiled in this process: passes of the loop in which it rises are not timed."""
    return int(counters["stats"]["unique_graphs"])


def _raise_if_lost(ranks: TensorParallelRanks, error: Exception) -> None:
    """Raise an error that names the ranks of the group that are gone, where `error` came of it."""
    if ranks.tp_size < 2 or ranks.tp_group is None:
        return
    name = str(ranks.tp_group.group_name)
    lost = topology.silent_ranks(name)
    if lost:
        who = f"rank {lost[0]} does" if len(lost) == 1 else f"ranks {', '.join(map(str, lost))} do"
        lines = str(error).splitlines()
        raise PeerTimeoutError(
            f"continuous batching, group {name!r}, rank {ranks.global_rank}: peer {who} not answer, exited or stopped "
            f"({lines[0] if lines else type(error).__name__})"
        ) from error
