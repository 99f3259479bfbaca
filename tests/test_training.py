"""Training and layers that are compiled apart: every all-reduce is rewritten, with a norm after it or without."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.graphs.executing import FORCED, executing
from tests.ranks import run_ranks
from weaveopt.records.report import GraphReport

LAYERS, HIDDEN, TOKENS = 3, 64, 14


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 128, bias=False), nn.Linear(128, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _model(mesh: DeviceMesh) -> Model:
    torch.manual_seed(0)
    model = Model()
    plan = {f"layers.{layer}.up": ColwiseParallel() for layer in range(LAYERS)}
    parallelize_module(model, mesh, plan | {f"layers.{layer}.down": RowwiseParallel() for layer in range(LAYERS)})
    return model


def _gradients(model: nn.Module, x: Tensor, autocast: bool) -> list[Tensor]:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = model(x)
    y.float().square().mean().backward()
    return [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]  # type: ignore[misc]


def _check(rank: int, autocast: bool, apart: bool) -> list[tuple[str, int, int]]:
    """Phase, sites and rewritten ones of every graph."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = torch.randn(2, TOKENS // 2, HIDDEN, generator=torch.Generator().manual_seed(2))
    want = _gradients(_model(mesh), x, autocast)
    reports: list[GraphReport] = []
    torch._dynamo.reset()
    model = _model(mesh)
    for part in model.layers if apart else (model,):
        part.compile(backend=executing(FORCED, reports), dynamic=False)
    # Twice as good as two bytes are: roundings fall elsewhere.
    tolerance = 4e-2 if autocast else 1e-4
    for got, expected in zip(_gradients(model, x, autocast), want, strict=True):
        assert (got - expected).norm() <= tolerance * expected.norm()
    return [(report.phase, len(report.decisions), report.num_rewritten) for report in reports]


@pytest.mark.parametrize("apart", [False, True], ids=["whole", "layer by layer"])
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_every_all_reduce_of_a_training_step_is_rewritten(autocast: bool, apart: bool) -> None:
    first, second = run_ranks(_check, 2, autocast, apart, timeout_s=300)
    assert first == second
    # Every layer reduces its result forward, and the gradient of what it read backward; equal layers share a graph.
    each = 1 if apart else LAYERS
    assert {phase for phase, *_ in first} == {"forward", "backward"}
    assert all((count, rewritten) == (each, each) for _, count, rewritten in first), first
