"""Sequence-parallel models on spawned ranks: forward and backward equal eager, and the report names the choices."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import weaveopt
from tests.graphs.executing import executing
from tests.ranks import run_ranks
from weaveopt.config import Config
from weaveopt.records.report import GraphReport

NUM_LAYERS, HIDDEN, INNER, HEAD = 1, 48, 96, 8
FORCED = Config(force=("gemm_reduce_scatter", "all_gather_gemm"), strict=True, timeout_s=30.0, compile_timeout_s=60.0)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 1e-2}
"""Error bound relative to a tensor's norm; half of what two bytes permit, since roundings differ."""


class Layer(nn.Module):
    """Attention and a gated MLP."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.q, self.k, self.v = (nn.Linear(HIDDEN, HIDDEN, bias=bias) for _ in range(3))
        self.o = nn.Linear(HIDDEN, HIDDEN, bias=bias)
        self.gate, self.up = (nn.Linear(HIDDEN, INNER, bias=bias) for _ in range(2))
        self.down = nn.Linear(INNER, HIDDEN, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm1(x)
        q, k, v = (each(rows).unflatten(-1, (-1, HEAD)).transpose(-2, -3) for each in (self.q, self.k, self.v))
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(-2, -3).flatten(-2))
        rows = self.norm2(x)
        return x + self.down(torch.nn.functional.silu(self.gate(rows)) * self.up(rows))  # type: ignore[no-any-return]


def parallel(mesh: DeviceMesh, dim: int, bias: bool, dtype: torch.dtype) -> nn.Module:
    """Activations are shards along `dim` between layers: of [batch, length, hidden], or of [length, hidden]."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(bias) for _ in range(NUM_LAYERS))).to(dtype)
    plan: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if last.startswith("norm"):
            plan[name] = SequenceParallel(sequence_dim=dim)
        elif last in ("o", "down"):
            plan[name] = RowwiseParallel(output_layouts=Shard(dim))
        elif isinstance(module, nn.Linear):
            plan[name] = ColwiseParallel(input_layouts=Shard(dim))
    return parallelize_module(model, mesh, plan)


def gradients(model: nn.Module, shard: Tensor) -> list[Tensor]:
    """The result, the gradient of the shard, and those of this rank's parts of the parameters."""
    shard = shard.clone().requires_grad_()
    y = model(shard)
    y.float().square().mean().backward()
    assert shard.grad is not None
    of_parameters = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
    return [y.detach(), shard.grad, *(each for each in of_parameters if each is not None)]


def close(got: list[Tensor], want: list[Tensor], what: str) -> None:
    assert len(got) == len(want)
    largest = max(float(each.float().norm()) for each in want)
    for index, (each, expected) in enumerate(zip(got, want, strict=True)):
        assert each.shape == expected.shape and each.dtype == expected.dtype
        # Of keys, the gradient of a bias is 0 but for rounding.
        error, size = float((each - expected).float().norm()), max(float(expected.float().norm()), largest / 100)
        assert error <= TOLERANCE[expected.dtype] * size, f"{what}: tensor {index} is off by {error} of {size}"


def chosen(reports: list[GraphReport]) -> list[tuple[str, str, str, str]]:
    """Phase, kind, choice and fabric of every site."""
    return [
        (report.phase, decision.site.kind, decision.chosen.choice, decision.chosen.fabric.value)
        for report in reports
        for decision in report.decisions
    ]


def shard_of(dim: int, rows: int, batch: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    sizes = (batch, rows, HIDDEN) if dim else (rows, HIDDEN)
    return torch.randn(*sizes, generator=generator).to(dtype)


def run_training(rank: int, dtype: torch.dtype) -> list[tuple[str, str, str, str]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = []
    forms = ((1, False, 5, 3), (0, True, 8, 1), (1, True, 4, 1))
    for dim, bias, rows, batch in forms if dtype is torch.float32 else forms[:1]:
        shard = shard_of(dim, rows, batch, dtype)
        want = gradients(parallel(mesh, dim, bias, dtype), shard)
        reports: list[GraphReport] = []
        torch._dynamo.reset()
        model = torch.compile(parallel(mesh, dim, bias, dtype), backend=executing(FORCED, reports), dynamic=False)
        for _ in range(2):
            model.zero_grad()
            close(gradients(model, shard), want, f"dim {dim}, bias {bias}, {rows} rows")
        found += chosen(reports)
    return found


@pytest.mark.parametrize(("world", "dtype"), [(2, torch.float32), (3, torch.bfloat16)])
def test_training_equals_eager(world: int, dtype: torch.dtype) -> None:
    outcomes = run_ranks(run_training, world, dtype, timeout_s=300)
    assert all(each == outcomes[0] for each in outcomes)
    ours = {"all_gather": "all_gather_gemm", "reduce_scatter": "gemm_reduce_scatter"}
    for phase, kind, choice, fabric in outcomes[0]:
        assert kind not in ours or (choice, fabric) == (ours[kind], "shm"), (phase, kind, choice)
    assert {(phase, kind) for phase, kind, *_ in outcomes[0]} >= {(p, k) for p in ("forward", "backward") for k in ours}


def run_inductor(rank: int) -> tuple[float, str]:
    """Through Inductor, with the choices of the profile; the exchanged rows are few, where Gloo is slowest."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shard = shard_of(1, 4, 2, torch.float32)
    want = gradients(parallel(mesh, 1, False, torch.float32), shard)
    model = torch.compile(parallel(mesh, 1, False, torch.float32), backend="weave", options={"strict": True})
    close(gradients(model, shard), want, "compiled by Inductor")
    report = weaveopt.report(model)
    taken = [decision for graph in report.graphs for decision in graph.decisions if decision.rewritten]
    assert {decision.site.kind for decision in taken} == {"all_gather", "reduce_scatter"}
    return sum(decision.baseline.us for decision in taken if decision.baseline), str(report)


def test_through_inductor() -> None:
    first, second = run_ranks(run_inductor, 2, timeout_s=300)
    assert first[0] == second[0] > 0
    assert "gemm_reduce_scatter" in first[1] and "all_gather_gemm" in first[1]
