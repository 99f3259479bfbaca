"""`weaveopt.DataParallelExperts`: what of transformers it leans on, and ranks that call as they like."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed.fsdp import is_fsdp_managed_module

import weaveopt
from tests.graphs.models import save
from tests.graphs.nonempty import some
from tests.graphs.sharded_models import FAMILY_OF, MIXTURES, ids_of
from tests.ranks import run_ranks
from weaveopt.errors import ExportError, WeaveError
from weaveopt.fabrics import exported_shm
from weaveopt.integrations.transformers.expert_exchange import LAYERS, ExpertExchange, IndependentExperts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixtures")
    for name in MIXTURES:
        save(FAMILY_OF[name], str(path / name))
    return path


def load(folder: Path, name: str, world: int, independent: bool = False) -> PreTrainedModel:
    parallel = weaveopt.DataParallelExperts(world, independent=independent)
    path = str(folder / name)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, distributed_config=parallel).eval()


def whole(folder: Path, name: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(str(folder / name), dtype=torch.float32).eval()


def run_placement(rank: int, world: int, folder: Path) -> list[str]:
    """Dense weights are plain and whole; experts are sharded on their own dimension, none of them gathered by FSDP."""
    for name in MIXTURES:
        every, model = whole(folder, name), load(folder, name, world)
        wanted = dict(every.named_parameters())
        sharded = 0
        for key, parameter in model.named_parameters():
            if not isinstance(parameter, DTensor):
                assert parameter.shape == wanted[key].shape and torch.equal(parameter, wanted[key]), key
                continue
            assert ".experts." in key and parameter.placements[-1] == Shard(0), f"{key}: {parameter.placements}"
            local = parameter.to_local()
            assert torch.equal(local, wanted[key].chunk(world)[rank]), key
            sharded += 1
        assert sharded >= 2, f"{name}: experts are not sharded"
        assert not any(is_fsdp_managed_module(module) for module in some(model.modules())), "generate keeps no step"
        own = set(model.modules())
        layers = some(layer for layer in LAYERS if layer.experts in own)
        assert all(type(layer) is ExpertExchange and not layer.shares_batch for layer in layers)
        assert all(layer.tp_mesh.size() == 1 and layer.ep_mesh.size() == world for layer in layers)
    return list(MIXTURES)


def test_what_transformers_makes_of_it(folder: Path) -> None:
    assert run_ranks(run_placement, 2, 2, folder, timeout_s=200) == [list(MIXTURES)] * 2


def test_configuration() -> None:
    found = weaveopt.DataParallelExperts(4, independent=True)
    assert (found.dp_size, found.fsdp_size, found.ep_size, found.tp_size) == (0, 4, 4, 1)
    assert found.ep_implementation == "weave_independent" and found.to_dict()["ep_size"] == 4
    assert weaveopt.DataParallelExperts(2).ep_implementation == "weave"
    with pytest.raises(WeaveError, match="asked to spread experts over 1, expected at least 2"):
        weaveopt.DataParallelExperts(1)


def run_together(rank: int, world: int, folder: Path) -> int:
    done = 0
    for name in MIXTURES:
        every, model = whole(folder, name), load(folder, name, world)
        with torch.no_grad():
            for step in range(2):
                ids = ids_of(10 * rank + step, 3 + 4 * rank + step)
                got, want = model(ids, use_cache=False).logits, every(ids, use_cache=False).logits
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, msg=lambda m: f"{name}: {m}")  # noqa: B023
                done += 1
    return done


def test_ranks_that_call_together(folder: Path) -> None:
    assert run_ranks(run_together, 2, 2, folder, timeout_s=200) == [2 * len(MIXTURES)] * 2


def run_independent(rank: int, world: int, folder: Path) -> list[int]:
    """Rank 1 calls three times more than rank 0, which generates in between; parameters stay the same objects."""
    calls = []
    for name in MIXTURES:
        every, model = whole(folder, name), load(folder, name, world, independent=True)
        before = {key: id(each) for key, each in model.named_parameters()}
        with torch.no_grad():
            for step in range(1 + 3 * rank):
                ids = ids_of(10 * rank + step, 3 + 4 * rank + step)
                got, want = model(ids, use_cache=False).logits, every(ids, use_cache=False).logits
                assert torch.equal(got, want) or (got - want).abs().max() < 1e-5, name
            if rank == 0:
                ids = ids_of(3, 5)
                got = model.generate(ids, max_new_tokens=4, do_sample=False)
                assert torch.equal(got, every.generate(ids, max_new_tokens=4, do_sample=False)), name
        assert {key: id(each) for key, each in model.named_parameters()} == before
        own = set(model.modules())
        assert all(type(layer) is IndependentExperts for layer in some(x for x in LAYERS if x.experts in own))
        calls.append(step + 1)
    return calls


def test_independent_ranks_call_as_often_as_they_like(folder: Path) -> None:
    assert run_ranks(run_independent, 2, 2, folder, timeout_s=200) == [[1] * 4, [4] * 4]


def run_none(rank: int, world: int, folder: Path) -> str:
    """A rank that never calls shares its experts by the explicit call."""
    model = load(folder, "mixtral", world, independent=True)
    weaveopt.share_experts(model)
    if rank == 0:
        return "none"
    with torch.no_grad():
        got = model(ids_of(1, 6), use_cache=False).logits
    torch.testing.assert_close(got, whole(folder, "mixtral")(ids_of(1, 6), use_cache=False).logits)
    return "some"


def test_a_rank_without_calls(folder: Path) -> None:
    assert run_ranks(run_none, 2, 2, folder) == ["none", "some"]


def run_moved(rank: int, world: int, folder: Path) -> str:
    """Parameters that were converted after sharing are noticed, and can be shared again."""
    model, every = load(folder, "gpt_oss", world, independent=True), whole(folder, "gpt_oss")
    ids = ids_of(1, 6)
    with torch.no_grad():
        model(ids, use_cache=False)
        model.to(torch.bfloat16)
        with pytest.raises(ExportError) as caught:
            model(ids, use_cache=False)
        weaveopt.share_experts(model)
        got = model(ids, use_cache=False).logits
        assert (got.float() - every(ids, use_cache=False).logits).abs().max() < 0.3
    return str(caught.value)


def test_moved_parameters_are_refused_until_shared_again(folder: Path) -> None:
    for found in run_ranks(run_moved, 2, 2, folder):
        assert "another storage" in found and "share_experts(model) again on all ranks" in found


def run_without_memory(rank: int, world: int, folder: Path) -> str:
    model = load(folder, "mixtral", world, independent=True)
    if rank == 1:

        def failing(*_: object) -> None:
            raise RuntimeError("no room in /dev/shm")

        exported_shm.ShmMemory.move = failing  # type: ignore[method-assign]
    with torch.no_grad(), pytest.raises(ExportError) as caught:
        model(ids_of(1, 6), use_cache=False)
    return str(caught.value)


def test_memory_that_cannot_be_shared_is_an_error_on_all_ranks(folder: Path) -> None:
    first, second = run_ranks(run_without_memory, 2, 2, folder, own=True)
    assert first == second and "rank 1: no room in /dev/shm" in first


def run_training(rank: int, world: int, folder: Path) -> str:
    model = load(folder, "mixtral", world, independent=True).train()
    with pytest.raises(WeaveError) as caught:
        model(ids_of(rank, 6), use_cache=False).logits.square().mean().backward()
    return str(caught.value)


def test_training_independent_ranks_is_refused(folder: Path) -> None:
    assert all("asked for gradients" in each for each in run_ranks(run_training, 2, 2, folder))


def test_models_without_spread_experts_are_refused() -> None:
    with pytest.raises(WeaveError, match="found none that are spread over ranks"):
        weaveopt.share_experts(torch.nn.Linear(2, 2))
