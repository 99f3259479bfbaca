"""The kernels that a captured decode step of `generate` consists of, on the GPUs of one host.

Models as in the suite `generate`. `weave_us` is the step replayed back to back. `baselines` are steps compiled with
further options of Inductor, one of `options` each, replayed in turns with it. `parameters` name the kernels that take
longest on rank 0: microseconds of a step, and how many of them a step has.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import CompileConfig, PreTrainedModel

import weaveopt
from benchmarks import gpu_limits, record
from benchmarks.ranks import Place, barrier, slowest
from benchmarks.suite import GPU, Asked, Needs, Setting, Suite, UsageError, product
from benchmarks.suites import generate
from benchmarks.suites.generate import LAYERS, MODELS, Case
from weaveopt.generation import sessions
from weaveopt.generation.compiling import Backend
from weaveopt.generation.session import CapturedStep, DecodeSession

REPLAYS, PROFILED, ROUNDS = 40, 4, 5
PROMPT, NEW_TOKENS = generate.PROMPT.default, generate.NEW_TOKENS.default
PLAIN = "weave"
"""The step as users get it."""
BATCHES = Setting("batches", (1,))
CHOICE = Setting("choices", ("greedy",), among=generate.HOW_CHOSEN)
OPTIONS = Setting[tuple[str, ...]]("options", (), "options of Inductor as NAME:0|1, each a step apart")
KERNELS = Setting("kernels", 12, "how many a row names")


def cases(asked: Asked) -> list[Case]:
    for text in asked.of(OPTIONS):
        name, _, value = text.partition(":")
        if not name or value not in ("0", "1"):
            raise UsageError(f"--set options: found {text!r}, expected NAME:0 or NAME:1")
    return product(Case, asked.of(MODELS), asked.of(BATCHES), asked.of(CHOICE))


@dataclass(frozen=True)
class Step:
    """A captured step, and where its replays begin."""

    session: DecodeSession
    chosen: CapturedStep

    def replay_us(self, replays: int) -> float:
        return self.session.replay_us(self.chosen, PROMPT, replays)


def compiled(options: str, batch: int) -> CompileConfig:
    """With `NAME:0|1` added to the options that such steps have anyway."""
    name, _, value = options.partition(":")
    backend = Backend("weave", "weave", None, ((name, value == "1"),))
    return CompileConfig(
        backend="weave", mode=None, options=dict((backend.for_one_row() if batch == 1 else backend).options)
    )


def make_step(model: PreTrainedModel, prompt: Tensor, choice: str, options: str) -> Step:
    """Captures a step by calls of `generate`. Raises `RuntimeError` where the step was not captured."""
    how: dict[str, object] = {} if options == PLAIN else {"compile_config": compiled(options, prompt.shape[0])}
    torch._dynamo.reset()
    for _ in range(2):
        torch.manual_seed(0)
        model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW_TOKENS,
            custom_generate=weaveopt.generate, **generate.sampling_of(choice), **how,
        )  # fmt: skip
    session = sessions.sessions_of(model)[-1]
    chosen = session.forms[-1]
    if chosen.graph is None:
        raise RuntimeError(f"{options}: the step was not captured: {chosen.report.not_captured}")
    return Step(session, chosen)


def longest_kernels(step: Step, count: int) -> dict[str, record.Scalar]:
    """Kernels of a step on this rank that take longest, by name."""
    barrier()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step.replay_us(PROFILED)
    barrier()
    times: dict[str, list[float]] = defaultdict(list)
    for event in seen.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name].append(event.device_time)
    found: dict[str, record.Scalar] = {"all kernels": round(sum(map(sum, times.values())) / PROFILED, 1)}
    for name in sorted(times, key=lambda name: -sum(times[name]))[:count]:
        of_step = f"{sum(times[name]) / PROFILED:.1f} us in {len(times[name]) / PROFILED:g}"
        found[name.removeprefix("void ")[:90]] = of_step
    return found


def row(place: Place, model: PreTrainedModel, name: str, batch: int, choice: str, asked: Asked) -> record.Row:
    prompt = generate.prompt_of(place, model, batch, PROMPT)
    steps = {options: make_step(model, prompt, choice, options) for options in (PLAIN, *asked.of(OPTIONS))}
    times: dict[str, list[float]] = {options: [] for options in steps}
    for _ in range(2 if place.quick else ROUNDS):
        for options, step in steps.items():
            barrier()
            times[options].append(step.replay_us(REPLAYS))
    medians = dict(zip(times, slowest([statistics.median(found) for found in times.values()]), strict=True))
    kernels = {options: longest_kernels(step, asked.of(KERNELS)) for options, step in steps.items()}
    for options, of_step in kernels.items():
        told = "".join(f"\n    {us}  {kernel}" for kernel, us in of_step.items())
        place.say(f"{name}, batch {batch}, {choice}, {options}: {medians[options]:.1f} us a step{told}")
    num_bytes = generate.bytes_read(model, batch, PROMPT + REPLAYS // 2)
    weave_us = medians.pop(PLAIN)
    return record.row(
        case={
            "model": name, "layers": model.config.num_hidden_layers, "ranks": place.world, "batch": batch,
            "choice": choice,
        },
        weave_us=weave_us, baselines=medians or {PLAIN: weave_us},
        bound_us=num_bytes / gpu_limits.limits(place.device).bytes_per_us,
        parameters={"bytes": num_bytes, **kernels[PLAIN]},
    )  # fmt: skip


def rows(place: Place, cases: Sequence[Case], asked: Asked) -> Iterator[record.Row]:
    for name in dict.fromkeys(case.model for case in cases):
        model = generate.make(place, name, asked.of(LAYERS))
        for case in (case for case in cases if case.model == name):
            yield row(place, model, name, case.batch, case.choice, asked)
            sessions.forget(model)
        del model
        torch.cuda.empty_cache()


SUITES = (
    Suite(
        "step_kernels", "the kernels of a captured decode step", Needs(GPU, 2, worlds=(2,)), cases, rows,
        ours=(PLAIN,), baselines=("a step for each of `options`",),
        bound="the bytes that a step reads, at the memory's rate",
        settings=(MODELS, BATCHES, CHOICE, OPTIONS, LAYERS, KERNELS),
    ),
)  # fmt: skip
