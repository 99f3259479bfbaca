"""Requests that are cancelled, too long, moved out or streamed, several managers and models: as without a compile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import offloading_manager
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

import weaveopt
from tests.graphs.batching import batching, compiled, prompts, tokens
from tests.graphs.executing import without_code
from tests.graphs.generating import build
from weaveopt.records.generation import BatchedPath, BatchingReport
from weaveopt.reporting import document_reader, generation
from weaveopt.reporting.document import to_json

LONGEST_WAIT_S = 60.0


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """One model: the others run the code that the first test compiles."""
    torch._dynamo.reset()
    return build("llama", num_hidden_layers=1)


@pytest.fixture(autouse=True)
def codeless() -> Iterator[None]:
    with without_code():
        yield


def until(new: int) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=-1)


def alone(model: PreTrainedModel, prompt: list[int], new: int) -> list[int]:
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    found = model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0)
    return found[0, len(prompt) :].tolist()


def collected(manager: ContinuousBatchingManager, wanted: set[str]) -> dict[str, list[int]]:
    """Tokens of the requests of `wanted`, once all of them are finished."""
    found: dict[str, list[int]] = {}
    deadline = time.monotonic() + LONGEST_WAIT_S
    while set(found) != wanted:
        assert time.monotonic() < deadline, f"only {sorted(found)} came"
        result = manager.get_result(timeout=0.1)
        if result is not None and result.is_finished():
            assert result.error is None and result.request_id in wanted, result
            found[result.request_id] = result.generated_tokens
    return found


def test_a_cancelled_request_gives_its_pages_back_and_others_go_on(model: PreTrainedModel) -> None:
    inputs = prompts(3)
    with model.continuous_batching_context_manager(until(400), continuous_batching_config=compiled()) as manager:
        streamed = manager.add_request(inputs[0], streaming=True)
        other = manager.add_request(inputs[1], max_new_tokens=12)
        seen: list[list[int]] = []
        while len(seen) < 5:
            result = manager.get_result(timeout=1.0)
            if result is not None and result.request_id == streamed:
                seen.append(list(result.generated_tokens))
            elif result is not None:
                manager.output_router.output_queue.put(result)
        manager.cancel_request(streamed)
        while streamed in manager.batch_processor.scheduler.active_requests:
            time.sleep(0.01)
        late = manager.add_request(inputs[2], max_new_tokens=3)
        while not manager.output_router.output_queue.empty():
            result = manager.output_router.output_queue.get()
            if result.request_id != streamed:
                manager.output_router.output_queue.put(result)
                break
        found = collected(manager, {other, late})
        assert not manager.batch_processor.scheduler.has_pending_requests()
        manager.batch_processor.cache.evict_cached_blocks()
        manager.batch_processor.cache.pool.try_to_free_sectors()
        assert manager.batch_processor.cache.compute_free_capacity() == 1.0
    want = alone(model, inputs[0], 5)
    assert [each[: len(want)] for each in seen] == [want[: len(each)] for each in seen]
    assert found == {other: alone(model, inputs[1], 12), late: alone(model, inputs[2], 3)}


def test_a_request_longer_than_the_cache_ends_as_without_a_compile(model: PreTrainedModel) -> None:
    """transformers fails it, with all that still wait then; the next call runs."""
    inputs = [[5] * 600, *prompts(4)]
    outcomes = []
    for config in (batching(), compiled()):
        found = model.generate_batch(inputs, until(5), config, progress_bar=False)
        outcomes.append([(found[f"req_{at}"].error, found[f"req_{at}"].generated_tokens) for at in range(len(inputs))])
    eager, woven = outcomes
    assert woven == eager
    assert "No requests can be scheduled" in woven[0][0] and [error for error, _ in woven[1:]] == [None] * 4
    assert tokens(model, inputs[1:], compiled()) == [got for _, got in woven[1:]]


class _Unpinned:
    """torch for transformers' offloading, which asks for pinned memory: there is none without an accelerator."""

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)

    def empty(self, *size: object, pin_memory: bool = False, **settings: object) -> torch.Tensor:
        return torch.empty(*size, **settings)  # type: ignore[call-overload, no-any-return]


def test_requests_that_are_moved_to_host_memory_come_back(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offloading_manager, "torch", _Unpinned())
    inputs = prompts(12, seed=1, longest=60)
    want = [alone(model, each, 24) for each in inputs]
    config = compiled(num_blocks=16)
    config.cpu_offload_space = 0.01
    restore = offloading_manager.OffloadingManager.restore_scheduled_requests
    restored: list[str] = []

    def noted(self: object, requests: list[object]) -> None:
        restored.extend(each.state.request_id for each in requests if each.state.is_cpu_offloaded)  # type: ignore[attr-defined]
        restore(self, requests)

    with mock.patch.object(offloading_manager.OffloadingManager, "restore_scheduled_requests", noted):
        assert tokens(model, inputs, config, new=24) == want
    assert restored


def test_managers_and_models_take_turns(model: PreTrainedModel) -> None:
    """Two at once, each of them used twice, and later calls of a manager that is kept."""
    other = build("llama", num_hidden_layers=1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.neg_()
    inputs = prompts(4, seed=3)
    want = {each: [alone(each, prompt, 4) for prompt in inputs] for each in (model, other)}
    assert want[model] != want[other]
    with (
        model.continuous_batching_context_manager(until(4), continuous_batching_config=compiled()) as first,
        other.continuous_batching_context_manager(until(4), continuous_batching_config=compiled()) as second,
    ):
        for half in (inputs[:2], inputs[2:]):
            for manager, each in ((first, model), (second, other)):
                ids = manager.add_requests(half)
                found = collected(manager, set(ids))
                assert [found[name] for name in ids] == [want[each][inputs.index(prompt)] for prompt in half]
    for _ in range(2):
        found = model.generate_batch(inputs, until(4), compiled(), persistent_manager=True)
        assert [each.generated_tokens for each in found.values()] == want[model]
    model.destroy_cached_continuous_batching_manager()


def test_the_report_counts_steps_by_path_and_size(model: PreTrainedModel) -> None:
    before = weaveopt.report(model).generation.batching
    assert tokens(model, prompts(2, seed=4, longest=7), compiled(), new=5)
    report = weaveopt.report(model)
    (path,) = report.generation.batching.paths
    assert (path.path, path.backend) == ("varlen", "weave") and {tokens for tokens, _ in path.sizes} <= {
        *range(8, 65, 8)
    }
    assert path.steps == sum(each.steps for each in before.paths) + 5
    share = report.generation.batching.host_share
    assert share is not None and 0.0 < share < 1.0
    assert f"generate_batch: {path.steps} steps of any lengths, compiled with weave" in str(report)
    assert "of the loop's time outside of steps" in str(report)
    assert document_reader.from_json(to_json(report)).generation == report.generation
    tokens(model, prompts(1), batching())
    assert weaveopt.report(model).generation == report.generation, "loops that weave does not compile are not watched"


def test_both_paths_and_overlapped_loops_are_printed() -> None:
    sizes = ((1, 5), (2, 1), (4, 9), (8, 2), (16, 3))
    paths = (BatchedPath("varlen", "weave", ((64, 1),)), BatchedPath("block_tables", "none", sizes))
    report = BatchingReport(paths, 100.0, 90.0)
    lines = list(generation.lines(replace(weaveopt.report().generation, steps=(), left=(), batching=report)))
    assert lines == [
        "generate_batch: 1 step of any lengths, compiled with weave (tokens with padding: 1 of 64)",
        "generate_batch: 20 steps by block tables, not compiled (tokens with padding: 9 of 4, 5 of 1, 3 of 16, 2 of 8, "
        "1 other size)",
        f"generate_batch: {generation.WARM_UP}",
        "generate_batch: 10% of the loop's time outside of steps",
    ]
    assert replace(report, overlapped=True).host_share is None and BatchingReport().host_share is None


def test_other_backends_loops_are_transformers_own(model: PreTrainedModel) -> None:
    """Also once loops are watched: no error of theirs is replaced."""
    compiled()

    def failing(*_: object, **__: object) -> None:
        raise RuntimeError("of the test")

    config: ContinuousBatchingConfig = batching()
    with mock.patch.object(torch.nn.Module, "__call__", failing):
        found = model.generate_batch(prompts(1), until(2), config)
    assert [each.error for each in found.values()] == ["of the test"]
