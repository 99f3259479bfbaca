"""One rank of `test_expert_prefetch_gpu`: experts that copy engines pull a layer ahead, against those that are read in
place and the reference; by calls, from CUDA graphs, and after a rank was killed (`ahead_ranks killed`)."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.ranks import Place, barrier, run_and_exit
from tests.gpu.captured import captured
from tests.gpu.prefetch_ranks import Layer, prefetching
from tests.gpu.sharded_ranks import GPT_OSS, MANY, ONE, PLAIN, TIMEOUT_S, Form, make_case
from tests.graphs.tolerances import KERNEL, assert_close
from weaveopt.fabrics import exported
from weaveopt.ops.experts.call import ExpertsKernel
from weaveopt.ops.experts.prefetch.ahead import ModelAhead, _Layer
from weaveopt.ops.experts.prefetch.call import ExpertPrefetchCall, PrefetchForm

LAYERS, TOKENS = 5, 64
REPLAYS = 1000
LONG_CYCLES = 400_000
"""About 0.2 ms, by which a stream is late."""


class Model:
    """Layers of other weights each, shared as one model's."""

    def __init__(self, form: Form, kernels: ExpertsKernel, place: Place, seed: int, layers: int = LAYERS) -> None:
        counts, model = [TOKENS] * place.world, object()
        self.place = place
        self.layers = [
            Layer(make_case(form, "uniform", counts, place, seed + at), place, model) for at in range(layers)
        ]
        exported.share(place.group, TIMEOUT_S)
        self.in_place = prefetching(form, place, kernels)
        self.ahead = replace(self.in_place, form=PrefetchForm.AHEAD.value)
        self.wanted = [each.run(self.in_place) for each in self.layers]
        for layer, got in zip(self.layers, self.wanted, strict=True):
            assert_close(got, layer.case.wanted, KERNEL, f"{form}, {kernels}", got.dtype)

    def call(self, at: int, call: ExpertPrefetchCall | None = None) -> Tensor:
        return self.layers[at].run(call or self.ahead)

    def forward(self, call: ExpertPrefetchCall | None = None, layers: Sequence[int] = ()) -> list[Tensor]:
        return [self.call(at, call) for at in layers or range(len(self.layers))]

    def count_wrong(self, got: Sequence[Tensor], layers: Sequence[int] = ()) -> Tensor:
        """How many layers have other bits than those that are read in place, on the device."""
        found = torch.zeros((), dtype=torch.int64, device=self.place.device)
        for at, each in zip(layers or range(len(self.layers)), got, strict=True):
            found += (each.view(torch.int16) != self.wanted[at].view(torch.int16)).any()
        return found

    def expect(self, got: Sequence[Tensor], what: str, layers: Sequence[int] = ()) -> None:
        wrong = int(self.count_wrong(got, layers))
        assert not wrong, f"{what}: {wrong} of {len(got)} layers have other bits, rank {self.place.rank}"

    @property
    def state(self) -> ModelAhead:
        owned = self.layers[0].owned[0]
        assert owned is not None
        layer, _ = exported.shared_layer(self.place.group, owned)
        [attached] = layer.attached.values()
        assert isinstance(attached, _Layer), attached
        return attached.model

    def poison_captured(self) -> None:
        """NaN in the slots of captures, on the current stream."""
        memory = self.state.slots._captured_memory
        assert memory is not None
        for each in memory:
            each.buffer.fill_(0xFF)


def orders(model: Model) -> int:
    """In order with cold and warm slots, backwards, halves of batches, at random on two streams; late streams."""
    count, chance = len(model.layers), random.Random(model.place.rank)
    for turn in range(3):
        torch.cuda._sleep(LONG_CYCLES)
        model.expect(model.forward(), f"forward {turn}")
    backwards = list(reversed(range(count)))
    model.expect(model.forward(layers=backwards), "backwards", backwards)
    first, halves = replace(model.ahead, last=False), [at for at in range(count) for _ in range(2)]
    got = [model.call(at, first if half % 2 == 0 else None) for half, at in enumerate(halves)]
    model.expect(got, "halves", halves)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    for turn in range(20):
        layers = [chance.randrange(count) for _ in range(12)]
        got = []
        for at in layers:
            with torch.cuda.stream(chance.choice(streams)):
                if chance.random() < 0.5:
                    torch.cuda._sleep(LONG_CYCLES)
                got.append(model.call(at))
        torch.cuda.synchronize()
        model.expect(got, f"at random {turn}", layers)
    return 25


def replays(model: Model) -> None:
    """Bits of eager calls in every replay, with eager calls and NaN in the slots between replays."""
    graph, got = captured(model.forward)
    wrong = torch.zeros((), dtype=torch.int64, device=model.place.device)
    for turn in range(REPLAYS + 20 * model.place.rank):
        if turn % 7 == 0:
            model.poison_captured()
        graph.replay()
        wrong += model.count_wrong(got)
        if turn % 50 == 49:
            wrong += model.count_wrong(model.forward())
    torch.cuda.synchronize()
    assert int(wrong) == 0, f"{int(wrong)} results of replays have other bits, rank {model.place.rank}"


def cut(model: Model) -> None:
    """Graphs of some layers each, replayed in any order: none relies on another one."""
    pieces = [range(2), range(2, 3), range(3, LAYERS), range(LAYERS)]
    graphs = [captured(lambda piece=piece: model.forward(layers=piece)) for piece in pieces]  # type: ignore[misc]
    chance = random.Random(7)
    for turn in range(60):
        at = turn % len(pieces) if turn < 20 else chance.randrange(len(pieces))
        if turn % 3 == 0:
            model.poison_captured()
        graph, got = graphs[at]
        graph.replay()
        model.expect(got, f"piece {at}", pieces[at])


def streams_of_one_graph(model: Model) -> None:
    """Two streams of one capture, each with halves of the layers."""

    def both() -> list[Tensor]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        first = [model.call(at) for at in range(LAYERS)]
        with torch.cuda.stream(side):
            second = [model.call(at) for at in range(LAYERS)]
        torch.cuda.current_stream().wait_stream(side)
        return first + second

    graph, got = captured(both)
    for _ in range(50):
        model.poison_captured()
        graph.replay()
        model.expect(got, "two streams of one graph", [*range(LAYERS), *range(LAYERS)])


def copies_are_nodes(model: Model) -> None:
    """A replay pulls each layer but the first one, by memcpys; no kernel of another name than in place runs."""
    names = {}
    for name, call in (("in place", model.in_place), ("ahead", model.ahead)):
        graph, _ = captured(lambda call=call: model.forward(call))  # type: ignore[misc]
        graph.replay()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
            graph.replay()
            torch.cuda.synchronize()
        names[name] = [each.name for each in seen.events() if each.device_type == DeviceType.CUDA]
    memcpys = {name: [each for each in found if each.lower().startswith("memcpy")] for name, found in names.items()}
    pulled = len(memcpys["ahead"]) - len(memcpys["in place"])
    assert pulled == 2 * (model.place.world - 1) * (LAYERS - 1), (pulled, memcpys)
    kernels = {name: len(found) - len(memcpys[name]) for name, found in names.items()}
    assert kernels["ahead"] == kernels["in place"], names


def with_cache(model: Model, form: Form) -> None:
    """Some and all of the missing experts kept for good: the same bits, and fewer bytes in the slots."""
    expert_bytes = sum(each.nbytes for each in model.layers[0].exported() if each.dim() == 3) // form.experts
    sizes = []
    for experts in (0, form.experts // 2, 10**6):
        call = replace(model.ahead, cache_bytes=experts * expert_bytes)
        for turn in range(3):
            model.expect(model.forward(call), f"cache of {experts}, forward {turn}")
        graph, got = captured(lambda call=call: model.forward(call))  # type: ignore[misc]
        for _ in range(5):
            graph.replay()
            model.expect(got, f"cache of {experts}, replay")
        owned = model.layers[0].owned[0]
        assert owned is not None
        attached = exported.shared_layer(model.place.group, owned)[0].attached["ahead", call.cache_bytes]
        assert isinstance(attached, _Layer)
        sizes.append(attached.model.resident.buffer.nbytes)
    assert sizes[0] > sizes[1] > sizes[2] or form.experts == 1, sizes


def few_tokens_in_place(place: Place) -> None:
    """Which form runs is this rank's own token count's."""
    model = Model(PLAIN, ExpertsKernel.TRITON, place, seed=70, layers=2)
    few = replace(model.ahead, in_place_tokens=TOKENS)
    model.expect(model.forward(few), "few tokens")
    owned = model.layers[0].owned[0]
    assert owned is not None
    layer, _ = exported.shared_layer(place.group, owned)
    assert not layer.attached, "nothing was fetched"
    model.expect(model.forward(replace(few, in_place_tokens=TOKENS - 1)), "more tokens")
    assert layer.attached


def program(place: Place) -> None:
    with torch.no_grad():
        done = 0
        for at, (form, kernels) in enumerate(
            ((PLAIN, ExpertsKernel.TRITON), (MANY, ExpertsKernel.HOPPER), (GPT_OSS, ExpertsKernel.HOPPER),
             (ONE, ExpertsKernel.HOPPER))
        ):  # fmt: skip
            model = Model(form, kernels, place, seed=10 * at)
            done += orders(model)
            if form in (PLAIN, MANY):
                replays(model)
                cut(model)
                streams_of_one_graph(model)
                copies_are_nodes(model)
            with_cache(model, form)
            barrier()
            place.say(f"{done} orders, {form}")
        models = [Model(PLAIN, ExpertsKernel.TRITON, place, 50), Model(MANY, ExpertsKernel.HOPPER, place, 60, layers=3)]
        graphs = [captured(model.forward) for model in models]
        for turn in range(50):
            for model, (graph, got) in zip(models, graphs, strict=True):
                graph.replay()
                model.expect(got, f"replay {turn} of two models")
            for at in range(LAYERS):
                for model in models[: 2 if at < 3 else 1]:
                    model.expect([model.call(at)], f"call {turn} of two models", [at])
        few_tokens_in_place(place)
    barrier()
    print("experts fetched ahead agree", flush=True)


def killed(place: Place) -> None:
    """The last rank is killed while this one calls; its experts are still pulled, with the same bits."""
    with torch.no_grad():
        model = Model(MANY, ExpertsKernel.HOPPER, place, seed=4)
        graph, got = captured(model.forward)
        model.expect(model.forward(), "before the kill")
        barrier()
        if place.rank == place.world - 1:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        end, calls = time.monotonic() + 3.0, 0
        while time.monotonic() < end:
            model.poison_captured()
            graph.replay()
            model.expect(got, "a replay after the kill")
            model.expect(model.forward(), "a call after the kill")
            calls += 1
    print(f"rank {place.rank}: a killed rank is still pulled from, {calls} calls", flush=True)
    sys.stdout.flush()
    os._exit(0)  # no barrier: nobody is left to wait for


if __name__ == "__main__":
    run_and_exit(killed if sys.argv[1:] == ["killed"] else program)
