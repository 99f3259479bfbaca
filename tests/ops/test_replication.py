"""A residual that differs between ranks: the library runs where it can, one clear error where it cannot."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.graphs import forms
from tests.graphs.executing import FORCED, executing
from tests.graphs.tolerances import LIBRARY, assert_close
from tests.ranks import run_ranks
from weaveopt.errors import AgreementError
from weaveopt.fabrics.replicated import compare


def _residual_differs(rank: int) -> tuple[int, str]:
    """Twice through a site whose sum every rank keeps whole; then a chain that shards it."""
    weights = forms.make_weights(torch.float32)
    x = torch.ones(1, 300, forms.INNER)
    residual = torch.randn(1, 300, forms.HIDDEN, generator=torch.Generator().manual_seed(rank))
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch._dynamo.reset()
        compiled = torch.compile(lambda x, r: forms.pre_norm(weights, x, r), backend=executing(FORCED, []))
        for _ in range(2):
            for got, want in zip(compiled(x, residual), forms.pre_norm(weights, x, residual), strict=True):
                assert_close(got, want, LIBRARY, "with a residual of its own on every rank")
        told = sum("the residual on rank 0 is not the one on rank 1" in str(each.message) for each in caught)
        torch._dynamo.reset()
        compiled = torch.compile(lambda x, r: forms.chain(weights, x, r), backend=executing(FORCED, []))
        try:
            compiled(x, residual)
        except AgreementError as error:
            return told, str(error)
    return told, ""


def test_a_residual_that_differs_between_ranks_goes_through_the_library() -> None:
    """Nothing in a graph says that a residual is replicated; the first call looks."""
    for told, text in run_ranks(_residual_differs, 2, timeout_s=300):
        assert told == 1
        assert "the residual on rank 0" in text and "disable" in text


VALUES = {"not finite": float("nan"), "infinite": float("inf"), "zeros": 0.0}
"""Values of the first residual on all ranks, which prove nothing of the next one."""


def _differs_later(rank: int, first: float) -> list[str]:
    """The same residual on all ranks first, and one of its own on every rank in the next call."""
    weights = forms.make_weights(torch.float32)
    x = torch.ones(1, 300, forms.INNER)
    errors = []
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for form in (forms.pre_norm, forms.chain):
            torch._dynamo.reset()
            compiled = torch.compile(lambda x, r, form=form: form(weights, x, r), backend=executing(FORCED, []))
            compiled(x, torch.full((1, 300, forms.HIDDEN), first))
            residual = torch.randn(1, 300, forms.HIDDEN, generator=torch.Generator().manual_seed(rank))
            try:
                found = compiled(x, residual)
            except AgreementError as error:
                errors.append(str(error))
                continue
            for got, want in zip(found, form(weights, x, residual), strict=True):
                assert_close(got, want, LIBRARY, f"{form.__name__} after {first} on all ranks")
    return errors


@pytest.mark.parametrize("first", VALUES.values(), ids=VALUES)
def test_a_first_residual_that_shows_no_difference_proves_nothing(first: float) -> None:
    for errors in run_ranks(_differs_later, 2, first, timeout_s=300):
        assert len(errors) <= 1 and all("the residual on rank 0" in each for each in errors), errors


def _marks_of(rank: int) -> list[tuple[bool, bool]]:
    """For each value of this rank: true if ranks found it equal, and true if that holds for later calls."""
    nan, inf = float("nan"), float("inf")
    rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    own = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))

    def put(x: torch.Tensor, place: int, value: float) -> torch.Tensor:
        x = x.clone()
        x.view(-1)[place] = value
        return x

    residuals = [
        rows, own, put(rows, 3, nan), put(own, 3, nan), put(rows, 3 + rank, nan), put(rows, 3, inf if rank else -inf),
        put(rows, 3, inf), rows * nan, rows * 0, rows[:0], own * 0,
    ]  # fmt: skip
    found = [compare("0", "here", [("norm weight", rows[0]), ("residual", each)], 30.0) for each in residuals]
    found.append(compare("0", "here", [("norm bias", rows[0] * 0), ("residual", None)], 30.0))
    return [(each.difference is None, each.proven) for each in found]


def test_what_a_value_proves() -> None:
    same, differ = (True, True), (False, True)
    unproven, differ_now = (True, False), (False, False)
    wanted = [
        same, differ, unproven, differ_now, differ_now, differ_now,
        unproven, unproven, unproven, unproven, unproven,
        same,
    ]  # fmt: skip
    assert run_ranks(_marks_of, 2) == [wanted] * 2
