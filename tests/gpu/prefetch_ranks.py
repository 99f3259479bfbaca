"""One rank of `test_expert_prefetch_gpu`: experts that peers read in symmetric memory, by the operation, from CUDA
graphs, and after a rank was killed (`prefetch_ranks killed`)."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import fields, replace

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.ranks import Place, barrier, run_and_exit
from tests.gpu.captured import captured
from tests.gpu.sharded_ranks import (
    COUNTS,
    FORMS,
    GPT_OSS,
    MANY,
    ONE,
    PLAIN,
    ROUTINGS,
    TIMEOUT_S,
    Case,
    Form,
    call_of,
    make_case,
)
from tests.graphs.tolerances import KERNEL, assert_close
from weaveopt.errors import ExportError
from weaveopt.fabrics import exported
from weaveopt.ops.experts.call import ExpertsKernel
from weaveopt.ops.experts.exchange.call import ExpertExchangeCall, SpreadExpertsCall
from weaveopt.ops.experts.prefetch.call import ExpertPrefetchCall
from weaveopt.records.candidate import Fabric

REPLAYS = 300
KERNELS = (ExpertsKernel.TRITON, ExpertsKernel.HOPPER)


class Layer:
    """One rank's experts as an exporter, stored as parameters are: transposed ones as `[experts, in, out]`."""

    def __init__(self, case: Case, place: Place, model: object = None) -> None:
        self.case, self.group = case, place.group
        self.owned = [None if each is None else stored(each) for each in case.operands]
        self.before = [None if each is None else each.clone() for each in self.owned]
        exported.register(place.group, self, model)

    def exported(self) -> tuple[Tensor, ...]:
        return tuple(each for each in self.owned if each is not None)

    def moved(self) -> None:
        return None

    def operands(self) -> list[Tensor | None]:
        return [
            owned if owned is None or each is None or each.is_contiguous() else owned.transpose(1, 2)
            for each, owned in zip(self.case.operands, self.owned, strict=True)
        ]

    def run(self, call: SpreadExpertsCall) -> Tensor:
        by_weights, by_tokens = torch.ops.weave.expert_prefetch, torch.ops.weave.expert_exchange
        operation = by_weights if isinstance(call, ExpertPrefetchCall) else by_tokens
        case = self.case
        result: Tensor = operation(case.x, case.experts, case.weights, *self.operands(), call.encode())
        return result


def stored(weight: Tensor) -> Tensor:
    return (weight if weight.is_contiguous() else weight.transpose(1, 2)).clone()


def prefetching(form: Form, place: Place, kernels: ExpertsKernel) -> ExpertPrefetchCall:
    given = call_of(form, place, kernels, same_tokens=False)
    shared = {field.name: getattr(given, field.name) for field in fields(SpreadExpertsCall)}
    return ExpertPrefetchCall(**{**shared, "independent": True}, kernels=kernels.value)


def pulling(form: Form, place: Place) -> ExpertExchangeCall:
    """The library form of independent ranks."""
    given = call_of(form, place, ExpertsKernel.TRITON, same_tokens=False)
    return replace(given, fabric=Fabric.LIBRARY, independent=True)


def shared_layer(form: Form, routing: str, counts: Sequence[int], place: Place, seed: int) -> Layer:
    layer = Layer(make_case(form, routing, counts, place, seed), place)
    exported.share(place.group, TIMEOUT_S)
    return layer


def expect_shared(layer: Layer, place: Place) -> None:
    """Values are what they were, each tensor has a storage of its own, and each rank reads the others' parts."""
    for owned, before in zip(layer.owned, layer.before, strict=True):
        if owned is None or before is None:
            continue
        assert torch.equal(owned, before) and owned.stride() == before.stride() and owned.storage_offset() == 0
        parts = exported.places(place.group, owned)
        assert parts[place.rank].data_ptr() == owned.data_ptr() and len({each.data_ptr() for each in parts}) == len(
            parts
        )
        sums = torch.stack([each.double().sum() for each in parts]).cpu()
        wanted = [torch.zeros(len(parts), dtype=torch.float64) for _ in range(place.world)]
        dist.all_gather(wanted, sums)
        assert all(torch.equal(each, sums) for each in wanted), f"rank {place.rank} reads other values"


def grid(place: Place) -> None:
    """Ranks with other token counts, also none, in every form and by every kernel."""
    done = 0
    for at, form in enumerate(FORMS):
        for turn in range(2):
            few, many = COUNTS[(at + turn) % len(COUNTS)]
            counts = [few] + [many] * (place.world - 1)
            routing = ROUTINGS[(2 * at + turn) % len(ROUTINGS)]
            layer = shared_layer(form, routing, counts, place, seed=10 * at + turn)
            if not turn:
                expect_shared(layer, place)
            calls: list[SpreadExpertsCall] = [pulling(form, place)]
            kernels = KERNELS if form in (PLAIN, GPT_OSS, ONE) else KERNELS[1:]
            calls += [prefetching(form, place, each) for each in kernels]
            for call in calls:
                got, what = layer.run(call), f"{routing}, {counts}, {call}, rank {place.rank}"
                assert_close(got, layer.case.wanted, KERNEL, what, got.dtype)
                assert torch.equal(layer.run(call), got), f"{what}: other bits in another run"
                done += 1
            barrier()  # the layer's memory goes when this rank's name of it does
    place.say(f"{done} calls agree")


def replays(place: Place, form: Form, kernels: ExpertsKernel, tokens: int) -> None:
    """Graphs whose inputs change, each rank with as many replays as it likes: the bits of eager calls."""
    counts = [tokens] * place.world
    layer, call = shared_layer(form, "uniform", counts, place, seed=1), prefetching(form, place, kernels)
    others = [make_case(form, routing, counts, place, seed) for seed, routing in enumerate(("last rank", "skewed"), 2)]
    inputs = [(each.x.clone(), each.experts.clone(), each.weights.clone()) for each in (layer.case, *others)]
    wanted = []
    for given in inputs:
        layer.case = replace(layer.case, x=given[0], experts=given[1], weights=given[2])
        wanted.append(layer.run(call))
    static = tuple(each.clone() for each in inputs[0])
    layer.case = replace(layer.case, x=static[0], experts=static[1], weights=static[2])
    graph, result = captured(lambda: layer.run(call))
    wrong = torch.zeros((), dtype=torch.int64, device=place.device)
    for turn in range(REPLAYS + 50 * place.rank):
        at = turn % len(inputs)
        for target, source in zip(static, inputs[at], strict=True):
            target.copy_(source)
        graph.replay()
        wrong += (result.view(torch.int16) != wanted[at].view(torch.int16)).any()
        if turn % 100 == 99:
            layer.run(call)  # an eager call between them
    torch.cuda.synchronize()
    assert int(wrong) == 0, f"{int(wrong)} replays have other bits: {form}, {kernels}, rank {place.rank}"
    barrier()


def refusals(place: Place) -> None:
    layer, call = (
        shared_layer(PLAIN, "uniform", [8] * place.world, place, seed=3),
        prefetching(PLAIN, place, KERNELS[0]),
    )
    assert layer.owned[0] is not None
    layer.owned[0] = layer.owned[0].clone()
    said = ""
    try:
        layer.run(call)
    except ExportError as error:
        said = str(error)
    assert "another storage" in said, said
    exported.share(place.group, TIMEOUT_S)
    got = layer.run(call)
    assert_close(got, layer.case.wanted, KERNEL, "shared again", got.dtype)
    barrier()


def program(place: Place) -> None:
    with torch.no_grad():
        grid(place)
        for form, kernels, tokens in ((PLAIN, KERNELS[0], 5), (PLAIN, KERNELS[1], 300), (MANY, KERNELS[1], 64)):
            replays(place, form, kernels, tokens)
        refusals(place)
    barrier()
    print("prefetched experts agree", flush=True)


def killed(place: Place) -> None:
    """The last rank is killed while this one calls; its weights are still read, with the same bits."""
    last = place.world - 1
    with torch.no_grad():
        layer, call = (
            shared_layer(MANY, "uniform", [16] * place.world, place, seed=4),
            prefetching(MANY, place, KERNELS[0]),
        )
        graph, result = captured(lambda: layer.run(call))
        before = layer.run(call).clone()
        barrier()
        if place.rank == last:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        end, calls = time.monotonic() + 3.0, 0
        while time.monotonic() < end:
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(result, before) and torch.equal(layer.run(call), before), "other bits after the kill"
            calls += 1
    print(f"rank {place.rank}: a killed rank is still read, {calls} calls", flush=True)
    sys.stdout.flush()
    os._exit(0)  # no barrier: nobody is left to wait for


if __name__ == "__main__":
    run_and_exit(killed if sys.argv[1:] == ["killed"] else program)
