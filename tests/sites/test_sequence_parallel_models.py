"""Sequence-parallel plans of `parallelize_module`: inference, forward and backward graphs of a toy and of a Llama."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tests.graphs.capturing import captured, codes, gathers, recording, scatters, sites_in
from tests.graphs.preview import fake_group
from tests.graphs.rewriting import check_rewritten
from tests.graphs.site_values import check, run
from weaveopt.graph.facts import collectives_in
from weaveopt.rule import CapturedGraph

WORLD, HIDDEN, INNER = 2, 64, 128
BATCH, LENGTH = 3, 16


@pytest.fixture(autouse=True)
def mesh() -> Iterator[DeviceMesh]:
    with fake_group(WORLD):
        yield init_device_mesh("cpu", (WORLD,))


class Layer(nn.Module):
    """Attention and a gated MLP; heads of 16."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.q, self.k, self.v = (nn.Linear(HIDDEN, HIDDEN, bias=bias) for _ in range(3))
        self.o = nn.Linear(HIDDEN, HIDDEN, bias=bias)
        self.gate, self.up = (nn.Linear(HIDDEN, INNER, bias=bias) for _ in range(2))
        self.down = nn.Linear(INNER, HIDDEN, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm1(x)
        q, k, v = (each(rows).unflatten(-1, (-1, 16)).transpose(-2, -3) for each in (self.q, self.k, self.v))
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(-2, -3).flatten(-2))
        rows = self.norm2(x)
        return x + self.down(torch.nn.functional.silu(self.gate(rows)) * self.up(rows))  # type: ignore[no-any-return]


class Gated(nn.Module):
    """The MLP alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.down = nn.RMSNorm(HIDDEN), nn.Linear(INNER, HIDDEN, bias=False)
        self.gate, self.up = (nn.Linear(HIDDEN, INNER, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x)
        return x + self.down(self.gate(rows).relu() * self.up(rows))  # type: ignore[no-any-return]


def parallel(model: nn.Module, mesh: DeviceMesh, dim: int, to_local: bool = True) -> nn.Module:
    """Activations are shards along `dim` between layers: of [batch, length, hidden], or of [length, hidden]."""
    plan: dict[str, ParallelStyle] = {}
    for name, _ in model.named_children():
        if name.startswith("norm"):
            plan[name] = SequenceParallel(sequence_dim=dim)
        elif name in ("o", "down"):
            plan[name] = RowwiseParallel(output_layouts=Shard(dim), use_local_output=to_local)
        else:
            plan[name] = ColwiseParallel(input_layouts=Shard(dim))
    return parallelize_module(model.bfloat16(), mesh, plan)


def shard_of(*sizes: int) -> Tensor:
    return torch.zeros(*sizes, dtype=torch.bfloat16)


@pytest.mark.parametrize(("dim", "outer", "bias"), [(1, BATCH, True), (0, 1, False)])
def test_inference(mesh: DeviceMesh, dim: int, outer: int, bias: bool) -> None:
    """One gather for q, k, v and one for gate and up (DTensor makes one each); what o and down make is scattered."""
    sizes = (BATCH, LENGTH // WORLD, HIDDEN) if dim else (LENGTH // WORLD, HIDDEN)
    with torch.no_grad():
        [graph] = captured(parallel(Layer(bias), mesh, dim), shard_of(*sizes))
    found = sites_in(graph, WORLD)
    assert check(found, run(graph, WORLD), WORLD) == len(found) == 4
    attention, mlp = gathers(found)
    assert (attention.num_gathers, attention.num_gemms, attention.n, attention.k) == (3, 3, 3 * HIDDEN // WORLD, HIDDEN)
    assert (mlp.num_gathers, mlp.num_gemms, mlp.n, mlp.k) == (2, 2, 2 * INNER // WORLD, HIDDEN)
    o, down = scatters(found)
    assert [(each.n, each.k, each.has_norm) for each in (o, down)] == [
        (HIDDEN, HIDDEN // WORLD, True), (HIDDEN, INNER // WORLD, False),
    ]  # fmt: skip
    for each in (attention, mlp, o, down):
        assert (each.dim, each.outer, each.m) == (dim, outer, outer * LENGTH)
        assert (each.dtype, each.has_bias) == ("bfloat16", bias)
    assert all(each.has_residual for each in (o, down))
    assert check_rewritten(graph, WORLD).num_rewritten == 4


def test_training(mesh: DeviceMesh) -> None:
    """The backward pass scatters what q, k and v add up to, and gathers what o's and down's gradients read twice."""
    forward, backward = captured(
        parallel(Layer(bias=False), mesh, 1), shard_of(BATCH, LENGTH // WORLD, HIDDEN).requires_grad_()
    )
    assert (forward.phase, backward.phase) == ("forward", "backward")
    ahead, back = sites_in(forward, WORLD), sites_in(backward, WORLD)
    assert check(ahead, run(forward, WORLD), WORLD) == check(back, run(backward, WORLD), WORLD) == 4
    assert len(ahead) == len(back) == 4
    assert [each.num_gemms for each in gathers(ahead)] == [3, 2]
    assert all(each.gathered_is_read for each in gathers(ahead)), "saved for the weights' gradients"
    assert [(each.k, each.num_gemms) for each in scatters(ahead)] == [(HIDDEN // WORLD, 1), (INNER // WORLD, 1)]
    # The backward pass computes sums and norms again, from shards that the forward pass saved.
    assert [(each.has_norm, each.has_residual, each.shard_is_saved) for each in scatters(ahead)] == [
        (True, True, True), (False, True, False),
    ]  # fmt: skip
    # Of down's output, then of o's: for the gradient of the rows, and for that of the weight.
    assert [(each.n, each.num_gemms, each.num_contractions) for each in gathers(back)] == [
        (INNER // WORLD, 1, 1), (HIDDEN // WORLD, 1, 1),
    ]  # fmt: skip
    assert [(each.num_gemms, each.num_partials, each.k) for each in scatters(back)] == [
        (2, 2, 2 * INNER // WORLD), (3, 3, 3 * HIDDEN // WORLD),
    ]  # fmt: skip
    assert all((each.dim, each.outer) == (1, BATCH) for each in (*gathers(back), *scatters(back)))
    assert [check_rewritten(graph, WORLD).num_rewritten for graph in (forward, backward)] == [4, 4]


def test_sizes_that_are_symbols(mesh: DeviceMesh) -> None:
    graphs: list[CapturedGraph] = []
    torch._dynamo.reset()
    compiled = torch.compile(parallel(Gated(), mesh, 1), backend=recording(graphs), fullgraph=True, dynamic=True)
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()) as mode:
        compiled(mode.from_tensor(shard_of(BATCH, LENGTH // WORLD, HIDDEN)))
    found = sites_in(graphs[0], WORLD)
    assert [(each.dim, each.outer, each.m) for each in (*gathers(found), *scatters(found))] == [
        (1, BATCH, BATCH * LENGTH)
    ] * 2
    assert all((site.site.tokens.hint, site.site.tokens.is_static) == (BATCH * LENGTH, False) for site in found)
    assert graphs[0].tokens == BATCH * LENGTH and graphs[0].symbolic_tokens is not None
    assert check_rewritten(graphs[0], WORLD).num_rewritten == 2


def test_uneven_shards_are_refused(mesh: DeviceMesh) -> None:
    """15 rows for two ranks: torch pads, and cuts the padding off again."""
    model = parallel(Gated(), mesh, 1, to_local=False)

    def fn(x: DTensor) -> Tensor:
        return model(x).to_local()  # type: ignore[no-any-return]

    sizes = torch.Size((BATCH, LENGTH - 1, HIDDEN))
    shard, strides = shard_of(BATCH, LENGTH // WORLD, HIDDEN), (sizes[1] * HIDDEN, HIDDEN, 1)
    x = DTensor.from_local(shard, mesh, [Shard(1)], run_check=False, shape=sizes, stride=strides)
    with torch.no_grad():
        [graph] = captured(fn, x)
    gather, scatter = sites_in(graph, WORLD)
    assert set(codes(gather)) == set(codes(scatter)) == {"uneven_shards"}


def llama(mesh: DeviceMesh) -> nn.Module:
    """A plan by hand, as PyTorch's own recipes have it; transformers has none for sequences."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).bfloat16().eval()
    to_shard = {"output_layouts": Shard(1), "use_local_output": False}
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), **to_shard),
        "model.norm": SequenceParallel(use_local_output=False),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    layer = "model.layers.0"
    norms = ("input_layernorm", "post_attention_layernorm")
    plan |= {f"{layer}.{name}": SequenceParallel(use_local_output=False) for name in norms}
    plan[f"{layer}.self_attn"] = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
    )
    plan[f"{layer}.mlp"] = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    plan |= {f"{layer}.{name}": ColwiseParallel() for name in columns}
    plan |= {f"{layer}.{name}": RowwiseParallel(**to_shard) for name in ("self_attn.o_proj", "mlp.down_proj")}
    return parallelize_module(model, mesh, plan)


def test_llama(mesh: DeviceMesh) -> None:
    model = llama(mesh)

    def fn(ids: Tensor, positions: Tensor) -> Tensor:
        return model(ids, position_ids=positions, use_cache=False).logits  # type: ignore[no-any-return]

    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    with torch.no_grad():
        [graph] = captured(fn, ids, torch.arange(LENGTH)[None])
    found = sites_in(graph, WORLD)
    assert not any(codes(site) for site in found)
    # q, k and v; gate and up; the head at last, whose own gather no GEMM reads. No GEMM makes the embedding's scatter.
    assert [(each.num_gemms, each.num_gathers) for each in gathers(found)] == [(3, 1), (2, 1), (1, 1)]
    assert [(each.has_residual, each.has_norm) for each in scatters(found)] == [(True, True)] * 2
    collectives = Counter(str(node.target).split(".")[1] for node in collectives_in(graph.graph))
    assert collectives == {"all_gather_into_tensor": 4, "reduce_scatter_tensor": 3}
    for each in (*gathers(found), *scatters(found)):
        assert (each.dim, each.outer, each.m) == (1, BATCH, BATCH * LENGTH)
    modules = [site.site.module for site in found if site.site.kind == "reduce_scatter"]
    assert modules == ["model.layers.0.self_attn.o_proj", "model.layers.0.mlp.down_proj"]
