"""Models of transformers with `ep_implementation="weave"` against its own all-to-all: one graph, and the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

import weaveopt  # noqa: F401  (registers the implementation)
from tests.graphs.models import Family, one_layer, save
from tests.graphs.sharded_models import FAMILY_OF, MIXTURES, ids_of, sharded
from tests.ranks import run_ranks
from tests.ranks.simulated import TEST_ALL
from weaveopt.config import OptionValue

EXCHANGE = torch.ops.weave.expert_exchange.default
TESTED = {name: family if name == "mixtral" else one_layer(family) for name, family in FAMILY_OF.items()}
"""One mixture: what joins two of them is Mixtral's."""
COMPILED = MIXTURES if TEST_ALL else ("mixtral", "gpt_oss")
"""Families whose graphs are looked at: biases, and none. All of them are exchanged, uncompiled, in
tests/experts/test_data_parallel.py, and compiled in tests/experts/test_prefetch.py."""
NUM_MIXTURES = {"mixtral": 2}
"""One elsewhere."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every model, saved once."""
    path = tmp_path_factory.mktemp("mixtures")
    for name in MIXTURES:
        save(TESTED[name], str(path / name))
    return path


def load(folder: Path, family: Family, implementation: str, world: int, data_parallel: bool = False) -> PreTrainedModel:
    sizes = {"fsdp_size": world} if data_parallel else {"tp_size": world}
    parallel = DistributedConfig(**sizes, ep_size=world, ep_implementation=implementation)
    name = str(folder / family.name)
    return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, distributed_config=parallel).eval()


def run_tensor_parallel(rank: int, world: int, folder: Path, names: tuple[str, ...]) -> list[str]:
    """All ranks hold the same batch; 7 and 1 tokens are no multiple of the ranks."""
    done = []
    for name in names:
        theirs, ours = (load(folder, FAMILY_OF[name], each, world) for each in ("all_to_all", "weave"))
        graphs: list[fx.GraphModule] = []

        def keep(module: fx.GraphModule, _: object, into: list[fx.GraphModule] = graphs) -> fx.GraphModule:
            into.append(module)
            return module

        compiled = torch.compile(ours, backend=keep, fullgraph=True)
        with torch.no_grad():
            for tokens in (7, 1):
                want = theirs(ids_of(3, tokens), use_cache=False).logits
                for model in (ours, compiled):
                    got = model(ids_of(3, tokens), use_cache=False).logits
                    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, msg=lambda m: f"{name}: {m}")  # noqa: B023
        [graph, *others] = graphs
        assert len(others) <= 1, f"{name}: one graph, and one for a single token"
        calls = [node for node in graph.graph.nodes if "expert_exchange" in str(node.target)]
        assert len(calls) == NUM_MIXTURES.get(name, 1), f"{name}: one operation a mixture"
        done.append(name)
    return done


@pytest.mark.parametrize(("world", "names"), [(2, COMPILED), (4, ("qwen3_moe",))])
def test_tensor_parallel(world: int, names: tuple[str, ...], folder: Path) -> None:
    assert run_ranks(run_tensor_parallel, world, world, folder, names, timeout_s=300) == [list(names)] * world


def run_data_parallel(rank: int, world: int, folder: Path, backend: str) -> None:
    """Ranks hold other batches, of other sizes."""
    for name in ("mixtral", "gpt_oss") if backend == "eager" else ("gpt_oss",):
        theirs, ours = (sharded(folder, FAMILY_OF[name], each, world) for each in ("all_to_all", "weave"))
        compiled = torch.compile(ours, backend=backend, fullgraph=True)
        with torch.no_grad():
            for step in range(2):
                ids = ids_of(rank, 3 + 4 * rank + 20 * step * (rank == 0))
                want = theirs(ids, use_cache=False).logits
                for model in (ours, compiled):
                    got = model(ids, use_cache=False).logits
                    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_data_parallel(backend: str, folder: Path) -> None:
    run_ranks(run_data_parallel, 2, 2, folder, backend, timeout_s=300)


def gradients(
    model: PreTrainedModel, ids: Tensor, backend: str = "", options: dict[str, OptionValue] | None = None
) -> dict[str, Tensor]:
    """Gradients of all parameters that have one, compiled if a backend is given."""
    model.train()
    run = torch.compile(model, backend=backend, fullgraph=True, options=options) if backend else model
    run(ids, use_cache=False).logits.square().mean().backward()
    return {
        name: getattr(each.grad, "_local_tensor", each.grad).clone()
        for name, each in model.named_parameters()
        if each.grad is not None
    }


def run_training(rank: int, world: int, folder: Path) -> None:
    for name in ("mixtral", "gpt_oss"):
        for build in (sharded, load):
            ids = ids_of(rank, 5 + 3 * rank) if build is sharded else ids_of(0, 7)
            theirs = gradients(build(folder, FAMILY_OF[name], "all_to_all", world), ids)
            for backend in ("", "aot_eager"):
                if backend and build is load:
                    continue  # transformers' own backward hooks of tensor parallelism break graphs in training
                ours = gradients(build(folder, FAMILY_OF[name], "weave", world), ids, backend)
                assert ours.keys() == theirs.keys() and any("experts" in each for each in ours)
                for key, want in theirs.items():
                    torch.testing.assert_close(
                        ours[key], want, rtol=1e-4, atol=1e-6, msg=lambda m, key=f"{name}, {key}": f"{key}: {m}"
                    )


def test_gradients(folder: Path) -> None:
    run_ranks(run_training, 2, 2, folder, timeout_s=300)


def run_fully_sharded(rank: int, world: int, folder: Path) -> None:
    """FSDP2 breaks the graph at its own hooks; the mixtures break none."""
    theirs, ours = (load(folder, FAMILY_OF["mixtral"], each, world, True) for each in ("all_to_all", "weave"))
    ids = ids_of(rank, 3 + 2 * rank)
    with torch.no_grad():
        want = theirs(ids, use_cache=False).logits
        torch.testing.assert_close(ours(ids, use_cache=False).logits, want, rtol=1e-5, atol=1e-5)
    dist.barrier()


def test_fully_sharded(folder: Path) -> None:
    run_ranks(run_fully_sharded, 2, 2, folder, timeout_s=300)
