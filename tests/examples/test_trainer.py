"""Hugging Face's Trainer and accelerate: a few steps under weave have the losses that inductor's have."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import TrainingArguments

import weaveopt
from tests.graphs.executing import without_code
from tests.ranks import run_ranks
from weaveopt.accelerator import WeavePlugin

EXAMPLES = str(Path(__file__).resolve().parents[2] / "examples")
STEPS = 2


def _losses(
    rank: int, parallel: str, backends: tuple[str, ...], codeless: bool
) -> tuple[dict[str, list[float]], int, int]:
    """Losses by backend; then the numbers of forward graphs and of reductions that weave found."""
    sys.path.insert(0, EXAMPLES)
    import trainer
    from accelerate import ParallelismConfig

    import tiny_llama

    here = tiny_llama.Ranks(rank, 2, torch.device("cpu"))
    found = {}
    # accelerate trains tensor-parallel models on GPUs only; all that keeps it from CPU ranks is this check.
    with mock.patch.object(ParallelismConfig, "_validate_accelerator"):
        for backend in ("eager", *backends):
            torch._dynamo.reset()
            model = trainer.make(parallel, 64, 1, here)
            if backend != "eager":
                model.compile(backend=backend)
            with without_code() if codeless else contextlib.nullcontext():
                found[backend] = trainer.losses(model, STEPS, here)
    report = weaveopt.report(model)
    kinds = [decision.site.kind for graph in report.graphs for decision in graph.decisions]
    return found, report.num_graphs, kinds.count("reduction")


def test_trainer_has_inductors_losses() -> None:
    for found, graphs, reductions in run_ranks(_losses, 2, "data", ("inductor", "weave"), False, timeout_s=400):
        assert len(found["weave"]) == STEPS
        assert found["weave"] == pytest.approx(found["inductor"], rel=1e-5)
        assert found["weave"] == pytest.approx(found["eager"], rel=1e-4)
        assert graphs and not reductions


def test_trainer_of_a_sharded_model_has_eagers_losses() -> None:
    """The graphs as they are rewritten: what Inductor makes of such, tests/test_backend.py compares."""
    for found, graphs, reductions in run_ranks(_losses, 2, "tensor", ("weave",), True, timeout_s=400):
        assert len(found["weave"]) == STEPS
        assert found["weave"] == pytest.approx(found["eager"], rel=1e-4)
        assert graphs and reductions


def test_plugin_has_accelerate_compile_with_weave() -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    try:
        accelerator = Accelerator(cpu=True, dynamo_plugin=WeavePlugin(dynamic=False))
        model = accelerator.prepare(nn.Linear(8, 8, bias=False))
        model(torch.ones(2, 8))
    finally:
        AcceleratorState._reset_state(True)
    assert weaveopt.report(model).num_graphs == 1
    assert WeavePlugin(mode="max-autotune").to_kwargs() == {"backend": "weave", "mode": "max-autotune"}


def test_closed_list_refuses_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusals that docs/trainer.md names. If this fails, accelerate has opened its list, and so can the page."""
    with pytest.raises(ValueError, match="'WEAVE' is not a valid DynamoBackend"):
        WeavePlugin.__base__(backend="weave")  # type: ignore[misc]
    with pytest.raises(ValueError, match="'WEAVE' is not a valid DynamoBackend"):
        from transformers import Trainer

        monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # TrainingArguments sets it for the whole process
        arguments = TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, report_to=[], torch_compile=True, torch_compile_backend="weave"
        )
        Trainer(model=nn.Linear(2, 2), args=arguments)
