"""Layers of a small Llama on CPU ranks, of this host or of several emulated ones: weave, Inductor and eager.

Times the decoder stack (embedding, layers, last norm; no output projection) for decode, one token a sequence with a
static cache, and prefill. `without_all_reduce` computes wrong values and bounds what any treatment of communication can
reach. Where torch has no kernel for GEMMs of bf16 on the processor it multiplies row by row, and a step of many
sequences is nearly all GEMMs; fp32 has one.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from transformers import LlamaConfig, PreTrainedModel

from benchmarks import record
from benchmarks.ranks import Place
from benchmarks.suite import CPU, Asked, Needs, Setting, Suite
from benchmarks.timing import Effort, Step, host_us
from benchmarks.workloads import decoder
from benchmarks.workloads.decoder import INDUCTOR, WEAVE, Workload, largest_error, without_all_reduce
from examples import tiny_llama

POSITIONS, FILLED = 256, 128
WITHOUT = "without_all_reduce"
NAMES = ("bfloat16", "float32")
DTYPES = Setting("dtypes", NAMES, quick=NAMES[1:], among=NAMES)
CALLS = ("decode:1", "decode:8", "prefill:512", "prefill:2048")
CASES = Setting("cases", CALLS, "prefill:TOKENS,decode:BATCH", quick=CALLS[:1])
LAYERS = Setting("layers", 8, quick=1)
HOSTS = Setting("hosts", (2, 4), quick=(2,))
GBIT = Setting("gbit", 10.0)
DELAY = Setting("delay_us", 50.0, "one way")
ROW = "ROW "


@dataclass(frozen=True)
class Case(decoder.Case):
    dtype: str


@dataclass(frozen=True)
class HostsCase(Case):
    hosts: int
    gbit: float
    delay_us: float


def cases(asked: Asked) -> list[Case]:
    calls = [decoder.parse(word) for word in asked.of(CASES)]
    return [Case(**asdict(call), dtype=dtype) for dtype in asked.of(DTYPES) for call in calls]


def hosts_cases(asked: Asked) -> list[HostsCase]:
    link = asked.of(GBIT), asked.of(DELAY)
    decodes = [case for case in cases(asked) if case.phase == "decode"]
    return [
        HostsCase(case.phase, case.batch, case.seq, case.dtype, hosts, *link)
        for hosts in asked.of(HOSTS)
        for case in decodes
    ]


def variants(model: PreTrainedModel) -> dict[str, Callable[..., object]]:
    compiled = functools.partial(torch.compile, model, dynamic=False, fullgraph=True)
    return {
        "eager": model,
        INDUCTOR: compiled(backend="inductor"),
        WEAVE: compiled(backend="weave"),
        WITHOUT: compiled(backend=without_all_reduce),
    }


def check(workload: Workload, forwards: dict[str, Callable[..., object]]) -> tuple[float, float]:
    """Errors of weave and of Inductor against eager; weave's may be rounding, of which Inductor's is the measure."""
    found = {}
    for name, forward in forwards.items():  # compiles
        workload.reset()
        found[name] = workload(forward).float().clone()
    weave, inductor = (largest_error(found[name], found["eager"]) for name in (WEAVE, INDUCTOR))
    assert weave <= 2 * inductor + 1e-5, f"{workload.case}: weave is {weave:.1e} from eager, Inductor {inductor:.1e}"
    return weave, inductor


def rows_of(place: Place, cases: Sequence[Case], layers: int) -> Iterator[record.Row]:
    torch._dynamo.config.recompile_limit = 64  # one graph for each variant and case
    here = tiny_llama.Ranks(place.rank, place.world, place.device)
    for dtype in dict.fromkeys(case.dtype for case in cases):
        llama = LlamaConfig(
            hidden_size=1024, intermediate_size=2816, num_hidden_layers=layers, num_attention_heads=16,
            num_key_value_heads=8, vocab_size=4096, max_position_embeddings=4096, tie_word_embeddings=False,
        )  # fmt: skip
        model = tiny_llama.make(llama, getattr(torch, dtype), here).model
        for case in (case for case in cases if case.dtype == dtype):
            torch._dynamo.reset()
            forwards = variants(model)
            workload = Workload(model, case, place.device, POSITIONS, FILLED)
            weave_error, inductor_error = check(workload, forwards)
            steps: dict[str, Step] = {name: functools.partial(workload, each) for name, each in forwards.items()}
            effort = Effort(8, 20 if case.phase == "decode" else 1)
            us = host_us(place, steps, effort, workload.reset, warm=0, meets=True)
            yield record.row(
                case={"phase": case.phase, "batch": case.batch, "seq": case.seq, "dtype": dtype, "ranks": place.world},
                weave_us=us[WEAVE],
                baselines={INDUCTOR: us[INDUCTOR], "eager": us["eager"]},
                bound_us=us[WITHOUT],
                parameters={"weave_error": weave_error, "inductor_error": inductor_error},
            )


def rank_main(layers: int, quick: bool, texts: Sequence[str]) -> None:
    """A rank on an emulated host: rank 0 prints rows."""
    torch.set_num_threads(1)
    with tiny_llama.ranks() as here, torch.no_grad():
        place = Place(here.rank, here.world, here.device, quick=quick)
        for row in rows_of(place, [Case(**json.loads(text)) for text in texts], layers):
            here.say(ROW + json.dumps(asdict(row)))
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)


def rows_on_hosts(place: Place, cases: Sequence[HostsCase], asked: Asked) -> Iterator[record.Row]:
    from tests.emulation import emulated_hosts

    gbit, delay_us = asked.of(GBIT), asked.of(DELAY)
    for count in dict.fromkeys(case.hosts for case in cases):
        here = [Case(case.phase, case.batch, case.seq, case.dtype) for case in cases if case.hosts == count]
        texts = [json.dumps(asdict(case)) for case in here]
        with emulated_hosts.hosts(count, emulated_hosts.Link(delay_us, gbit)) as made:
            words = (str(asked.of(LAYERS)), str(int(place.quick)), *texts)
            processes = emulated_hosts.start(made, 1, __name__, *words)
            found = emulated_hosts.finish(processes, 900.0)
        bad = [out for status, out in found if status]
        if bad:
            raise RuntimeError(f"{count} hosts: failed\n{bad[0][-2000:]}")
        for line in found[0][1].splitlines():
            if line.startswith(ROW):
                row = record.Row(**json.loads(line.removeprefix(ROW)))
                row.case.update(hosts=count, gbit=gbit, delay_us=delay_us)
                yield row


SUITES = (
    Suite(
        "llama_layers", "layers of a small Llama on CPU ranks", Needs(CPU, 2, worlds=(2,)), cases,
        lambda place, cases, asked: rows_of(place, cases, asked.of(LAYERS)), ours=(WEAVE,),
        baselines=(INDUCTOR, "eager"), bound="Inductor without the all-reduces", settings=(DTYPES, CASES, LAYERS),
    ),
    Suite(
        "llama_hosts", "a decode step over emulated hosts, against Inductor with Gloo",
        Needs(CPU, worlds=(0,), emulated_hosts=True), hosts_cases, rows_on_hosts, ours=(WEAVE,),
        baselines=(INDUCTOR, "eager"), bound="Inductor without the all-reduces",
        settings=(HOSTS, GBIT, DELAY, DTYPES, CASES, LAYERS),
    ),
)  # fmt: skip


if __name__ == "__main__":
    rank_main(int(sys.argv[1]), sys.argv[2] == "1", sys.argv[3:])
