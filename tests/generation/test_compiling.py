"""The backend of a step: the call's, otherwise the one the model was compiled with, otherwise weave."""

from __future__ import annotations

import pytest
import torch
from torch._inductor import list_options
from transformers import CompileConfig, GenerationConfig

from weaveopt.generation.compiling import ONE_ROW, SIDE_BY_SIDE, Backend, backend_for, with_own_code


def test_a_call_names_its_backend() -> None:
    model = torch.nn.Linear(2, 2)
    asked = GenerationConfig(compile_config=CompileConfig(backend="inductor"))
    assert backend_for(model, asked) == Backend("inductor", "inductor"), "its graphs would lie inside of ours"
    asked.compile_config = CompileConfig(backend="inductor", mode="max-autotune")
    assert backend_for(model, asked) == Backend("inductor", "inductor", "max-autotune-no-cudagraphs")
    asked.disable_compile = True
    assert backend_for(model, asked) is None


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_compiled_model_says_what_with(mode: str | None) -> None:
    model = torch.nn.Linear(2, 2)
    assert backend_for(model, GenerationConfig()) == Backend("weave", "weave")
    model.compile(backend="weave", mode=mode)
    assert backend_for(model, GenerationConfig()) == Backend("weave", "weave")
    model.compile(backend="weave", options={"strict": True, "cuda_graphs": True})
    assert backend_for(model, GenerationConfig()) == Backend("weave", "weave", None, (("strict", True),))
    model.compile(backend="aot_eager")
    assert backend_for(model, GenerationConfig()) == Backend("aot_eager", "aot_eager")


def test_copies_have_code_of_their_own() -> None:
    def double(x: int) -> int:
        return 2 * x

    one, other = with_own_code(double), with_own_code(double)
    assert one(4) == other(4) == 8
    assert len({id(each.__code__) for each in (double, one, other)}) == 3


def test_steps_of_one_row_are_tuned_unless_the_user_said_how() -> None:
    tuned = Backend("weave", "weave", None, (("strict", True),)).for_one_row()
    assert tuned.options == (("strict", True), (ONE_ROW, True), (SIDE_BY_SIDE, True)) and tuned.for_one_row() == tuned
    assert {ONE_ROW, SIDE_BY_SIDE} <= set(list_options())
    separate = Backend("weave", "weave", None, ((SIDE_BY_SIDE, False),)).for_one_row()
    assert separate.options == ((SIDE_BY_SIDE, False), (ONE_ROW, True))
    for kept in (
        Backend("weave", "weave", None, ((ONE_ROW, False),)),
        Backend("inductor", "inductor", "max-autotune-no-cudagraphs"),
        Backend("aot_eager", "aot_eager"),
    ):
        assert kept.for_one_row() == kept
