"""GEMMs of one input as one, on a GPU: results, memory, CUDA graphs, and weights that come to lie elsewhere."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import weaveopt
from tests.gpu.captured import captured
from tests.graphs.generating import build, ours, ragged, theirs
from weaveopt.ops.merged_gemm.adjacent import joined
from weaveopt.rewrites.merged_gemm import RULE

pytestmark = pytest.mark.gpu

WIDTHS = (2048, 512, 512)


class Projected(nn.Module):
    """Queries, keys and values, as a block of a model makes and uses them."""

    def __init__(self, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2048, width, bias=bias, dtype=dtype, device="cuda") for width in WIDTHS)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x) for layer in self.layers)
        return torch.cat([q * k.repeat(1, 1, 4), v.sin()], dim=-1)


@pytest.fixture(autouse=True)
def _compiled_anew() -> None:
    torch._dynamo.reset()


def parameters(model: Projected) -> list[Tensor]:
    return [parameter for name, parameter in model.named_parameters() if name.endswith("weight")]


def options(**more: object) -> dict[str, object]:
    return {"machine": "h200x4", "force": [RULE], "strict": True, **more}


@pytest.mark.parametrize("cuda_graphs", [False, True], ids=["called", "in CUDA graphs"])
@pytest.mark.parametrize(("dtype", "bias"), [(torch.bfloat16, False), (torch.float16, True), (torch.float32, True)])
@torch.no_grad()
def test_one_gemm_in_place_of_three(dtype: torch.dtype, bias: bool, cuda_graphs: bool) -> None:
    torch.manual_seed(5)
    model = Projected(bias, dtype)
    before, identities = copy.deepcopy(model), [id(each) for each in model.parameters()]
    compiled = torch.compile(model, backend="weave", options=options(cuda_graphs=cuda_graphs))
    for tokens in (1, 9, 300):
        for _ in range(4):
            x = torch.randn(1, tokens, 2048, dtype=dtype, device="cuda")
            torch.testing.assert_close(compiled(x).clone(), before(x), rtol=2e-2, atol=2e-2)
    assert [id(each) for each in model.parameters()] == identities
    assert all(map(torch.equal, model.parameters(), before.parameters()))
    assert joined(parameters(model)) is not None
    assert RULE in str(weaveopt.report(model)) and not weaveopt.report(model).fallbacks


@torch.no_grad()
def test_kernels_of_a_call() -> None:
    """One GEMM, and no copy of what point-wise kernels read."""
    model = Projected(False, torch.bfloat16)
    compiled = torch.compile(model, backend="weave", options=options())
    x = torch.randn(1, 9, 2048, dtype=torch.bfloat16, device="cuda")
    for _ in range(3):
        compiled(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        compiled(x)
        torch.cuda.synchronize()
    kernels = [each.name for each in profiler.events() if each.device_type == torch.autograd.DeviceType.CUDA]
    assert sum("triton" in name for name in kernels) == 1, kernels
    assert sum(any(word in name for word in ("nvjet", "gemm", "cutlass")) for name in kernels) == 1, kernels


@torch.no_grad()
def test_one_compiled_graph_for_several_layers() -> None:
    layers = [Projected(True, torch.bfloat16) for _ in range(3)]
    x = torch.randn(1, 9, 2048, dtype=torch.bfloat16, device="cuda")
    compiled = [torch.compile(layer, backend="weave", options=options()) for layer in layers]
    for _ in range(2):
        for layer, call in zip(layers, compiled, strict=True):
            torch.testing.assert_close(call(x), layer(x), rtol=2e-2, atol=2e-2)
    assert all(joined(parameters(layer)) is not None for layer in layers)


@torch.no_grad()
def test_weights_may_change_and_move_between_calls() -> None:
    model = Projected(False, torch.bfloat16)
    compiled = torch.compile(model, backend="weave", options=options(cuda_graphs=True))
    x = torch.randn(1, 9, 2048, dtype=torch.bfloat16, device="cuda")

    def check() -> None:
        for _ in range(3):
            torch.testing.assert_close(compiled(x).clone(), model(x), rtol=2e-2, atol=2e-2)

    check()
    for each in model.parameters():
        each.mul_(0.5)
    check()
    model.layers[1].weight.data = torch.randn_like(model.layers[1].weight)
    check()
    model.cpu()
    model.cuda()
    check()
    model.load_state_dict(Projected(False, torch.bfloat16).state_dict())
    check()


@torch.no_grad()
def test_a_graph_that_was_captured_before_is_still_right() -> None:
    model, other = (Projected(False, torch.bfloat16) for _ in range(2))
    x = torch.randn(1, 9, 2048, dtype=torch.bfloat16, device="cuda")
    graph, result = captured(lambda: model(x))
    graph.replay()
    want = result.clone()
    for each in (model, other):
        compiled = torch.compile(each, backend="weave", options=options())
        for _ in range(3):
            torch.testing.assert_close(compiled(x), each(x), rtol=2e-2, atol=2e-2)
        assert joined(parameters(each)) is None
    assert "compile first" in weaveopt.report(model).fallbacks[0].error  # one compiled graph serves both
    torch.cuda.empty_cache()
    result.zero_()
    graph.replay()
    assert torch.equal(result, want)
    del graph
    last = Projected(False, torch.bfloat16)
    torch.compile(last, backend="weave", options=options(cuda_graphs=True))(x)
    assert joined(parameters(last)) is not None


@torch.no_grad()
def test_graphs_of_inductor_hinder_nothing() -> None:
    """It compares addresses before it replays, and records anew."""
    model, another = (Projected(False, torch.bfloat16) for _ in range(2))
    x = torch.randn(1, 9, 2048, dtype=torch.bfloat16, device="cuda")
    replayed = torch.compile(model, mode="reduce-overhead")
    for _ in range(4):
        want = replayed(x).clone()
    compiled = [torch.compile(each, backend="weave", options=options(cuda_graphs=True)) for each in (model, another)]
    for each, call in zip((model, another), compiled, strict=True):
        for _ in range(3):
            torch.testing.assert_close(call(x).clone(), each(x), rtol=2e-2, atol=2e-2)
        assert joined(parameters(each)) is not None, weaveopt.report(each).fallbacks
    torch.cuda.empty_cache()
    for _ in range(3):
        torch.testing.assert_close(replayed(x).clone(), want, rtol=2e-2, atol=2e-2)


@torch.no_grad()
def test_moving_leaves_no_memory_behind() -> None:
    model = Projected(True, torch.bfloat16)
    x = torch.randn(1, 9, 2048, dtype=torch.bfloat16, device="cuda")
    model(x)  # the library's workspace
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.compile(model, backend="weave", options=options())(x)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 1 << 20


@torch.no_grad()
def test_a_kept_state_dict_keeps_its_memory() -> None:
    """It shares memory with the model, and what is written to it reaches the model."""
    model = Projected(False, torch.bfloat16)
    kept = model.state_dict()
    compiled = torch.compile(model, backend="weave", options=options(strict=False))
    x = torch.randn(1, 9, 2048, dtype=torch.bfloat16, device="cuda")
    compiled(x)
    for each in kept.values():
        each.mul_(2.0)
    torch.testing.assert_close(compiled(x), model(x), rtol=2e-2, atol=2e-2)
    assert joined(parameters(model)) is None
    (fallback,) = weaveopt.report(model).fallbacks
    assert fallback.step == "first call" and "share the weights' memory" in fallback.error


@torch.no_grad()
def test_a_captured_graph_keeps_its_weights() -> None:
    """A graph that was captured with weights apart, and another one that would make them adjacent."""
    model, decoded = Projected(False, torch.bfloat16), torch.randn(1, 9, 2048, dtype=torch.bfloat16, device="cuda")
    left = torch.compile(lambda x: model(x), backend="weave", options=options(force=[], disable=[RULE]))
    for _ in range(3):
        left(decoded)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = left(decoded)
    x = torch.randn(1, 300, 2048, dtype=torch.bfloat16, device="cuda")
    merging = torch.compile(lambda x: model(x), backend="weave", options=options(strict=False))
    for _ in range(2):
        torch.testing.assert_close(merging(x), model(x), rtol=2e-2, atol=2e-2)
    assert joined(parameters(model)) is None
    for each in model.parameters():
        each.mul_(0.5)
    decoded.normal_()
    graph.replay()
    torch.testing.assert_close(out, model(decoded), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "mixtral", "deepseek_v3"])
def test_generate_makes_the_same_tokens(family: str) -> None:
    model, inputs = build(family).cuda(), {name: each.cuda() for name, each in ragged().items()}
    wanted = theirs(model, inputs, max_new_tokens=24)
    found = ours(model, inputs, "weave", max_new_tokens=24)
    assert torch.equal(found.sequences, wanted.sequences)  # type: ignore[attr-defined]
    (step,) = weaveopt.report(model).generation.steps
    assert step.captured, step.not_captured
