"""Forms of a block with dtypes in turn: what a rewrite makes of a form and of a dtype hangs on one of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from tests.graphs import forms
from tests.ranks.simulated import TEST_ALL

Case = tuple[Callable[..., object], torch.dtype]


def forms_with(*dtypes: torch.dtype) -> list[Case]:
    """Every form with the next of these; with `make test-all` every form with each."""
    if TEST_ALL:
        return list(itertools.product(forms.FORMS, dtypes))
    return list(zip(forms.FORMS, itertools.cycle(dtypes)))


def name_of(value: object) -> str:
    """Name of a form or a dtype."""
    return str(getattr(value, "__name__", value))
