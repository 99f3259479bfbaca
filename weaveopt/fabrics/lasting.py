"""Allocation of tensors that outlive the call that creates them, whatever torch mode that call runs in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily


@contextmanager
def lasting_tensors() -> Iterator[None]:
    """Tensors made inside are ordinary ones without gradients, which any later call may write to.

    The first call of a model may run under `torch.inference_mode()`, whose tensors no call outside of it may write to
    ("Inplace update to inference tensor"), with gradients enabled, or inside of a trace by fake tensors.
    """
    with torch.inference_mode(False), torch.no_grad(), unset_fake_temporarily():
        yield
