"""The decode loop on a GPU: captured steps make transformers' tokens, are used again, and go away with the model."""

from __future__ import annotations

import gc
import weakref
from typing import NoReturn

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import weaveopt
from tests.gpu.launch import needs_cuda_part, run_ranks
from tests.graphs.generating import Heard, assert_same, build, ours, ragged, theirs
from weaveopt.generation import sessions
from weaveopt.generation.loop import MAX_AHEAD
from weaveopt.generation.session import STEPS_BEFORE_CAPTURE
from weaveopt.records.generation import StepReport

pytestmark = pytest.mark.gpu


def on_gpu(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: each.cuda() for name, each in inputs.items()}


def only_step(model: PreTrainedModel) -> StepReport:
    found = weaveopt.report(model).generation
    assert not found.left, found.left
    (step,) = found.steps
    assert step.captured, step.not_captured
    return step


@pytest.fixture
def llama() -> PreTrainedModel:
    return build("llama").cuda()


@pytest.mark.parametrize(
    ("name", "settings"),
    [("llama", {}), ("gemma2", {"sliding_window": 8}), ("mistral", {"sliding_window": 30}), ("gpt_oss", {}),
     ("mixtral", {}), ("deepseek_v3", {})],
)  # fmt: skip
def test_captured_steps_make_transformers_tokens(name: str, settings: dict[str, int]) -> None:
    model, inputs = build(name, **settings).cuda(), on_gpu(ragged())
    wanted = theirs(model, inputs, max_new_tokens=24)
    assert_same(ours(model, inputs, "weave", max_new_tokens=24), wanted)
    first = only_step(model)
    assert (first.steps, first.replays) == (23, 23 - STEPS_BEFORE_CAPTURE)
    assert_same(ours(model, inputs, "weave", max_new_tokens=24), wanted)
    second = only_step(model)
    assert second.calls == 2 and second.replays - first.replays == 23, "the second call captured again"


def test_steps_are_captured_without_a_compiler_too(llama: PreTrainedModel) -> None:
    """Nothing in a step may wait for the device."""
    inputs = on_gpu(ragged())
    assert_same(ours(llama, inputs), theirs(llama, inputs))
    assert only_step(llama).backend == "none"


def test_a_seed_gives_the_same_samples_captured_or_not(llama: PreTrainedModel) -> None:
    """The first call runs its first steps uncaptured; the second one replays them all."""
    inputs, found = on_gpu(ragged()), []
    settings = {"do_sample": True, "top_k": 40, "top_p": 0.95, "temperature": 0.9, "repetition_penalty": 1.1}
    for seed in (7, 7, 8):
        torch.manual_seed(seed)
        found.append(ours(llama, inputs, "inductor", **settings).sequences)  # type: ignore[attr-defined]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])
    assert only_step(llama).calls == 3


@pytest.mark.parametrize("settings", [{"top_p": 0.95}, {"typical_p": 0.9}], ids=lambda each: next(iter(each)))
def test_sums_over_a_large_vocabulary(settings: dict[str, float]) -> None:
    """Inductor would split the cumulative sum of so few rows, and fails to compile that (torch 2.11)."""
    model, inputs = build("llama", vocab_size=128256).cuda(), on_gpu(ragged(16))
    found = ours(model, inputs, "weave", do_sample=True, **settings).sequences  # type: ignore[attr-defined]
    assert found.shape == (16, 36)
    step = only_step(model)
    assert (step.not_compiled, step.choosing_not_compiled) == ("", "")


def test_steps_that_do_not_compile_are_captured_all_the_same(llama: PreTrainedModel) -> None:
    def failing(module: torch.fx.GraphModule, inputs: list[Tensor]) -> NoReturn:
        raise NotImplementedError("no code for this")

    inputs = on_gpu(ragged())
    for _ in range(2):
        assert_same(ours(llama, inputs, failing), theirs(llama, inputs))
    step = only_step(llama)
    assert "no code for this" in step.not_compiled and "no code for this" in step.choosing_not_compiled


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("batch", [1, 3])
def test_nothing_is_seen_of_steps_beyond_the_stop(name: str, batch: int) -> None:
    """Tokens, scores, what the streamer got, and the cache that is returned: of a window that is full, too."""
    model = build(name, **({"sliding_window": 24} if name == "mistral" else {})).cuda()
    inputs = on_gpu(ragged(batch))
    free = theirs(model, inputs, max_new_tokens=24).sequences[:, 20:].tolist()  # type: ignore[attr-defined]
    eos = [max(row[:20], key=row.index) for row in free]
    arguments = {"eos_token_id": eos, "pad_token_id": 0, "max_new_tokens": 60}
    wanted = theirs(model, inputs, **arguments)
    assert 24 < wanted.sequences.shape[1] < 80  # type: ignore[attr-defined]
    for _ in range(2):
        heard = Heard()
        found = ours(model, inputs, streamer=heard, **arguments)
        assert_same(found, wanted)
        assert heard.ends == 1
        assert torch.equal(torch.stack(heard.tokens[1:], dim=1), wanted.sequences[:, 20:].cpu())  # type: ignore[attr-defined]
        for one, other in zip(found.past_key_values.layers, wanted.past_key_values.layers, strict=True):  # type: ignore[attr-defined]
            torch.testing.assert_close(one.keys, other.keys, rtol=1e-3, atol=1e-4)
    step = only_step(model)
    assert 0 <= step.beyond_stop <= 2 * MAX_AHEAD


def test_weights_that_moved_are_read_where_they_are(llama: PreTrainedModel) -> None:
    inputs = on_gpu(ragged())
    ours(llama, inputs)
    with torch.no_grad():
        llama.lm_head.weight = torch.nn.Parameter(llama.lm_head.weight.flip(0).clone())
    assert_same(ours(llama, inputs), theirs(llama, inputs))


def test_memory_is_freed_with_the_model() -> None:
    def use() -> tuple[weakref.ref[PreTrainedModel], int]:
        model = build("llama").cuda()
        ours(model, on_gpu(ragged()), "inductor")
        ours(model, on_gpu(ragged(2)), "inductor")
        assert len(sessions.sessions_of(model)) == 2
        return weakref.ref(model), torch.cuda.memory_allocated()

    use()  # cuBLAS and cuBLASLt keep a workspace for each stream that they ran on
    gc.collect()
    before = torch.cuda.memory_allocated()
    gone, at_work = use()
    gc.collect()
    assert gone() is None
    left, taken = torch.cuda.memory_allocated() - before, at_work - before
    assert left < taken / 4, f"{left} bytes stay of {taken}"


@needs_cuda_part
@pytest.mark.multigpu
def test_ranks_make_the_same_tokens() -> None:
    printed = run_ranks(2, "tests.gpu.generate_ranks", timeout_s=400)
    assert printed.count("tokens as on the other rank") == 2
