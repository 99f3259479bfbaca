"""The first calls by NVLink multicast: what they compare, on ranks and kernels that are made up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

import weaveopt.ops  # noqa: F401
from weaveopt import _native
from weaveopt.errors import WeaveError
from weaveopt.fabrics import multicast
from weaveopt.fabrics.layout import Layout
from weaveopt.fabrics.topology import Group
from weaveopt.ops.reduction import first_call
from weaveopt.ops.reduction.call import ReductionCall, decode
from weaveopt.ops.reduction.first_call import MulticastCalls
from weaveopt.ops.reduction.operands import EpilogueOperands, QuantResults
from weaveopt.ops.reduction.peer import PeerReduction
from weaveopt.ops.reduction.reference import reference_quant
from weaveopt.records.candidate import Fabric

WORLD = 4
Spoil = Callable[[ReductionCall, QuantResults], QuantResults | None]
"""Changes the right results into those that a kernel returns; None: it does not run."""


@dataclass
class MadeUpArena:
    group: Group = field(default_factory=lambda: Group("tp", tuple(range(WORLD)), 1))

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)


@dataclass
class MadeUpSite:
    call: ReductionCall
    spoil: Spoil
    ran: list[str]

    def launch(self, tokens: int) -> object:
        return None if self.call.site in self.ran else object()

    def run(self, partial: Tensor, operands: EpilogueOperands) -> QuantResults | None:
        every = [first_call._partial(rank, self.call.dtype) for rank in range(WORLD)]
        assert torch.equal(partial, every[1]) and not any(x is not None for x in operands.vectors)
        self.ran.append(self.call.dtype)
        # Another order of the sum, in another precision.
        total = torch.stack(every[::-1]).double().sum(0).to(partial.dtype)
        return self.spoil(self.call, reference_quant([total], operands, self.call))


def said(monkeypatch: pytest.MonkeyPatch, spoil: Spoil) -> tuple[str, list[str]]:
    """Error of the first calls about a kernel, and the dtypes that ran."""
    ran: list[str] = []
    monkeypatch.setattr(PeerReduction, "bound_to", lambda memory, call, *of: MadeUpSite(call, spoil, ran))
    run = MulticastCalls().prepare(MadeUpArena())  # type: ignore[arg-type]
    assert not ran, "nothing is launched before all ranks are prepared"
    return run(), ran


def test_right_results_pass_in_every_form(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(monkeypatch, lambda call, results: results) == (
        "",
        ["bfloat16", "float16", "float32", "bfloat16", "bfloat16"],
    )


def off_by_one(at: int, results: QuantResults, value: float) -> QuantResults:
    """One element of one result is another."""
    changed = list(results)
    spoiled = changed[at].clone().float()
    spoiled[-1, -1] += value
    changed[at] = spoiled.to(results[at].dtype)
    return changed[0], changed[1], changed[2]


@pytest.mark.parametrize("value", [1.0, float("nan"), float("inf")])
@pytest.mark.parametrize(("at", "name"), [(0, "normalized"), (1, "sum")])
def test_one_wrong_element_is_enough(at: int, name: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    why, ran = said(monkeypatch, lambda call, results: off_by_one(at, results, value))
    assert why == (
        f"the first call by multicast, bfloat16 to bfloat16: 1 of 68608 elements of {name} are not the reference's"
    )
    assert ran == ["bfloat16"], "the first that is wrong is enough"


def test_a_wrong_scale_is_found_where_rows_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(call: ReductionCall, results: QuantResults) -> QuantResults:
        return results if results[2].numel() == 0 else off_by_one(2, results, 1.0)

    why, _ = said(monkeypatch, spoil)
    assert "bfloat16 to float8_e4m3fn: 1 of 67 elements of row_scale" in why


def test_rows_of_one_rank_alone_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A switch that does not sum would return these rows."""
    alone = lambda call, results: reference_quant([first_call._partial(1, call.dtype)], EpilogueOperands(), call)  # noqa: E731
    why, _ = said(monkeypatch, alone)
    assert "elements of normalized are not the reference's" in why


def test_a_kernel_that_does_not_run_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    why, _ = said(monkeypatch, lambda call, results: None)
    assert why.endswith("the kernel did not run")
    monkeypatch.setattr(MadeUpSite, "launch", lambda self, tokens: None)
    with pytest.raises(WeaveError, match="the GPU does not run the kernel"):
        said(monkeypatch, lambda call, results: results)


def test_the_calls_are_by_multicast_and_fit_what_they_ask_for() -> None:
    group = Group("tp", tuple(range(8)), 3)
    calls = first_call._calls(group)
    layout = MulticastCalls().layout(group)
    assert {call.fabric for call in calls} == {Fabric.MULTIMEM} and all(decode(call.encode()) == call for call in calls)
    assert {call.world for call in calls} == {8} and len({call.site for call in calls}) == len(calls)
    assert {buffer.name for buffer in layout.buffers} == {"output"} and layout.transient_bytes == 67 * 1024 * 4
    for call in calls:
        assert first_call.PeerReduction is PeerReduction and layout.holds(
            Layout.of(first_call.memory_plan("tp", [call]))
        )
    assert any(isinstance(each, MulticastCalls) for each in multicast._first_calls), "and every arena runs them"
    assert _native.MAX_WORLD * first_call._LARGEST <= 2**8, "exact in bfloat16, in any order"
