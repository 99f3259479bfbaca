"""Sessions of the decode loop: what later calls reuse, what they must not reuse, and when it is freed."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.fx as fx
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

import weaveopt
from tests.graphs.generating import assert_same, build, ours, ragged, steps_of, theirs
from weaveopt.generation import sessions
from weaveopt.generation.session import GraphPool
from weaveopt.integrations.transformers.cache_argument import cache_argument, with_cache


def cache_of(output: object) -> Cache:
    return getattr(output, cache_argument())  # type: ignore[no-any-return]


def test_calls_of_about_one_shape_share_a_step(llama: PreTrainedModel) -> None:
    torch._dynamo.utils.counters.clear()
    for length, new in ((20, 16), (24, 9), (30, 30)):
        inputs = ragged(2, length)
        assert_same(ours(llama, inputs, "eager", max_new_tokens=new), theirs(llama, inputs, max_new_tokens=new))
    assert steps_of(llama) == (1, 3)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2, "compiled once"
    ours(llama, ragged(2, 80), "eager")
    assert steps_of(llama) == (2, 4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4


def test_only_so_many_shapes_are_kept(llama: PreTrainedModel) -> None:
    for batch in range(1, sessions.MAX_SESSIONS + 3):
        ours(llama, ragged(batch), max_new_tokens=2)
    kept = sessions.sessions_of(llama)
    assert [session.buffers.ids.shape[0] for session in kept] == [3, 4, 5, 6]


def test_returned_caches_and_scores_stay_as_they_are(llama: PreTrainedModel) -> None:
    first = ours(llama, ragged())
    keys = [layer.keys.clone() for layer in cache_of(first).layers]
    scores = [each.clone() for each in first.scores]  # type: ignore[attr-defined]
    other = {name: each.flip(1) if name == "input_ids" else each for name, each in ragged().items()}
    second = ours(llama, other)
    assert not torch.equal(first.sequences, second.sequences)  # type: ignore[attr-defined]
    for layer, before in zip(cache_of(first).layers, keys, strict=True):
        assert torch.equal(layer.keys, before)
    assert all(map(torch.equal, first.scores, scores))  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("implementation", [None, "static"])
@pytest.mark.parametrize("new", [4, 30])
def test_a_returned_cache_is_transformers_own(name: str, implementation: str | None, new: int) -> None:
    model = build(name, **({"sliding_window": 24} if name == "mistral" else {}))
    settings = {"cache_implementation": implementation, "max_new_tokens": new}
    inputs = ragged(2)
    found = cache_of(ours(model, inputs, **settings))
    wanted = cache_of(theirs(model, inputs, **settings))
    assert type(found) is type(wanted) and len(found) == len(wanted)
    assert int(found.get_seq_length()) == int(wanted.get_seq_length())
    for one, other in zip(found.layers, wanted.layers, strict=True):
        assert type(one) is type(other) and one.keys.shape == other.keys.shape
        torch.testing.assert_close(one.keys, other.keys, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(one.values, other.values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("prompts", ["ragged", "whole", "new alone"])
@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_a_conversation_goes_on_in_the_users_cache(llama: PreTrainedModel, kind: type, prompts: str) -> None:
    """transformers drops the mask of prompts without padding; ids may leave out what the cache holds."""

    def cache() -> DynamicCache | StaticCache:
        return StaticCache(llama.config, max_cache_len=64) if kind is StaticCache else DynamicCache()

    inputs, caches = ragged(2), (cache(), cache())
    if prompts != "ragged":
        inputs = {name: value[1:] for name, value in inputs.items()}
    first = ours(llama, inputs, **with_cache(caches[0])), theirs(llama, inputs, **with_cache(caches[1]))
    assert_same(*first)
    more = torch.full((len(inputs["input_ids"]), 4), 9)
    following = []
    for call, found, held in zip((ours, theirs), first, caches, strict=True):
        ids = torch.cat([found.sequences, more], dim=1)  # type: ignore[attr-defined]
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, ids.shape[1] - 20), value=1)
        if prompts == "new alone":
            ids = ids[:, int(held.get_seq_length()) :]
        following.append(call(llama, {"input_ids": ids, "attention_mask": mask}, **with_cache(held)))
    assert_same(*following)
    assert int(caches[0].get_seq_length()) == int(caches[1].get_seq_length())
    assert steps_of(llama)[1] == 2


def test_weights_that_moved_are_read_where_they_are() -> None:
    model, inputs = build("llama"), ragged()
    ours(model, inputs, "eager")
    before = sessions.sessions_of(model)
    with torch.no_grad():
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(0).clone())
    assert_same(ours(model, inputs, "eager"), theirs(model, inputs))
    assert sessions.sessions_of(model)[0] is not before[0]


def test_weights_that_a_compiled_graph_moves_in_its_first_call_keep_the_step() -> None:
    """As `merged_gemm` does on GPUs: parameters keep their identity and values, and have another address."""
    model, inputs, graphs = build("llama"), ragged(), []

    def moving(module: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        def run(*arguments: object) -> object:
            if id(module) not in graphs:
                graphs.append(id(module))
                for parameter in model.parameters():
                    parameter.data = parameter.data.clone()
            return module(*arguments)

        return run

    assert_same(ours(model, inputs, moving), theirs(model, inputs))
    (session,) = sessions.sessions_of(model)
    assert len(graphs) == 2, "the prefill is the model's own, and a step is two graphs"
    assert_same(ours(model, inputs, moving), theirs(model, inputs))
    assert sessions.sessions_of(model) == (session,) and len(graphs) == 2


def test_graphs_share_memory_as_long_as_one_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch asserts that a capture's pool is used by another graph, or is new."""
    numbers = itertools.count(1)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(numbers)))
    pool, one, other = GraphPool(), *(torch.nn.Module() for _ in range(2))
    assert [pool.handle(), pool.handle()] == [(0, 1), (0, 2)], "no graph was captured with the first"
    for graph in (one, other):
        pool.add(graph)  # type: ignore[arg-type]
    del one, graph
    assert pool.handle() == (0, 2)
    pool.give_up()
    assert pool.handle() == pool.handle() == (0, 3), "a failed capture's"
    del other
    assert pool.handle() == (0, 4)


def test_weights_written_in_place_keep_the_step() -> None:
    model, inputs = build("llama"), ragged()
    ours(model, inputs, "eager")
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0).clone())
    assert_same(ours(model, inputs, "eager"), theirs(model, inputs))
    assert steps_of(model) == (1, 2)


@pytest.mark.usefixtures("little_garbage")
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_caches_are_freed_with_the_model(backend: str | None) -> None:
    model = build("llama")
    ours(model, ragged(), backend, repetition_penalty=1.2)
    (session,) = sessions.sessions_of(model)
    keys = weakref.ref(session.cache.layers[0].keys)
    gone = weakref.ref(model), weakref.ref(session)
    del model, session
    gc.collect()
    assert keys() is None and [each() for each in gone] == [None, None]


def test_a_second_thread_goes_to_transformers_loop(llama: PreTrainedModel) -> None:
    ours(llama, ragged())
    (session,) = sessions.sessions_of(llama)
    found: list[object] = []
    with session.lock:
        thread = threading.Thread(target=lambda: found.append(ours(llama, ragged())))
        thread.start()
        thread.join()
    assert_same(found[0], theirs(llama, ragged()))
    (left,) = weaveopt.report(llama).generation.left
    assert [reason.code for reason in left.reasons] == ["busy"]
