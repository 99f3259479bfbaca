"""A prompt through layers of a small Llama on emulated hosts with slow links: token splits chosen by price.

`weaveopt calibrate` first writes a profile on the very hosts, contention included; the rule is not forced. `unsplit` is
weave without the rule. The bound is what no schedule passes: computation (`without_all_reduce`, whose values are wrong)
or all exchanges alone, whichever is longer. `parameters` says which variant of the graph ran.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig

import weaveopt
from benchmarks import record
from benchmarks.ranks import Place
from benchmarks.suite import CPU, Asked, Needs, Setting, Suite, UsageError
from benchmarks.timing import Effort, Step, host_us
from benchmarks.workloads import decoder
from benchmarks.workloads.decoder import INDUCTOR, WEAVE, Workload, largest_error, without_all_reduce
from examples import tiny_llama
from weaveopt.reporting.timeline import total

UNSPLIT, WITHOUT, EXCHANGES = "unsplit", "without_all_reduce", "exchanges"
CASES = Setting("cases", ("0.25:1", "0.5:2", "1:1"), "GBIT:PROMPTS", quick=("0.25:1",))
TOKENS = Setting("tokens", 512, "of a prompt")
LAYERS = Setting("layers", 3, quick=2)
HOSTS = Setting("hosts", 2)
ROUNDS = Setting("rounds", 9, quick=3)
HIDDEN = 1024
ROW = "ROW "
TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Case:
    gbit: float
    prompts: int


@dataclass(frozen=True)
class Asking:
    """Task of a rank."""

    case: Case
    tokens: int
    layers: int
    rounds: int


def cases(asked: Asked) -> list[Case]:
    return [_parsed(word) for word in asked.of(CASES)]


def _parsed(word: str) -> Case:
    gbit, _, prompts = word.partition(":")
    try:
        return Case(float(gbit), int(prompts))
    except ValueError:
        raise UsageError(f"found case {word!r}, expected GBIT:PROMPTS") from None


def measured(place: Place, asked: Asking) -> record.Row:
    """One case, on every rank."""
    torch._dynamo.config.recompile_limit = 64  # one graph for each variant
    here = tiny_llama.Ranks(place.rank, place.world, place.device)
    llama = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=2816, num_hidden_layers=asked.layers, num_attention_heads=16,
        num_key_value_heads=8, vocab_size=4096, max_position_embeddings=4096, tie_word_embeddings=False,
    )  # fmt: skip
    model = tiny_llama.make(llama, torch.float32, here).model
    case = decoder.Case("prefill", asked.case.prompts, asked.tokens)
    compiled = functools.partial(torch.compile, model, dynamic=False, fullgraph=True)
    forwards: dict[str, Callable[..., object]] = {
        "eager": model,
        INDUCTOR: compiled(backend="inductor"),
        UNSPLIT: compiled(backend="weave", options={"disable": ["token_split"]}),
        WEAVE: compiled(backend="weave"),
        WITHOUT: compiled(backend=without_all_reduce),
    }
    workload = Workload(model, case, place.device, gives_positions=False)
    outputs: dict[str, torch.Tensor] = {}
    for name, forward in forwards.items():
        outputs[name] = workload(forward).float().clone()  # compiles
        if name == WEAVE:
            graph = weaveopt.report().graphs[-1]
    errors = {name: largest_error(outputs[name], outputs["eager"]) for name in (WEAVE, INDUCTOR)}
    assert errors[WEAVE] <= 2 * errors[INDUCTOR] + 1e-5, errors
    steps: dict[str, Step] = {name: functools.partial(workload, each) for name, each in forwards.items()}
    data = torch.zeros(case.tokens, HIDDEN)

    def exchanges() -> None:
        for _ in range(2 * asked.layers + 1):
            dist.all_reduce(data)

    steps[EXCHANGES] = exchanges
    us = host_us(place, steps, Effort(asked.rounds, 1), warm=0, meets=True)
    return record.row(
        case=asdict(asked.case) | {"tokens": asked.tokens, "layers": asked.layers, "hosts": place.world},
        weave_us=us[WEAVE],
        baselines={INDUCTOR: us[INDUCTOR], UNSPLIT: us[UNSPLIT], "eager": us["eager"]},
        bound_us=max(us[WITHOUT], us[EXCHANGES]),
        predicted_us=total(graph, fused=True).us,
        parameters={
            "variant": graph.variant, "computation_us": round(us[WITHOUT], 1), "exchanges_us": round(us[EXCHANGES], 1),
            "weave_error": errors[WEAVE], "inductor_error": errors[INDUCTOR],
        },
    )  # fmt: skip


def rank_main(text: str) -> None:
    """A rank on an emulated host: rank 0 prints the row."""
    asked = json.loads(text)
    asking = Asking(Case(**asked.pop("case")), **asked)
    torch.set_num_threads(1)
    with tiny_llama.ranks() as here, torch.no_grad():
        row = measured(Place(here.rank, here.world, here.device), asking)
        here.say(ROW + json.dumps(asdict(row)))
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)


def on_hosts(hosts: int, asking: Asking, quick: bool, profile: Path) -> record.Row:
    """Calibrates on hosts with the case's link, writes `profile`, and measures there. Raises `RuntimeError`."""
    from tests.emulation import emulated_hosts

    with emulated_hosts.hosts(hosts, emulated_hosts.Link(gbit_per_s=asking.case.gbit)) as made:
        words = ["calibrate", "--device", "cpu", "--base", "cpu", "--output", str(profile)]
        if quick:
            words.append("--quick")
        told = emulated_hosts.finish(emulated_hosts.start(made, 1, "weaveopt.cli.main", *words), TIMEOUT_S)
        if any(status for status, _ in told):
            raise RuntimeError(f"calibrate failed\n{told[0][1][-2000:]}")
        environment = {"WEAVE_MACHINE": str(profile)}
        started = emulated_hosts.start(made, 1, __name__, json.dumps(asdict(asking)), environment=environment)
        found = emulated_hosts.finish(started, TIMEOUT_S)
    bad = [out for status, out in found if status]
    if bad:
        raise RuntimeError(f"{asking}: failed\n{bad[0][-2000:]}")
    [line] = [line for line in found[0][1].splitlines() if line.startswith(ROW)]
    return record.Row(**json.loads(line.removeprefix(ROW)))


def rows(place: Place, cases: Sequence[Case], asked: Asked) -> Iterator[record.Row]:
    for case in cases:
        asking = Asking(case, asked.of(TOKENS), asked.of(LAYERS), asked.of(ROUNDS))
        with tempfile.TemporaryDirectory() as folder:
            yield on_hosts(asked.of(HOSTS), asking, place.quick, Path(folder) / "hosts.json")


SUITES = (
    Suite(
        "token_split_hosts", "a prompt over emulated hosts with slow links, token splits by price",
        Needs(CPU, worlds=(0,), emulated_hosts=True), cases, rows, ours=(WEAVE,),
        baselines=(INDUCTOR, UNSPLIT, "eager"), predicted="the graph that was chosen",
        bound="the longer of Inductor without the all-reduces, and the all-reduces alone",
        settings=(CASES, TOKENS, LAYERS, HOSTS, ROUNDS),
    ),
)  # fmt: skip


if __name__ == "__main__":
    rank_main(sys.argv[1])
