"""Weights that change between calls of `generate_batch`: in place, moved or replaced, on one rank and on two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.model_runner import ModelRunner

import weaveopt
from tests.graphs.batching import batching, compiled, prompts, tokens
from tests.graphs.executing import without_code
from tests.graphs.generating import build
from tests.graphs.models import FAMILIES, load, one_layer, save
from tests.graphs.nonempty import some
from tests.ranks import run_ranks
from weaveopt.integrations.transformers.kept_managers import follow_weights

LLAMA = one_layer(next(each for each in FAMILIES if each.name == "llama"))
INPUTS = prompts(3)
LONG = [[at % 100 + 3 for at in range(first, first + 40)] for first in range(3)]
"""Longer than a page, so that their pages are kept for later requests."""


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch._dynamo.reset()
    return build("llama", num_hidden_layers=1)


@pytest.fixture(autouse=True)
def codeless() -> Iterator[None]:
    with without_code():
        yield


def other_weights(model: nn.Module, factor: float) -> dict[str, Tensor]:
    return {name: value.detach() * factor for name, value in model.state_dict().items()}


def assign(model: PreTrainedModel) -> None:
    model.load_state_dict(other_weights(model, -1.0), assign=True)


def replace_one(model: PreTrainedModel) -> None:
    model.lm_head.weight = nn.Parameter(-model.lm_head.weight.detach())


def step_of_an_optimizer(model: PreTrainedModel) -> None:
    ids = torch.tensor([INPUTS[0] + [5, 6, 7]])
    optimizer = torch.optim.SGD(model.parameters(), lr=30.0)
    model(ids, labels=ids).loss.backward()
    optimizer.step()


def change(model: PreTrainedModel, how: Callable[[PreTrainedModel], None]) -> tuple[bool, bool, int]:
    """True if tokens are eager's afterwards, true if they differ from those before, and how many graphs were added."""
    before = tokens(model, INPUTS, compiled())
    graphs = weaveopt.report(model).num_graphs
    how(model)
    after = tokens(model, INPUTS, compiled())
    added = weaveopt.report(model).num_graphs - graphs
    return after == tokens(model, INPUTS, batching()), after != before, added


@pytest.mark.parametrize("how", [assign, replace_one])
def test_moved_weights_run_what_was_compiled(how: Callable[[PreTrainedModel], None], model: PreTrainedModel) -> None:
    assert change(model, how) == (True, True, 0)


def test_another_dtype_is_compiled_anew() -> None:
    model = build("llama", num_hidden_layers=1)
    equal, _, added = change(model, lambda each: each.to(torch.bfloat16))
    assert equal and added > 0
    assert change(model, lambda each: each.to(torch.float32))[0]


def kept(model: PreTrainedModel, config: ContinuousBatchingConfig) -> list[list[int]]:
    until = GenerationConfig(max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=-1)
    found = model.generate_batch(LONG, until, config, persistent_manager=True)
    assert [each.error for each in found.values()] == [None] * len(LONG)
    return [each.generated_tokens for each in found.values()]


def test_a_kept_manager_shares_no_page_of_earlier_weights(model: PreTrainedModel) -> None:
    """transformers' own does: there the prefix of a prompt is what earlier weights made of it."""
    for config, is_right in ((compiled(), True), (batching(), False)):
        kept(model, config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.data.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.3)
        after = kept(model, config)
        model.destroy_cached_continuous_batching_manager()
        assert (after == tokens(model, LONG, batching(), new=4)) == is_right
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.neg_()


class _Graph:
    """A captured step."""

    gone = False

    def reset(self) -> None:
        self.gone = True


def test_a_kept_manager_drops_steps_captured_with_other_memory(model: PreTrainedModel) -> None:
    kept(model, compiled())
    inputs = model._cached_continuous_batching_manager.batch_processor.inputs_and_outputs
    graph = _Graph()
    inputs.graphs.set_graph((-1,), graph)
    kept(model, compiled())
    assert not graph.gone, "no weight has moved"
    assign(model)
    kept(model, compiled())
    assert graph.gone and inputs.graphs.get_graph((-1,)) is None
    model.destroy_cached_continuous_batching_manager()


class _Inputs:
    """transformers' inputs of steps, which keep what was captured."""

    def __init__(self) -> None:
        self.graphs: dict[int, _Graph] = {}


def test_steps_captured_before_a_compiled_graph_moved_weights_go() -> None:
    """Not those of its own first call, which read the new places."""
    model, inputs = nn.Linear(4, 4), _Inputs()
    inputs.graphs[1] = _Graph()
    follow_weights(model, inputs)
    assert list(inputs.graphs) == [1], "captured in the first step, after the weights had moved"
    follow_weights(model, inputs)
    assert list(inputs.graphs) == [1]
    model.weight.data = model.weight.data.clone()
    follow_weights(model, inputs)
    assert not inputs.graphs
    inputs.graphs[2] = _Graph()
    follow_weights(model, inputs)
    assert list(inputs.graphs) == [2]


def test_weights_that_a_step_moves_when_it_is_compiled_drop_no_later_step(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    model, moved = build("llama", num_hidden_layers=1), list[int]()
    until = GenerationConfig(max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=-1)
    settings = compiled()
    choose = ModelRunner._get_forward_fn

    def moving(self: object, use_block_table: bool) -> tuple[Callable[..., None], bool]:
        step, use_cuda_graph = choose(self, use_block_table=use_block_table)

        def run(*arguments: object) -> None:
            step(*arguments)
            if not moved:
                moved.append(1)
                for parameter in model.parameters():
                    parameter.data = parameter.data.clone()

        return run, use_cuda_graph

    monkeypatch.setattr(ModelRunner, "_get_forward_fn", moving)
    # Without a warm-up the first step of the loop compiles.
    model.generate_batch(LONG, until, settings, persistent_manager=True, warmup=False)
    assert moved
    graph = _Graph()
    inputs = model._cached_continuous_batching_manager.batch_processor.inputs_and_outputs
    inputs.graphs.set_graph((-1,), graph)
    model.generate_batch(LONG, until, settings, persistent_manager=True, warmup=False)
    assert not graph.gone
    model.destroy_cached_continuous_batching_manager()


def test_a_kept_manager_of_another_dtype_is_one_error(caplog: pytest.LogCaptureFixture) -> None:
    model = build("llama", num_hidden_layers=1)
    until = GenerationConfig(max_new_tokens=2, do_sample=False, pad_token_id=0, eos_token_id=-1)
    kept(model, compiled())
    model.to(torch.bfloat16)
    found = model.generate_batch(LONG, until, compiled(), persistent_manager=True)
    model.destroy_cached_continuous_batching_manager()
    # The log has it always, each result unless transformers sees first that its thread has ended, and reads none.
    for told in some([caplog.text, *(str(each.error) for each in found.values())]):
        assert "the model is torch.bfloat16 now, and its manager was made for torch.float32" in told


def _on_ranks(rank: int, folder: str) -> list[tuple[bool, bool, int]]:
    model = load(LLAMA, folder, 2)
    force = {"force": ["all_reduce_rms_norm"], "strict": True}
    found = []
    with without_code():
        for how in (step_of_an_optimizer, assign, replace_one):
            before = tokens(model, INPUTS, compiled(force))
            graphs = weaveopt.report(model).num_graphs
            how(model)
            after = tokens(model, INPUTS, compiled(force))
            added = weaveopt.report(model).num_graphs - graphs
            found.append((after == tokens(model, INPUTS, batching()), after != before, added))
    rewritten = [each.rewritten for graph in weaveopt.report(model).graphs for each in graph.decisions]
    assert any(rewritten)
    return found


def test_two_ranks_follow_their_weights(tmp_path: Path) -> None:
    save(LLAMA, str(tmp_path))
    for found in some(run_ranks(_on_ranks, 2, str(tmp_path), timeout_s=200)):
        assert found == [(True, True, 0)] * 3
