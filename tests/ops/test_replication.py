"""A residual that differs between ranks: the library runs where it can, one clear error where it cannot."""

from __future__ import annotations

import warnings

import torch

from tests import forms
from tests.executing import FORCED, executing
from tests.ranks import run_ranks
from tests.tolerances import LIBRARY, assert_close
from weaveopt.errors import AgreementError


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
