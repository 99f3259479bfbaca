"""The kernels that a captured decode step of `generate` consists of, on the GPUs of one host.

    python -m benchmarks.step_kernels_gpu --machine h200x4 [--models 8b 1b] [--batches 1] [--choices greedy]
                                          [--layers N] [--options combo_kernels=1 ...] [--kernels 12] [--quick]

Models as in `generate_gpu`. `weave_us` is the step replayed back to back. `baselines` are steps compiled with further
options of Inductor, one of `--options` each, replayed in turns with it. `parameters` name the kernels that take longest
on rank 0: microseconds of a step, and how many of them a step has.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import CompileConfig, PreTrainedModel

import weaveopt
from benchmarks import generate_gpu, gpu_limits, gpu_ranks, record
from benchmarks.gpu_ranks import Place
from weaveopt.generation import sessions
from weaveopt.generation.compiling import Backend
from weaveopt.generation.session import Chosen, Session
from weaveopt.wording import counted

SUITE = "step_kernels"
REPLAYS, PROFILED, ROUNDS = 40, 4, 5
NEW_TOKENS = 64
PLAIN = "weave"
"""The step as users get it."""


@dataclass(frozen=True)
class Asked:
    machine: str
    models: tuple[str, ...]
    batches: tuple[int, ...]
    choices: tuple[str, ...]
    options: tuple[str, ...]
    layers: int | None
    kernels: int
    quick: bool


@dataclass(frozen=True)
class Step:
    """A captured step, and where its replays begin."""

    session: Session
    chosen: Chosen

    def replay_us(self, replays: int) -> float:
        return self.session.replay_us(self.chosen, generate_gpu.PROMPT, replays)


def option(text: str) -> str:
    """`NAME=0|1`, as the command line has it."""
    name, _, value = text.partition("=")
    if not name or value not in ("0", "1"):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected NAME=0 or NAME=1")
    return text


def compiled(options: str, batch: int) -> CompileConfig:
    """With `NAME=0|1` beside what such steps have anyway."""
    name, _, value = options.partition("=")
    backend = Backend("weave", "weave", None, ((name, value == "1"),))
    return CompileConfig(
        backend="weave", mode=None, options=dict((backend.for_one_row() if batch == 1 else backend).options)
    )


def make_step(model: PreTrainedModel, prompt: Tensor, choice: str, options: str) -> Step:
    """By a call of `generate`. Raises `RuntimeError` where the step was not captured."""
    how: dict[str, object] = {} if options == PLAIN else {"compile_config": compiled(options, prompt.shape[0])}
    torch._dynamo.reset()
    for _ in range(2):
        torch.manual_seed(0)
        model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW_TOKENS,
            custom_generate=weaveopt.generate, **generate_gpu.sampling_of(choice), **how,
        )  # fmt: skip
    session = sessions.sessions_of(model)[-1]
    chosen = session.forms[-1]
    if chosen.graph is None:
        raise RuntimeError(f"{options}: the step was not captured: {chosen.report.not_captured}")
    return Step(session, chosen)


def longest_kernels(step: Step, count: int) -> dict[str, record.Scalar]:
    """Of a step on this rank, by name."""
    gpu_ranks.barrier()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step.replay_us(PROFILED)
    gpu_ranks.barrier()
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
    prompt = generate_gpu.prompt_of(place, model, batch, generate_gpu.PROMPT)
    steps = {options: make_step(model, prompt, choice, options) for options in (PLAIN, *asked.options)}
    times: dict[str, list[float]] = {options: [] for options in steps}
    for _ in range(2 if asked.quick else ROUNDS):
        for options, step in steps.items():
            gpu_ranks.barrier()
            times[options].append(step.replay_us(REPLAYS))
    slowest = gpu_ranks.slowest([statistics.median(found) for found in times.values()])
    medians = dict(zip(times, slowest, strict=True))
    kernels = {options: longest_kernels(step, asked.kernels) for options, step in steps.items()}
    for options, of_step in kernels.items():
        place.say(f"{name}, batch {batch}, {choice}, {options}: {medians[options]:.1f} us a step")
        for kernel, us in of_step.items():
            place.say(f"    {us}  {kernel}")
    num_bytes = generate_gpu.bytes_read(model, batch, generate_gpu.PROMPT + REPLAYS // 2)
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


def rows(place: Place, asked: Asked) -> Iterator[record.Row]:
    for name in asked.models:
        model = generate_gpu.make(place, name, asked.layers)
        for batch in asked.batches:
            for choice in asked.choices:
                yield row(place, model, name, batch, choice, asked)
                sessions.forget(model)
        del model
        torch.cuda.empty_cache()


def program(place: Place, asked: Asked) -> None:
    found: list[record.Row] = []
    with torch.no_grad():
        for each in rows(place, asked):
            found.append(each)
            if place.rank == 0 and not asked.quick:
                record.write(SUITE, asked.machine, found, beside=True)


def parse(arguments: list[str]) -> Asked:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="gpu", help="folder of benchmarks/results that the figures go to")
    parser.add_argument("--models", nargs="+", choices=list(generate_gpu.SHAPES), default=list(generate_gpu.SHAPES))
    parser.add_argument("--batches", type=int, nargs="+", default=[1])
    parser.add_argument("--choices", nargs="+", choices=generate_gpu.CHOICES, default=["greedy"])
    parser.add_argument(
        "--options", nargs="*", type=option, default=[], metavar="NAME=0|1", help="of Inductor, each a step apart"
    )
    parser.add_argument("--layers", type=int, help="at most so many (default: all that the model has)")
    parser.add_argument("--kernels", type=int, default=12, help="how many a row names")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and nothing is written")
    args = parser.parse_args(arguments)
    return Asked(
        args.machine, tuple(args.models), tuple(args.batches), tuple(args.choices), tuple(args.options), args.layers,
        args.kernels, args.quick,
    )  # fmt: skip


def main() -> int:
    asked = parse(sys.argv[1:])
    if not dist.is_torchelastic_launched():
        if torch.cuda.device_count() < 2:
            raise SystemExit(
                f"found {counted(torch.cuda.device_count(), 'CUDA device')}, the benchmark needs at least 2"
            )
        return gpu_ranks.start("benchmarks.step_kernels_gpu", 2, sys.argv[1:])
    gpu_ranks.run_and_exit(lambda place: program(place, asked))
    return 0


if __name__ == "__main__":
    sys.exit(main())
