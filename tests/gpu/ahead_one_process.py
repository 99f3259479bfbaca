"""Experts fetched ahead by each of 3 to 8 ranks, in one process on one GPU: `python -m tests.gpu.ahead_one_process`.

Peers' parts are tensors of this GPU. Ranges, slices of several peers, two copies in flight and caches are those of that
many GPUs; times, and memory of other GPUs, are not.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

import weaveopt.ops  # noqa: F401  (registers torch.ops.weave)
from tests.gpu.captured import captured
from weaveopt.fabrics.exported import SharedLayer
from weaveopt.ops.experts.call import ExpertsCall, ExpertsKernel
from weaveopt.ops.experts.op import compute
from weaveopt.ops.experts.prefetch.ahead import ModelAhead
from weaveopt.ops.experts.prefetch.ring import SLICE_BYTES, Ring
from weaveopt.ops.experts.shapes import ExpertOperands

EXPERTS, HIDDEN, INNER, CHOICES, TOKENS, LAYERS = 3, 2048, 1024, 2, 96, 4
DTYPE = torch.bfloat16


class Nobody:
    """Stands for the exporter of a layer."""


class Layers:
    """Layers with the experts of `world` ranks, and what they compute."""

    def __init__(self, world: int, device: torch.device) -> None:
        random = torch.Generator(device).manual_seed(world)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random, device=device, dtype=DTYPE) * shape[-1] ** -0.5

        self.call = ExpertsCall("silu", gated=True, kernels=ExpertsKernel.HOPPER.value)
        self.owner = Nobody()
        self.weights = [
            (normal(world * EXPERTS, 2 * INNER, HIDDEN), normal(world * EXPERTS, HIDDEN, INNER)) for _ in range(LAYERS)
        ]
        self.parts = [
            tuple(tuple(part.clone() for part in each.chunk(world)) for each in pair) for pair in self.weights
        ]
        choices = torch.rand(TOKENS, world * EXPERTS, generator=random, device=device).topk(CHOICES).indices
        x = normal(TOKENS, HIDDEN) * HIDDEN**0.5
        share = torch.rand(TOKENS, CHOICES, generator=random, device=device)
        self.operands = ExpertOperands(x, choices, share, self.weights[0][0], None, self.weights[0][1], None)
        self.wanted = [self.computed(*pair) for pair in self.weights]

    def computed(self, gate_up: object, down: object) -> Tensor:
        return compute(replace(self.operands, gate_up=gate_up, down=down), self.call)  # type: ignore[arg-type]

    def shared(self) -> list[SharedLayer]:
        model = object()
        return [SharedLayer(weakref.ref(self.owner), model, places=parts) for parts in self.parts]  # type: ignore[arg-type]

    def forward(self, model: ModelAhead, rank: int) -> list[Tensor]:
        found = []
        for at, (gate_up, down) in enumerate(self.parts):
            with model.reading(at, gate_up[rank], down[rank], last=True) as weights:
                assert weights is not None, at
                found.append(self.computed(*weights))
        return found


def main() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    done = 0
    for world in (3, 4, 8):
        layers = Layers(world, device)
        assert layers.parts[0][0][0].nbytes >= 2 * SLICE_BYTES
        for rank in range(world):
            for cached in (0, EXPERTS + 1, (world - 1) * EXPERTS):
                model = ModelAhead(layers.shared(), (0, 1), Ring(world, rank, EXPERTS, cached))
                graph = None
                for turn in range(4):
                    if turn == 2:
                        graph, got = captured(partial(layers.forward, model, rank))
                    if graph is None:
                        got = layers.forward(model, rank)
                    else:
                        graph.replay()
                    for at, (each, wanted) in enumerate(zip(got, layers.wanted, strict=True)):
                        assert torch.equal(each, wanted), f"layer {at}, rank {rank} of {world}, {cached} kept, {turn}"
                    done += 1
                del graph, got
                model.close()
    print(f"{done} forwards agree", flush=True)


if __name__ == "__main__":
    with torch.no_grad():
        main()
