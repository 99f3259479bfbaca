"""Steps that cannot be compiled run in eager mode, and the report says why; ranks agree on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from transformers import PreTrainedModel
from transformers.generation import logits_process as hf
from transformers.generation.logits_process import LogitsProcessor

import weaveopt
from tests.graphs.generating import assert_same, ours, ragged, theirs
from tests.graphs.models import FAMILIES, load, save
from tests.ranks import run_ranks
from weaveopt.config import Config
from weaveopt.errors import AgreementError
from weaveopt.generation import ranks
from weaveopt.generation.compiled_or_plain import CompiledOrPlain
from weaveopt.generation.compiling import Backend
from weaveopt.generation.processors import History, apply_all, as_tensors
from weaveopt.records.generation import StepReport
from weaveopt.records.report import Report
from weaveopt.reporting.document import to_json
from weaveopt.reporting.document_reader import from_json

WHY = "BackendCompilerFailed: NotImplementedError: no code for this"
GROUP_OF_TWO = 2
LLAMA = next(family for family in FAMILIES if family.name == "llama")


class Failing:
    """A backend that compiles nothing after the first `good` graphs."""

    def __init__(self, good: int = 0) -> None:
        self.__name__ = "failing"
        self.good, self.asked = good, 0

    def __call__(self, module: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        self.asked += 1
        if self.asked > self.good:
            raise NotImplementedError("no code for this\nnor for that")
        return module.forward


def only_step(model: PreTrainedModel) -> StepReport:
    found = weaveopt.report(model).generation
    assert not found.left
    (step,) = found.steps
    return step


def on_one_line(report: Report) -> str:
    return " ".join(str(report).split())


def test_a_step_that_does_not_compile_runs_as_it_is(llama: PreTrainedModel) -> None:
    inputs, backend = ragged(), Failing()
    settings = {"eos_token_id": [5, 6, 7], "pad_token_id": 0, "repetition_penalty": 1.3}
    for _ in range(2):
        assert_same(ours(llama, inputs, backend, **settings), theirs(llama, inputs, **settings))
    assert backend.asked == 2, "once each for the model and for what chooses tokens"
    step = only_step(llama)
    assert (step.backend, step.not_compiled, step.choosing_not_compiled) == ("failing", WHY, WHY)
    report = weaveopt.report(llama)
    assert f"not compiled ({WHY}), what chooses tokens not compiled ({WHY}): " in on_one_line(report)
    assert from_json(to_json(report)).generation == report.generation


def test_what_chooses_tokens_fails_alone(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Failing()
    monkeypatch.setattr(Backend, "for_choosing", lambda _: Backend("failing", failing))
    inputs = ragged()
    assert_same(ours(llama, inputs, "eager"), theirs(llama, inputs))
    step = only_step(llama)
    assert (step.not_compiled, step.choosing_not_compiled) == ("", WHY)
    assert f"compiled with eager, what chooses tokens not compiled ({WHY}): " in on_one_line(weaveopt.report(llama))


def moved_twice(place: Tensor) -> Tensor:
    place.add_(1)
    torch._dynamo.graph_break()
    return place.add_(1) * 10


def test_what_ran_before_the_failure_is_undone() -> None:
    place, backend = torch.tensor(4), Failing(good=1)
    run = CompiledOrPlain("two graphs", moved_twice, Backend("failing", backend), (place,), "", Config())
    assert (int(run(place)), int(place)) == (60, 6) and backend.asked == 2
    assert (int(run(place)), int(place)) == (80, 8) and backend.asked == 2
    assert run.failure == WHY


def test_strict_raises(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEAVE_STRICT", "1")
    with pytest.raises(BackendCompilerFailed, match="no code for this"):
        ours(llama, ragged(), Failing())


def test_errors_of_the_function_itself_are_raised() -> None:
    def fails(place: Tensor) -> Tensor:
        return place.reshape(7)

    run = CompiledOrPlain("a reshape", fails, Backend("eager", "eager"), (), "", Config())
    with pytest.raises(RuntimeError, match="shape '\\[7\\]' is invalid for input of size 3"):
        run(torch.zeros(3))


SUMS: list[LogitsProcessor] = [hf.TopPLogitsWarper(0.8), hf.TypicalLogitsWarper(0.6, min_tokens_to_keep=3)]


@pytest.mark.parametrize("processor", SUMS, ids=lambda each: type(each).__name__)
def test_sums_over_the_vocabulary_are_not_compiled(processor: LogitsProcessor) -> None:
    """Inductor's split scan of many columns fails to compile (torch 2.11): it sees one operator."""
    (made,) = as_tensors([processor], batch=2)
    seen: list[str] = []

    def apply(scores: Tensor, history: History) -> Tensor:
        return apply_all([made], scores * 2, history, [])

    def noting(module: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        seen.extend(str(node.target) for node in module.graph.nodes if node.op.startswith("call"))
        return torch._inductor.compile(module, inputs)

    history = History(torch.zeros(2, 4, dtype=torch.int64), torch.tensor(3))
    scores = torch.randn(2, 300, generator=torch.Generator().manual_seed(4)) * 3
    found = torch.compile(apply, backend=noting)(scores, history)
    assert torch.equal(found, processor(history.ids, scores * 2))
    assert any("keep_by_sum" in each for each in seen) and not any(
        "sum" in each.replace("_by_sum", "") for each in seen
    )


def _agree(rank: int) -> list[str]:
    """All fail; they fail at different things; the second one alone fails."""
    assert dist.group.WORLD is not None
    group, said = str(dist.group.WORLD.group_name), []
    for what in ("the step", f"part {rank}", "the end"):
        if what == "the end" and rank == 0:
            continue
        try:
            ranks.agree_on_failure(group, what, "no code", 2.0)
            said.append("")
        except AgreementError as error:
            said.append(str(error))
    dist.barrier()
    return said


def test_ranks_agree_on_what_is_not_compiled() -> None:
    first, second = run_ranks(_agree, GROUP_OF_TWO)
    assert first[0] == second[0] == ""
    assert "rank 0 is at 'running part 0 uncompiled (no code)' while rank 1 could not compile part 1" in first[1]
    assert "rank 1 is at 'running part 1 uncompiled (no code)' while rank 0 could not compile part 0" in second[1]
    assert "rank 0 of (0, 1) did not come within 2 s for running the end uncompiled (no code)" in second[2]


def _generate(rank: int, folder: str) -> tuple[list[list[int]], StepReport]:
    if rank == 0:
        save(LLAMA, folder)
    dist.barrier()
    model, inputs = load(LLAMA, folder, GROUP_OF_TWO), ragged()
    assert_same(ours(model, inputs, Failing(), max_new_tokens=6), theirs(model, inputs, max_new_tokens=6))
    found = ours(model, inputs, Failing(), do_sample=True, max_new_tokens=6).sequences  # type: ignore[attr-defined]
    return found.tolist(), weaveopt.report(model).generation.steps[-1]


def test_ranks_run_uncompiled_together(tmp_path: Path) -> None:
    first, second = run_ranks(_generate, GROUP_OF_TWO, str(tmp_path))
    assert first[0] == second[0]
    (step, other) = (replace(each[1], loop_us=0.0, step_us=0.0) for each in (first, second))
    assert step == other and step.not_compiled == step.choosing_not_compiled == WHY
