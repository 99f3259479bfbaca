"""Token splits on real ranks that are not two: three, and the rows and columns of a mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import weaveopt
from tests.graphs.executing import without_code
from tests.ranks import run_ranks

VOCABULARY, HIDDEN, HEAD, HEADS, INNER, LAYERS = 64, 48, 8, 2, 32, 2
OPTIONS = {"force": ["token_split"], "strict": True}


@dataclass(frozen=True)
class Groups:
    """Process groups that sum what a layer's attention and its MLP give, and one that averages a number in the end."""

    attention: dist.ProcessGroup
    mlp: dist.ProcessGroup
    metric: dist.ProcessGroup


def _weights(rank: int) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(rank)
    shapes = {
        "table": (VOCABULARY, HIDDEN), "qkv": (HIDDEN, 3 * HEADS * HEAD), "out": (HEADS * HEAD, HIDDEN),
        "up": (HIDDEN, INNER), "down": (INNER, HIDDEN),
    }  # fmt: skip
    return {name: torch.randn(*shape, generator=made) / shape[0] ** 0.5 for name, shape in shapes.items()}


def _model(rank: int, groups: Groups) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """A decoder of which every rank has heads and columns of its own."""
    w = _weights(rank)

    def reduced(x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return functional.wait_tensor(functional.all_reduce(x, "sum", group))

    def attention(x: Tensor) -> Tensor:
        q, k, v = (x @ w["qkv"]).unflatten(-1, (3 * HEADS, HEAD)).transpose(1, 2).chunk(3, 1)
        places = torch.arange(x.shape[1])
        mask = places[None, :] <= places[:, None]
        heads = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
        return heads.transpose(1, 2).flatten(-2) @ w["out"]

    def run(ids: Tensor) -> tuple[Tensor, Tensor]:
        x = reduced(torch.nn.functional.embedding(ids, w["table"]), groups.attention)
        for _ in range(LAYERS):
            x = x + reduced(attention(torch.nn.functional.rms_norm(x, (HIDDEN,))), groups.attention)
            inner = torch.relu(torch.nn.functional.rms_norm(x, (HIDDEN,)) @ w["up"])
            x = x + reduced(inner @ w["down"], groups.mlp)
        return x, functional.wait_tensor(functional.all_reduce(x.square().mean(), "avg", groups.metric))

    return run


def _problems(rank: int, groups: Groups, shape: tuple[int, int], axis: str) -> list[str]:
    """Differences between the split graph and eager."""
    ids = torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(shape[1]))
    run = _model(rank, groups)
    with torch.no_grad():
        compiled = torch.compile(run, backend="weave", dynamic=False, options=OPTIONS)  # type: ignore[call-overload]
        wanted, got = run(ids), compiled(ids)
    graph = weaveopt.report().graphs[-1]
    problems = [] if graph.variant == f"token_split by {axis}" else [f"{graph.variant} runs: {graph.variants[1:]}"]
    for name, a, b in zip(("sums", "metric"), wanted, got, strict=True):
        if not torch.allclose(a, b, rtol=1e-4, atol=1e-4 * float(a.abs().max())):
            problems.append(f"{name} of {shape} differ by {(a - b).abs().max():.2e}")
    return problems


def _on_three(rank: int) -> list[str]:
    world = dist.group.WORLD
    assert world is not None
    return _problems(rank, Groups(world, world, world), (1, 11), "sequence")


def test_three_ranks() -> None:
    """Through Inductor, an odd length by sequence."""
    assert run_ranks(_on_three, 3, timeout_s=300) == [[]] * 3


def _on_mesh(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    rows, columns = mesh["rows"].get_group(), mesh["columns"].get_group()
    length = 9 if rank < 2 else 12
    with without_code():
        problems = _problems(rank, Groups(columns, columns, rows), (1, length), "sequence")
        problems += _problems(rank, Groups(columns, rows, rows), (3, 7), "batch")
    return problems


def test_groups_of_a_mesh() -> None:
    """TP 2 x DP 2, data-parallel ranks with lengths of their own; and attention summed over columns, MLPs over rows, so
    that exchanges of two groups follow one another in each part."""
    assert run_ranks(_on_mesh, 4, timeout_s=300) == [[]] * 4
