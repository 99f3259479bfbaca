"""Data-parallel ranks with expert parallelism on GPUs: each has its own batch, and their mixtures are rewritten."""

from __future__ import annotations

import importlib.util

import pytest

from tests.gpu.launch import needs_cuda_part, run_ranks
from weaveopt.integrations.transformers.registration import MODULE


@needs_cuda_part
@pytest.mark.multigpu
def test_a_compiled_mixture_with_batches_of_their_own() -> None:
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec(MODULE) is None:
        pytest.skip(f"needs a transformers that has {MODULE} (5.23 or later)")
    assert run_ranks(2, "tests.gpu.own_batches_ranks", timeout_s=500).count("own batches agree") == 2
