"""`weave::expert_prefetch` on GPUs of one host: experts that peers read in place or fetch ahead, and compiled models of
ranks that call as they like."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.gpu.launch import ENVIRONMENT, needs_cuda_part, run_program, run_ranks
from tests.gpu.programs import Ranks
from weaveopt.integrations.transformers.registration import MODULE


@needs_cuda_part
@pytest.mark.multigpu
@pytest.mark.parametrize("world", [2, 4])
def test_experts_read_in_place_equal_the_reference(world: int) -> None:
    assert run_ranks(world, "tests.gpu.prefetch_ranks").count("prefetched experts agree") == world


@needs_cuda_part
@pytest.mark.multigpu
@pytest.mark.parametrize("world", [2, 4])
def test_experts_fetched_ahead_equal_those_read_in_place(world: int) -> None:
    assert run_ranks(world, "tests.gpu.ahead_ranks").count("experts fetched ahead agree") == world


@needs_cuda_part
@pytest.mark.gpu
def test_experts_fetched_ahead_by_ranks_of_one_process() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    assert "180 forwards agree" in run_program("tests.gpu.ahead_one_process")


@needs_cuda_part
@pytest.mark.multigpu
@pytest.mark.parametrize(
    ("program", "said"),
    [("prefetch_ranks", "a killed rank is still read"), ("ahead_ranks", "a killed rank is still pulled from")],
)
def test_a_killed_rank_is_still_read(program: str, said: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 CUDA GPUs, found {torch.cuda.device_count()}")
    first, second = Ranks([("killed",)] * 2, f"tests.gpu.{program}", ENVIRONMENT).end(120.0)
    assert first.code == 0 and said in first.out, first.err[-3000:]
    assert second.code not in (0, None), second.err[-3000:]


@needs_cuda_part
@pytest.mark.multigpu
@pytest.mark.parametrize("form", ["in_place", "ahead"])
def test_compiled_independent_ranks(form: str) -> None:
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec(MODULE) is None:
        pytest.skip(f"needs a transformers that has {MODULE} (5.23 or later)")
    told = run_ranks(2, "tests.gpu.independent_ranks", form, timeout_s=400)
    assert told.count("independent ranks agree") == 2, told
