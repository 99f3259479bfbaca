"""Layers of mixtures on two GPUs, experts spread over them, each with its own batch: weights that travel, and tokens.

bf16, random weights, sequences of up to 4096 tokens without a cache; attention and router are replicated
(`weaveopt.DataParallelExperts`). Variants are compiled from one capture by Dynamo, with one form forced, and launched
without CUDA graphs, as tokens that travel between ranks with other batches cannot be held by one:

ahead        copy engines pull the missing experts a layer ahead
in_place     kernels read the peer's experts over the link
moe_sharded  tokens travel, by weaveopt's kernels
all_to_all   tokens travel, by transformers' `AllToAllEP`, in eager mode: its graphs break in every layer
resident     `ahead` with all missing experts kept for good: nothing is pulled. The bound

With counts `equal`, a step is one forward. With `unequal` a rank has half as many tokens as on average, and the other
rank the rest; a step is two forwards, between which they change places, and the times are of one. With routing `skewed`
half of the tokens choose an eighth of the experts first. `steady_*` are means of a second back to back.

The profile need not know the forms: reads in place, and what pulls slow down, are made up where it lacks them.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

import weaveopt
from benchmarks import record
from benchmarks.ranks import Place, barrier, slowest
from benchmarks.steady import Steady, steadily
from benchmarks.suite import GPU, Asked, Needs, Setting, Suite, product
from benchmarks.timing import Effort, Step, attempt, capture, enqueued_us, graphs_us, nothing
from benchmarks.workloads import decoder
from benchmarks.workloads.decoder import SHAPES, Compile, Variants, Workload
from weaveopt import cost_model
from weaveopt.config import OptionValue
from weaveopt.cost_model import Machine
from weaveopt.cost_model.machine import CopyContention, Curve, Point
from weaveopt.cost_model.prefetch import IN_PLACE as READ_IN_PLACE
from weaveopt.cost_model.prefetch import READS
from weaveopt.records.candidate import Fabric
from weaveopt.records.report import Decision, GraphReport
from weaveopt.reporting.timeline import total

AHEAD, IN_PLACE, TOKENS, ALL_TO_ALL, RESIDENT = "ahead", "in_place", "moe_sharded", "all_to_all", "resident"
COMPILED = (AHEAD, IN_PLACE, TOKENS, RESIDENT)
STEADY = (AHEAD, TOKENS, RESIDENT)
WEIGHTS = "expert_prefetch"
MODELS = Setting("models", ("qwen3-30b-a3b", "mixtral-8x22b"), quick=("qwen3-30b-a3b",), among=tuple(SHAPES))
COUNTED = Setting("tokens", (2048, 8192, 16384), "of a rank, on average", quick=(2048,))
ROUTINGS = Setting("routings", ("even", "skewed"), quick=("even",), among=("even", "skewed"))
COUNTS = Setting("counts", ("equal", "unequal"), quick=("equal",), among=("equal", "unequal"))
LAYERS = Setting("layers", 0, "0: the model's number for decoder layers", quick=2)
PROFILE = Setting("profile", "h100x2", "machine profile")
SEQUENCE = 4096
ALL_BYTES, SHIFT = 1 << 40, 6.0
LARGEST_MEDIAN_ERROR = 0.03
"""Bound for a token's hidden state, as a share of its norm: bf16. Rounding gives some tokens other experts."""
MADE_UP_READS = tuple(Point(1 << power, 20.0 + (1 << power) / 320e3) for power in range(18, 34, 3))


@dataclass(frozen=True)
class Case:
    model: str
    tokens: int
    counts: str
    routing: str


class SkewedRouters:
    """Routers by which half of the tokens choose an eighth of the experts first, while it is entered.

    Logits are of about 1: a direction that is as long moves those of the few experts by `SHIFT` times that, up or down.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._weights = [module.gate.weight for module in model.modules() if hasattr(module, "experts")]
        random = torch.Generator(self._weights[0].device).manual_seed(1)
        self._added = []
        for weight in self._weights:
            direction = torch.randn(weight.shape[1], generator=random, device=weight.device)
            added = torch.zeros_like(weight)
            added[: max(1, len(weight) // 8)] = (SHIFT * len(direction) ** -0.5 * direction).to(weight.dtype)
            self._added.append(added)

    def __enter__(self) -> None:
        for weight, added in zip(self._weights, self._added, strict=True):
            weight.add_(added)

    def __exit__(self, *_: object) -> None:
        for weight, added in zip(self._weights, self._added, strict=True):
            weight.sub_(added)


def skew_of(model: PreTrainedModel) -> str:
    """The option `skew` for the rows that `SkewedRouters` brings to the few experts: half of the tokens choose among
    them first, as often as there are any, and the others as often as any experts."""
    experts, choices = model.config.num_local_experts, model.config.num_experts_per_tok
    few = max(1, experts // 8)
    rows = 0.5 * min(choices, few) / choices + 0.5 * few / experts
    return f"{rows:.4f}:{few / experts:.4f}"


def profiles(base: str, place: Place, folder: Path) -> dict[str, str]:
    """For each form a profile that has what it needs and lacks what the other one needs; the same for all ranks."""
    machine = cost_model.load(base)
    assert machine.contention is not None, f"{base} has no contention"
    pulls = machine.contention.copies or CopyContention(1.0, 1.0)
    made = {
        AHEAD: without_reads(replace(machine, contention=replace(machine.contention, copies=pulls))),
        IN_PLACE: with_reads(replace(machine, contention=replace(machine.contention, copies=None))),
    }
    if place.rank == 0:
        for name, each in made.items():
            (folder / f"{name}.json").write_text(cost_model.dumps(replace(each, name=name)), encoding="utf-8")
    barrier()
    return {name: str(folder / f"{name}.json") for name in made}


def without_reads(machine: Machine) -> Machine:
    costs = tuple(
        replace(each, curves=tuple(curve for curve in each.curves if curve.op != READS))
        for each in machine.fabric_costs
    )
    return replace(machine, fabric_costs=costs)


def with_reads(machine: Machine) -> Machine:
    if any(curve.op == READS for each in machine.fabric_costs for curve in each.curves):
        return machine
    added = Curve(machine.origins[0][0], READS, READ_IN_PLACE, 2, MADE_UP_READS)
    costs = tuple(
        replace(each, curves=(*each.curves, added)) if each.fabric is Fabric.PEER else each
        for each in machine.fabric_costs
    )
    return replace(machine, fabric_costs=costs)


def ways(files: Mapping[str, str], tokens: int, most: int, skew: str) -> dict[str, Compile]:
    from weaveopt.backend import weave

    def way(form: str, file: str, rule: str, other: str, cache_bytes: int = 0) -> Compile:
        options: dict[str, OptionValue] = {
            "machine": files[file], "force": (rule,), "disable": (other, "token_split"), "strict": True,
            "batch_tokens": tokens, "max_tokens": most, "expert_cache_bytes": cache_bytes, "timeout_s": 60.0,
        }  # fmt: skip
        if skew:
            options["skew"] = skew
        return lambda gm, inputs: weave(gm, inputs, options=options)

    return {
        AHEAD: way(AHEAD, AHEAD, WEIGHTS, TOKENS),
        IN_PLACE: way(IN_PLACE, IN_PLACE, WEIGHTS, TOKENS),
        TOKENS: way(TOKENS, AHEAD, TOKENS, WEIGHTS),
        RESIDENT: way(RESIDENT, AHEAD, WEIGHTS, TOKENS, ALL_BYTES),
    }


class Batch:
    """A batch of this rank, its graph in every variant, and what transformers computes."""

    def __init__(self, model: PreTrainedModel, tokens: int, case: Case, files: Mapping[str, str], place: Place) -> None:
        sequences = max(tokens // SEQUENCE, 1)
        asked = decoder.Case("prefill", sequences, tokens // sequences)
        self.tokens, self.model = tokens, model
        self.workload = Workload(model, asked, place.device, gives_positions=False)
        most = 2 * case.tokens
        skew = skew_of(model) if case.routing == "skewed" else ""
        self.variants = Variants(model, ways(files, case.tokens, most, skew))
        self.variants.chosen = AHEAD
        for name in COMPILED:
            self.run(name)
        self.reports = dict(zip(COMPILED, weaveopt.report().graphs[-len(COMPILED) :], strict=True))

    def run(self, name: str) -> Tensor:
        return self.workload(self.model if name == ALL_TO_ALL else self.variants.running(name))


def theirs(model: PreTrainedModel) -> Callable[[], object]:
    """Puts transformers' all-to-all in the place of weaveopt's operation, inside of the context that it returns."""
    from transformers.distributed.expert_parallel import AllToAllEP

    from weaveopt.integrations.transformers.expert_exchange import LAYERS, ExpertExchange

    found = {}
    for layer in LAYERS:
        found[layer] = AllToAllEP(layer.experts, layer.ep_mesh, layer.tp_mesh)
        found[layer].experts_forward = layer.experts_forward
    return lambda: mock.patch.object(ExpertExchange, "__call__", lambda layer, *args: found[layer](*args))


def median_error(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.float(), wanted.float()
    return float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).median())


def exchanges(report: GraphReport) -> list[Decision]:
    return [each for each in report.decisions if each.site.kind == "expert_exchange"]


def row_of(
    case: Case, place: Place, model: PreTrainedModel, batches: Sequence[Batch], all_to_all: Callable[[], object]
) -> record.Row:
    def step(name: str) -> Step:
        def run() -> None:
            for batch in batches:
                batch.run(name)

        def patched() -> None:
            with all_to_all():  # type: ignore[attr-defined]
                run()

        return patched if name == ALL_TO_ALL else run

    names = (*COMPILED, ALL_TO_ALL)
    errors = []
    for batch in batches:
        with all_to_all():  # type: ignore[attr-defined]
            wanted = batch.run(ALL_TO_ALL)
        errors += [median_error(batch.run(name), wanted) for name in COMPILED]
    error = slowest([max(errors)])[0]
    steps, calls = {name: step(name) for name in names}, len(batches)
    repeats = 4 if case.tokens > 4096 else 8
    us = enqueued_us(place, steps, Effort(4, repeats), calls=calls)
    steady: dict[str, Steady] = {}
    if not place.quick:
        steady = {name: steadily(steps[name], nothing, us[name] * calls, place) for name in STEADY}
    replayed: dict[str, float] = {}
    if case.counts == "equal":
        graph = attempt(place, "a CUDA graph", lambda: capture(steps[AHEAD], torch.cuda.graph_pool_handle()))
        if graph is not None:
            replayed = graphs_us(place, {AHEAD: graph}, Effort(4, repeats))
    report, extra = batches[0].reports[AHEAD], {}
    for decision in exchanges(report)[-1:]:
        extra = {name: value for name, value in decision.chosen.parameters if name != "form"}
    for name in COMPILED:
        chosen = {each.chosen.choice for batch in batches for each in exchanges(batch.reports[name])}
        assert chosen == {TOKENS if name == TOKENS else WEIGHTS}, f"{name}: {chosen}"
    assert error <= LARGEST_MEDIAN_ERROR, f"{case}: half of the tokens are off by more than {error:.3f} of their norm"
    return record.row(
        case={
            **asdict(case), "ranks": place.world, "layers": model.config.num_hidden_layers, "dtype": "bfloat16",
        },
        weave_us=us[AHEAD],
        baselines={name: us[name] for name in (IN_PLACE, TOKENS, ALL_TO_ALL)},
        predicted_us=sum(total(batch.reports[AHEAD], fused=True).us for batch in batches) / calls,
        bound_us=us[RESIDENT],
        parameters={
            "median_error": round(error, 5), "over_resident": round(us[AHEAD] / us[RESIDENT], 4),
            "moe_sharded_predicted_us": round(total(batches[0].reports[TOKENS], fused=True).us, 1),
            **({"ahead_graph_us": round(replayed[AHEAD], 1)} if replayed else {}),
            **{f"steady_{name}_us": round(each.us / calls, 1) for name, each in steady.items()},
            **{f"{name}_watts": round(each.watts) for name, each in steady.items()},
            **{f"{name}_sm_mhz": round(each.sm_mhz) for name, each in steady.items()},
            **{name: value for name, value in extra.items() if isinstance(value, int | float | str)},
        },
    )  # fmt: skip


def counts_of(case: Case, place: Place) -> list[int]:
    """Tokens of this rank's forwards of a step."""
    if case.counts == "equal":
        return [case.tokens]
    pair = [case.tokens // 2, case.tokens * 2 - case.tokens // 2]
    return pair if place.rank % 2 == 0 else pair[::-1]


def rows(place: Place, cases: Sequence[Case], asked: Asked) -> Iterator[record.Row]:
    folders: list[str | None] = [tempfile.mkdtemp() if place.rank == 0 else None]
    dist.broadcast_object_list(folders)
    files = profiles(asked.of(PROFILE), place, Path(str(folders[0])))
    for name in dict.fromkeys(case.model for case in cases):
        shape = SHAPES[name]
        placement = weaveopt.DataParallelExperts(place.world)
        model = decoder.make(place, shape, asked.of(LAYERS) or shape.layers, placement)
        weaveopt.share_experts(model)
        all_to_all, routers = theirs(model), SkewedRouters(model)
        of_model = [case for case in cases if case.model == name]
        for case in of_model:
            torch._dynamo.reset()
            batches = [Batch(model, tokens, case, files, place) for tokens in counts_of(case, place)]
            with routers if case.routing == "skewed" else nullcontext():
                yield row_of(case, place, model, batches, all_to_all)
            del batches
            gc.collect()
            torch.cuda.empty_cache()
        barrier()
        del model, all_to_all, routers
        gc.collect()
        torch.cuda.empty_cache()


SUITES = (
    Suite(
        "expert_prefetch_gpu", "layers of mixtures whose weights travel a layer ahead", Needs(GPU, 2, worlds=(2,)),
        lambda asked: product(
            Case, asked.of(MODELS), asked.of(COUNTED), asked.of(COUNTS), asked.of(ROUTINGS)
        ),
        rows, ours=(AHEAD,), baselines=(IN_PLACE, TOKENS, ALL_TO_ALL), predicted="the graph with form `ahead`",
        bound=f"{RESIDENT}: all experts in the GPU's own memory",
        settings=(MODELS, COUNTED, COUNTS, ROUTINGS, LAYERS, PROFILE), by_name_only=True,
    ),
)  # fmt: skip
