"""The first call of every operation under `torch.inference_mode()`, the next ones without: nothing that is kept from it
may be a tensor of that mode, which no other call could write to."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tests.graphs import forms
from tests.graphs.executing import FORCED, executing
from tests.ops import test_all_gather_gemm_call as all_gather
from tests.ops import test_expert_exchange as exchange
from tests.ops import test_gemm_all_reduce_call as gemm_reduction
from tests.ops import test_gemm_reduce_scatter_call as scatter
from tests.ranks import run_ranks, shm_ranks
from weaveopt.fabrics import shm
from weaveopt.fabrics.peer import PeerArena

Step = Callable[[], list[Tensor]]


def _reductions(rank: int) -> list[Step]:
    world = dist.get_world_size()
    shm_ranks.reserve()
    calls = [shm_ranks.make_call(f"one shot {one_shot}", "0", world, one_shot) for one_shot in (True, False)]
    a, b = torch.randn(5, 32), torch.randn(32, shm_ranks.HIDDEN)
    nothing = [None] * 8
    steps: list[Step] = []
    for call in calls:
        steps.append(lambda call=call: list(shm_ranks.run_op(call, shm_ranks.partial_of(rank))))
        steps.append(lambda call=call: list(torch.ops.weave.mm_all_reduce_norm(a, b, *nothing, call.encode())))
    return steps


def _chunks(rank: int) -> list[Step]:
    world = dist.get_world_size()
    gemm_reduction.reserve(world)
    form = gemm_reduction.Form()
    call = gemm_reduction.make_call(form, "float32", world)
    factors, rest = gemm_reduction.make_inputs(form, 40, torch.float32, world)
    return [lambda: list(gemm_reduction.run_op(factors[rank], form, rest, call))]


def _scatter(rank: int) -> list[Step]:
    world = dist.get_world_size()
    scatter.reserve(world)
    form = scatter.Form()
    call = scatter.make_call(form, 16, "float32", world)
    inputs = scatter.make_inputs(form, 7 * world, 16, "float32", world, seed=0)
    return [lambda: [scatter.run_op(inputs[rank], 1, call)]]


def _gather(rank: int) -> list[Step]:
    world = dist.get_world_size()
    all_gather.reserve(world)
    form = all_gather.Form()
    call = all_gather.make_call(form, 16, "float32", world)
    shards, weights = all_gather.make_inputs(form, 7, 16, "float32", world, seed=0)
    return [lambda: all_gather.run_op(shards[rank], weights[rank], form.outer, call)]


def _exchange(rank: int) -> list[Step]:
    world = dist.get_world_size()
    exchange.reserve_for(world)
    form = exchange.Form()
    call = exchange.make_call(form, "float32", world)
    inputs = exchange.make_inputs(form, call, "even", "uniform", seed=0)
    return [lambda: [inputs[rank].run(call)]]


FAMILIES: tuple[Callable[[int], list[Step]], ...] = (_reductions, _chunks, _scatter, _gather, _exchange)


def _kept_from_the_mode() -> list[str]:
    """Tensors that are still there though every result and operand is gone."""
    gc.collect()
    return [
        f"{tuple(each.shape)} {each.dtype}"
        for each in gc.get_objects()
        if isinstance(each, Tensor) and (isinstance(each, FakeTensor) or each.is_inference())
    ]


def run_families(rank: int) -> dict[str, list[str]]:
    kept = {}
    for family in FAMILIES:
        with torch.inference_mode():
            steps = family(rank)
            first = [[each.clone() for each in step()] for step in steps]
        for mode in (torch.no_grad(), torch.enable_grad(), torch.inference_mode()):
            with mode:
                for step, wanted in zip(steps, first, strict=True):
                    for got, want in zip(step(), wanted, strict=True):
                        assert torch.equal(got, want), f"{family.__name__} in {mode}"
        del steps, first, step, wanted, got, want
        kept[family.__name__] = _kept_from_the_mode()
        shm.release("0")
    return kept


def test_every_operation_runs_first_in_inference_mode_and_then_without() -> None:
    for kept in run_ranks(run_families, 2, own=True):
        assert kept == {family.__name__: [] for family in FAMILIES}


def run_compiled(rank: int) -> None:
    """Infer once, then train: through the whole backend, whose first call reserves the arena."""
    weights = forms.make_weights(torch.float32)
    x, residual = torch.ones(1, 300, forms.INNER), torch.ones(1, 300, forms.HIDDEN)
    compiled = torch.compile(lambda x, r: forms.pre_norm(weights, x, r), backend=executing(FORCED, []))
    with torch.inference_mode():
        wanted = [each.clone() for each in compiled(x, residual)]
    with torch.no_grad():
        without = compiled(x, residual)
    trained = compiled(x.requires_grad_(), residual)
    for got in (without, trained):
        torch.testing.assert_close(tuple(got), tuple(each.clone() for each in wanted), rtol=1e-4, atol=1e-4)
    sum(each.sum() for each in trained).backward()
    assert x.grad is not None
    dist.barrier()


def test_a_model_infers_once_and_then_trains() -> None:
    run_ranks(run_compiled, 2, timeout_s=240)


@pytest.mark.parametrize("mode", [torch.inference_mode, FakeTensorMode])
def test_a_view_of_a_gpus_arena_is_an_ordinary_tensor(mode: Callable[[], torch.inference_mode]) -> None:
    arena = object.__new__(PeerArena)
    arena._memory = torch.zeros(1 << 20, dtype=torch.uint8)
    arena.layout = type("OfAMegabyte", (), {"num_bytes": 1 << 20})()
    with mode():
        view = arena.tensor(0, (4, 4), torch.float32)
    assert not view.is_inference() and not isinstance(view, FakeTensor)
    view.add_(1)
