"""`weave::expert_prefetch` on CPU ranks: against one process that has all experts, without any rank waiting."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

import weaveopt.ops  # noqa: F401
from tests.graphs.tolerances import KERNEL, assert_close
from tests.ops.test_expert_exchange import COUNTS, DTYPES, FORMS, ROUTINGS, Form, Inputs, make_call, make_inputs, wanted
from tests.ranks import run_ranks
from weaveopt.errors import ExportError, WeaveError
from weaveopt.fabrics import exported
from weaveopt.ops.experts.exchange.call import ExpertExchangeCall, SpreadExpertsCall
from weaveopt.ops.experts.prefetch.call import ExpertPrefetchCall
from weaveopt.records.candidate import Fabric

OP = torch.ops.weave.expert_prefetch.default
TIMEOUT_S = 30.0


class Layer:
    """One rank's experts as an exporter."""

    def __init__(self, inputs: Inputs) -> None:
        """Weights are stored as parameters are, each by itself: transposed ones as `[experts, in, out]`."""
        self.inputs = inputs
        self.owned = [None if each is None else _stored(each) for each in inputs.operands]

    def exported(self) -> tuple[Tensor, ...]:
        return tuple(each for each in self.owned if each is not None)

    def moved(self) -> None:
        return None

    @property
    def operands(self) -> list[Tensor | None]:
        given = self.inputs.operands
        return [
            owned if owned is None or each is None or each.is_contiguous() else owned.transpose(1, 2)
            for each, owned in zip(given, self.owned, strict=True)
        ]

    def run(self, call: SpreadExpertsCall) -> Tensor:
        operation = OP if isinstance(call, ExpertPrefetchCall) else torch.ops.weave.expert_exchange.default
        x, experts, weights = self.inputs.x, self.inputs.experts, self.inputs.weights
        result: Tensor = operation(x, experts, weights, *self.operands, call.encode())
        return result


def _stored(weight: Tensor) -> Tensor:
    return (weight if weight.is_contiguous() else weight.transpose(1, 2)).clone()


def prefetching(given: ExpertExchangeCall) -> ExpertPrefetchCall:
    shared = {field.name: getattr(given, field.name) for field in fields(SpreadExpertsCall)}
    return ExpertPrefetchCall(**{**shared, "same_tokens": False, "independent": True})


def pulling(given: ExpertExchangeCall) -> ExpertExchangeCall:
    """The library form of independent ranks."""
    return replace(given, fabric=Fabric.LIBRARY, same_tokens=False, independent=True)


def run_cases(rank: int, world: int) -> int:
    """Every form and dtype, each with two counts and routings in turn; both ways to get the experts."""
    cases = itertools.cycle(itertools.product(COUNTS, ROUTINGS))
    done = 0
    for seed, (form, dtype) in enumerate(itertools.product(FORMS, DTYPES)):
        for _ in range(2):
            counts, routing = next(cases)
            given = make_call(form, dtype, world)
            inputs = make_inputs(form, given, counts, routing, seed)
            want = wanted(inputs, given)[rank]
            layer = Layer(inputs[rank])
            exported.register("0", layer)
            exported.share("0", TIMEOUT_S)
            for call in (prefetching(given), pulling(given)):
                got = layer.run(call)
                assert torch.equal(got, layer.run(call)), f"{form}, {dtype}: not the same bits again"
                assert_close(got, want, KERNEL)
                done += 1
    return done


@pytest.mark.parametrize("world", [2, 3, 8])
def test_is_what_one_process_computes(world: int) -> None:
    assert run_ranks(run_cases, world, world, timeout_s=200) == [len(FORMS) * len(DTYPES) * 4] * world


def run_alone(rank: int, world: int) -> tuple[int, str]:
    """Ranks call as often as they like: one three times, one never."""
    given = make_call(Form(), "float32", world)
    inputs = make_inputs(Form(), given, "uneven", "uniform", 3)
    layer = Layer(inputs[rank])
    exported.register("0", layer)
    exported.share("0", TIMEOUT_S)
    calls = (3, 0, 1)[rank]
    for _ in range(calls):
        torch.testing.assert_close(layer.run(prefetching(given)), wanted(inputs, given)[rank])
    return calls, type(layer.owned[0]).__name__


def test_ranks_need_not_call_together() -> None:
    assert run_ranks(run_alone, 3, 3) == [(3, "Tensor"), (0, "Tensor"), (1, "Tensor")]


def run_refusals(rank: int, world: int) -> list[str]:
    given = make_call(Form(), "float32", world)
    inputs = make_inputs(Form(), given, "even", "uniform", 3)
    layer, call = Layer(inputs[rank]), prefetching(given)
    exported.register("0", layer)
    found = []

    def refused(kind: type[WeaveError]) -> None:
        with pytest.raises(kind) as caught:
            layer.run(call)
        found.append(str(caught.value))

    refused(ExportError)
    exported.share("0", TIMEOUT_S)
    layer.run(call)
    kept = layer.owned[0]
    assert kept is not None
    layer.owned[0] = kept.clone()
    refused(ExportError)
    exported.share("0", TIMEOUT_S)
    torch.testing.assert_close(layer.run(call), wanted(inputs, given)[rank])
    layer.owned[0] = layer.owned[0][:, :-1]
    refused(WeaveError)
    return found


def test_weights_that_are_not_shared_or_moved_are_refused() -> None:
    for found in run_ranks(run_refusals, 2, 2):
        never, moved, shape = found
        assert "none was shared: call weaveopt.share_experts(model) on all ranks" in never
        assert "another storage" in moved and "share_experts(model) again on all ranks" in moved
        assert "down is (2, 32, 24), expected (2, 32, 23)" in shape


def test_it_is_an_operator_without_a_derivative() -> None:
    """Fake and schema, and what its backward says."""
    given = make_call(Form(), "float32", 2)
    inputs = make_inputs(Form(), given, "even", "uniform", 3)[0]
    with torch._subclasses.FakeTensorMode() as mode:
        arguments = [mode.from_tensor(each) for each in (inputs.x, inputs.experts, inputs.weights)]
        operands = [None if each is None else mode.from_tensor(each) for each in inputs.operands]
        made = OP(*arguments, *operands, prefetching(given).encode())
    assert made.shape == inputs.x.shape and made.dtype == inputs.x.dtype
    assert not OP._schema.is_mutable and torch.Tag.flexible_layout in OP.tags


def run_derivative(rank: int) -> list[str]:
    given = make_call(Form(), "float32", 2)
    layer = Layer(make_inputs(Form(), given, "even", "uniform", 3)[rank])
    exported.register("0", layer)
    exported.share("0", TIMEOUT_S)
    layer.inputs.x.requires_grad_()
    found = []
    for call in (prefetching(given), pulling(given)):
        with pytest.raises(WeaveError) as caught:
            layer.run(call).sum().backward()
        found.append(str(caught.value))
    return found


def test_gradients_are_refused() -> None:
    for found in run_ranks(run_derivative, 2):
        assert len(found) == 2 and all("independent" in each and "all_to_all" in each for each in found)
