"""The rule `shard_norm` on spawned CPU ranks: models under tensor-parallel plans compute as in eager."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import weaveopt
from tests.graphs import forms
from tests.graphs.executing import executing
from tests.graphs.models import FAMILIES, VOCABULARY, Family, load, one_layer, save
from tests.ranks import run_ranks
from weaveopt.config import Config
from weaveopt.errors import AgreementError
from weaveopt.records.candidate import LEAVE
from weaveopt.records.report import GraphReport

RULE, OTHER = "shard_norm", "all_reduce_rms_norm"
FORCED = Config(force=(RULE,), strict=True, timeout_s=30.0, compile_timeout_s=60.0, max_tokens=256)
HIDDEN, INNER, NUM_LAYERS = 48, 96, 3
Choices = list[list[str]]


def choices(reports: list[GraphReport]) -> Choices:
    return [[d.chosen.choice for d in report.decisions if d.site.kind == "reduction"] for report in reports]


def close(got: Tensor, want: Tensor, what: str) -> None:
    tolerance = 1e-4 * float(want.abs().max())
    torch.testing.assert_close(got, want, rtol=1e-4, atol=tolerance, msg=lambda text: f"{what}\n{text}")


def run_family(family: Family, folder: str, lengths: tuple[int, ...]) -> Choices:
    """Logits of prompts of `lengths`: one graph, of symbolic size for several."""
    if dist.get_rank() == 0:
        save(family, folder)
    dist.barrier()
    model = load(family, folder, dist.get_world_size())
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, VOCABULARY, (1, length), generator=generator) for length in lengths]
    reports: list[GraphReport] = []
    torch._dynamo.reset()
    with torch.no_grad():
        wanted = [model(ids, use_cache=False).logits for ids in prompts]
        model.compile(backend=executing(FORCED, reports), dynamic=len(lengths) > 1)
        for ids, want in zip(prompts, wanted, strict=True):
            close(model(ids, use_cache=False).logits, want, f"{family.id}, {ids.shape[1]} tokens")
    return choices(reports)


def run_families(rank: int, folder: str) -> dict[str, Choices]:
    named = {each.id: each for each in FAMILIES}
    return {
        "llama": run_family(named["llama"], f"{folder}/llama", (9,)),
        "symbolic": run_family(one_layer(named["llama"]), f"{folder}/symbolic", (12, 15)),
        "qwen2": run_family(one_layer(named["qwen2"]), f"{folder}/qwen2", (8,)),
        "cohere": run_family(one_layer(named["cohere"]), f"{folder}/cohere", (9,)),
    }


def test_logits_of_families_are_those_of_eager(tmp_path: Path) -> None:
    """Token counts that the ranks divide, that they do not, and symbolic ones; biases of q, k and v (Qwen2); attention
    and MLP in parallel after one LayerNorm (Cohere). Two layers of the first, and one of all others."""
    first, second = run_ranks(run_families, 2, str(tmp_path), timeout_s=420)
    assert first == second
    # The sum of the embedding is no GEMM's; every layer's sums are, and the last one's logits are of all tokens.
    assert first["llama"] == [[first["llama"][0][0], *[RULE] * 4]]
    assert first["symbolic"] == [[first["symbolic"][0][0], *[RULE] * 2]]
    assert first["qwen2"][0][1:] == [RULE] * 2 and first["cohere"][0][1:] == [RULE]


class Layer(nn.Module):
    """Biases everywhere: of GEMMs, of sums, of the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)[:, -1:]  # type: ignore[no-any-return]


def parallel(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    model = Model()
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {f"layers.{layer}.up": ColwiseParallel() for layer in range(NUM_LAYERS)}
    parallelize_module(model, mesh, plan | {f"layers.{layer}.down": RowwiseParallel() for layer in range(NUM_LAYERS)})
    return model


def input_of(tokens: int) -> Tensor:
    return torch.randn(1, tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens))


def check_timed(report: GraphReport) -> None:
    """The option `verify` runs the GEMMs after a site with it, as it is and rewritten."""
    taken = [d for d in report.decisions if d.chosen.choice == RULE]
    assert len(taken) == NUM_LAYERS - 1, report.decisions
    for decision in taken:
        estimate, baseline = decision.chosen.estimate, decision.baseline
        assert estimate is not None and estimate.measured is not None and estimate.measured.us > 0
        assert baseline is not None and baseline.measured is not None and baseline.measured.us > 0


def local(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def run_layers(rank: int) -> tuple[Choices, Choices, Choices, str]:
    """Three ranks: as it is, compiled by Inductor, trained; and with a residual of its own on every rank."""
    with torch.no_grad():
        eager = parallel()
        found: list[GraphReport] = []
        for tokens in (12, 14):
            torch._dynamo.reset()
            run = torch.compile(parallel(), backend=executing(FORCED, found), dynamic=False)
            for _ in range(2):
                close(run(input_of(tokens)), eager(input_of(tokens)), f"{tokens} tokens")

        timed: list[GraphReport] = []
        torch._dynamo.reset()
        run = torch.compile(parallel(), backend=executing(replace(FORCED, verify=True), timed), dynamic=False)
        close(run(input_of(14)), eager(input_of(14)), "after its candidates were timed")
        check_timed(timed[0])

        torch._dynamo.reset()
        options = {"force": [RULE], "strict": True, "timeout_s": 30.0}
        model = torch.compile(parallel(), backend="weave", options=options, dynamic=False)  # type: ignore[call-overload]
        for _ in range(2):
            close(model(input_of(14)), eager(input_of(14)), "compiled by Inductor")
        by_inductor = choices(weaveopt.report(model).graphs)  # type: ignore[arg-type]

    trained: list[GraphReport] = []
    torch._dynamo.reset()
    gradients = []
    for compiled in (False, True):
        model = parallel()
        run = torch.compile(model, backend=executing(FORCED, trained), dynamic=False) if compiled else model
        run(input_of(12)).square().mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for got, want in zip(*gradients, strict=True):
        close(local(got), local(want), "gradient")
    return choices(found), by_inductor, choices(trained), differs(rank)


def differs(rank: int) -> str:
    """Error of the first call when every rank has another residual."""
    weights = forms.make_weights(torch.float32)
    x, residual = (
        torch.ones(1, 30, forms.INNER),
        torch.randn(1, 30, forms.HIDDEN, generator=torch.Generator().manual_seed(rank)),
    )
    torch._dynamo.reset()
    run = torch.compile(lambda x, r: forms.residual_dead(weights, x, r), backend=executing(FORCED, []))
    try:
        with torch.no_grad():
            run(x, residual)
    except AgreementError as error:
        return str(error)
    return ""


def test_layers_on_three_ranks() -> None:
    outcomes = run_ranks(run_layers, 3, timeout_s=420)
    assert all(each == outcomes[0] for each in outcomes)
    plain, by_inductor, trained, said = outcomes[0]
    for found in (*plain, *by_inductor):
        # Behind the last norm a token is picked.
        assert found[:-1] == [RULE] * (NUM_LAYERS - 1) and found[-1] != RULE, found
    assert len(plain) == 2 and len(by_inductor) == 1
    assert len(trained) == 2 and all(choice in (OTHER, LEAVE) for graph in trained for choice in graph), trained
    assert "the residual on rank 0 is not the one on rank" in said and "disable" in said
