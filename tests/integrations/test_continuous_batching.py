"""`generate_batch` compiled with weave: one graph a step, tokens of eager, and transformers' own cache elsewhere."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.fx as fx
from transformers import CompileConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache_allocators import (
    CachePool,
    FullAttentionCacheAllocator,
    SlidingAttentionCacheAllocator,
)
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingAsyncIOs, ContinuousBatchingIOs
from transformers.generation.continuous_batching.utils import build_attention_mask

import weaveopt
from tests.graphs.batching import batching, compiled, prompts, tokens
from tests.graphs.executing import without_code
from tests.graphs.generating import build
from tests.graphs.models import FAMILIES as KNOWN
from tests.graphs.models import Family, load, one_layer, save
from tests.graphs.nonempty import some
from tests.ranks import run_ranks
from tests.ranks.simulated import TEST_ALL
from weaveopt.errors import WeaveError
from weaveopt.integrations.transformers import continuous_batching as module
from weaveopt.integrations.transformers import step_inputs
from weaveopt.ops.attention.packed import packed_mask, rows_of_pages

LAYERS = {
    "llama": {"num_hidden_layers": 2},
    "mistral": {"num_hidden_layers": 1},
    "gemma3_text": {"num_hidden_layers": 2, "sliding_window_pattern": 2},
    "qwen3_moe": {"num_hidden_layers": 1},
}
"""Full attention, windows alone, both, and a mixture, by family."""


@pytest.mark.parametrize("family", LAYERS)
def test_a_step_is_one_graph(family: str) -> None:
    """Everything of weave but Inductor's code, whose C++ takes half a minute to compile."""
    torch._dynamo.reset()
    model = build(family, **LAYERS[family])
    inputs = prompts(4)
    eager = tokens(model, inputs, batching())
    with without_code():
        assert tokens(model, inputs, compiled()) == eager
    report = weaveopt.report(model)
    assert (report.breaks, report.uncompiled, report.num_graphs) == ((), (), 1)
    sites = [each.site.kind for graph in report.graphs for each in graph.decisions]
    assert sites.count("attention") == model.config.num_hidden_layers * len(report.graphs)
    assert ("mixture" in sites) == (family == "qwen3_moe")


def test_requests_that_come_and_go() -> None:
    """More requests than pages: some wait, some are moved out, and their prefixes are shared."""
    torch._dynamo.reset()
    model = build("llama", num_hidden_layers=1)
    inputs = prompts(40, seed=1, longest=60)
    inputs += [[*inputs[0], 7], [*inputs[1], 9, 11], inputs[2]]
    alone = [
        model.generate(torch.tensor([each]), max_new_tokens=8, do_sample=False, pad_token_id=0)[0, len(each) :].tolist()
        for each in inputs
    ]
    with without_code():
        assert tokens(model, inputs, compiled(num_blocks=24), new=8) == alone
    assert weaveopt.report(model).breaks == ()


def test_weights_that_change_between_calls() -> None:
    """A step of an optimizer changes parameters in place: nothing is compiled again, and tokens follow."""
    torch._dynamo.reset()
    model = build("llama", num_hidden_layers=1)
    inputs = prompts(3)
    with without_code():
        before = tokens(model, inputs, compiled())
        graphs = weaveopt.report(model).num_graphs
        optimizer = torch.optim.SGD(model.parameters(), lr=30.0)
        ids = torch.tensor([inputs[0] + [5, 6, 7]])
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        after = tokens(model, inputs, compiled())
    assert weaveopt.report(model).num_graphs == graphs
    assert after == tokens(model, inputs, batching()) and after != before


def test_without_the_call_every_layer_breaks() -> None:
    torch._dynamo.reset()
    model = build("llama", num_hidden_layers=1)
    inputs = prompts(1)
    eager = tokens(model, inputs, batching())
    with without_code():
        plain = CompileConfig(backend="weave", mode="default", dynamic=True)
        assert tokens(model, inputs, batching(plain)) == eager
    report = weaveopt.report(model)
    assert report.num_graphs > 2 and report.graphs
    assert any("PagedAttentionCache.update" in found.reason + found.hint for found in report.breaks), report.breaks
    assert "graph break" in str(report)


def test_other_backends_find_transformers_own_cache() -> None:
    torch._dynamo.reset()
    model = build("llama", num_hidden_layers=1)
    inputs = prompts(2)
    weaveopt.continuous_batching()
    targets: list[str] = []

    def keep(graph_module: fx.GraphModule, arguments: Sequence[object]) -> Callable[..., object]:
        targets.extend(str(node.target) for node in graph_module.graph.nodes)
        return graph_module.forward

    given: set[str] = set()
    model.register_forward_pre_hook(lambda _, arguments, named: given.update(named), with_kwargs=True)
    other = CompileConfig(backend=keep, mode="default", dynamic=True)
    assert tokens(model, inputs, batching(other)) == tokens(model, inputs, batching())
    assert targets and not any("paged_kv_update" in each for each in targets)
    assert "attention_mask" in given and step_inputs.LAYER_MASKS not in given, "models get what transformers gives them"


@pytest.mark.parametrize("seed", range(8))
def test_masks_are_transformers_own(seed: int) -> None:
    numbers = random.Random(seed)
    for _ in range(25):
        lengths = [(new, new + numbers.randint(0, 9)) for new in (numbers.randint(1, 5) for _ in range(seed % 5 + 1))]
        bounds = [list(itertools.accumulate(each, initial=0)) for each in zip(*lengths, strict=True)]
        shape = [each[-1] + numbers.randint(0, 5) for each in bounds]
        window, dtype = numbers.choice([0, 3, 6]), numbers.choice([torch.float32, torch.bfloat16])
        want = torch.full((1, 1, *shape), torch.finfo(dtype).min, dtype=dtype)
        build_attention_mask(want, *bounds, window or 1)
        padding = numbers.randint(0, 2)
        given = (torch.tensor(each + each[-1:] * padding, dtype=torch.int32) for each in bounds)
        assert torch.equal(packed_mask(*given, *shape, window, dtype), want), (bounds, shape, window)


@pytest.mark.parametrize("page_size", [1, 4, 7])
def test_rows_follow_the_pages_of_each_request(page_size: int) -> None:
    numbers = random.Random(page_size)
    for _ in range(25):
        lengths = [numbers.choice([0, 1, page_size, numbers.randint(1, 30)]) for _ in range(numbers.randint(1, 6))]
        starts: list[int] = []
        want: list[int] = []
        for length in lengths:
            own = [page_size * numbers.randrange(50) for _ in range(-(-length // page_size))]
            starts += own
            want += [start + at for start in own for at in range(page_size)][:length]
        padding = numbers.randint(0, 5)
        bounds = torch.tensor(list(itertools.accumulate(lengths, initial=0)), dtype=torch.int32)
        given = torch.tensor([*starts, *[7] * numbers.randint(1, 3)], dtype=torch.int32)
        rows = rows_of_pages(bounds, given, len(want) + padding, page_size, -1)
        assert rows.dtype is torch.int64 and rows.tolist() == want + [-1] * padding, (lengths, starts)


@pytest.mark.parametrize("seed", range(4))
def test_tokens_are_carried_over_as_transformers_does(seed: int) -> None:
    """From a step's results to the inputs of the next one, in which requests may be new, gone, or elsewhere."""
    draw = random.Random(seed)
    names = [f"req_{at}" for at in range(12)]

    def positions() -> dict[str, int]:
        chosen = draw.sample(names, draw.randint(0, len(names)))
        return dict(zip(chosen, draw.sample(range(20), len(chosen)), strict=True))

    def step(page_starts: object) -> SimpleNamespace:
        return SimpleNamespace(
            host_io=SimpleNamespace(page_starts=page_starts, req_id_to_new_token_position=positions())
        )

    compiled()
    for _ in range(20):
        pairs = SimpleNamespace(io_pairs=[step(True), step(True)], current_pair=draw.randint(0, 1), max_batch_tokens=20)
        found = ContinuousBatchingAsyncIOs.infer_carry_over_ids(pairs)
        for pair in pairs.io_pairs:
            pair.host_io.page_starts = None
        expected = ContinuousBatchingAsyncIOs.infer_carry_over_ids(pairs)
        assert found.dtype == expected.dtype and found.tolist() == expected.tolist()


def test_only_compiled_steps_are_without_transformers_masks() -> None:
    """A mask of the whole cache is neither allocated nor filled, and models that are not compiled have theirs."""
    model = build("llama", num_hidden_layers=1)
    masks: list[object] = []
    config = compiled()
    own = ContinuousBatchingIOs.get_model_kwargs

    def watched(self: ContinuousBatchingIOs, *args: object, **kwargs: object) -> object:
        masks.append(self.attention_mask)
        return own(self, *args, **kwargs)

    with mock.patch.object(ContinuousBatchingIOs, "get_model_kwargs", watched), without_code():
        tokens(model, prompts(2), config)
        assert masks and all(each is None for each in masks)
        masks.clear()
        tokens(model, prompts(2), batching())
        assert masks and all(isinstance(each, dict) for each in masks)


@pytest.mark.parametrize("kind", [FullAttentionCacheAllocator, SlidingAttentionCacheAllocator])
@pytest.mark.parametrize("num_read", [0, 9])
def test_the_operator_is_the_allocators_update(kind: type, num_read: int) -> None:
    config = build("mistral", num_hidden_layers=2).config
    allocator = kind(
        index=0, layer_indices=[0, 1], num_key_value_heads=2, config=config, cache_dtype=torch.float32, page_size=8,
        allow_block_sharing=False,
    )  # fmt: skip
    sector = allocator.bytes_per_block * 2
    memory = torch.zeros(sector * 6, dtype=torch.uint8)
    allocator.register_cache_tensor(sector, sector * 4, memory, CachePool(4, 1))
    numbers = torch.Generator().manual_seed(num_read)
    memory.view(torch.float32).normal_(generator=numbers)
    size = allocator.cache_tensor.shape[-1]
    rows = allocator.cache_tensor.shape[0] - 4 * allocator.tokens_per_page
    keys, values = (torch.randn(4, 2, size, generator=numbers) for _ in range(2))
    write = torch.randperm(rows, generator=numbers)[:4]
    read = torch.randperm(rows, generator=numbers)[:num_read]
    if num_read and kind is SlidingAttentionCacheAllocator:
        read[read == allocator.sentinel_index] = 2
        read[2:6] = allocator.sentinel_index
    for layer in (0, 1):
        before = memory.clone()
        want = allocator.update(keys, values, layer, read, write)
        stored = memory.clone()
        memory.copy_(before)
        arguments = {"cu_seq_lens_k": {allocator.layer_type: torch.tensor([0, 4])}, "max_length_k": {
            allocator.layer_type: 4}, "read_index": [read], "write_index": [write]}  # fmt: skip
        states = (each.transpose(0, 1).unsqueeze(0) for each in (keys, values))
        got = module._traced(allocator, *states, layer, arguments, memory)
        assert torch.equal(memory, stored) and not torch.equal(memory, before)
        for found, expected in zip(got, want, strict=True):
            assert torch.equal(found, expected.transpose(0, 1).unsqueeze(0))
        assert arguments["max_length_k"] == 4 and arguments["cu_seq_lens_k"].dtype is torch.int32
    sentinel = -1 if kind is FullAttentionCacheAllocator else allocator.sentinel_index
    given = (allocator.cache_tensor, keys, values, read, write, 0, allocator.tokens_per_page, sentinel)
    torch.library.opcheck(torch.ops.weave.paged_kv_update.default, given)


def _on_ranks(rank: int, family: str, folder: str) -> tuple[bool, int, list[str], list[str]]:
    model = load(one_layer(Family(family)), folder, 2)
    inputs = prompts(3)
    eager = tokens(model, inputs, batching())
    force = {"force": ["all_reduce_rms_norm"], "strict": True}
    with without_code():
        equal = tokens(model, inputs, compiled(force)) == eager
    report = weaveopt.report(model)
    kinds = [each.site.kind for graph in report.graphs for each in graph.decisions]
    rewritten = [each.chosen.choice for graph in report.graphs for each in graph.decisions if each.rewritten]
    return equal, len(report.breaks), kinds, rewritten


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"] if TEST_ALL else ["qwen3_moe"])
def test_sites_under_tensor_parallelism_are_rewritten(family: str, tmp_path: Path) -> None:
    known = next(each for each in KNOWN if each.name == family and not each.expert_parallel)
    save(one_layer(known), str(tmp_path))
    for equal, breaks, kinds, rewritten in some(run_ranks(_on_ranks, 2, family, str(tmp_path), timeout_s=300)):
        assert equal and breaks == 0
        assert rewritten.count("all_reduce_rms_norm") >= 2 and kinds.count("reduction") >= 2


def test_misuse_is_one_error() -> None:
    with pytest.raises(WeaveError, match="takes a ContinuousBatchingConfig, found dict"):
        weaveopt.continuous_batching({})  # type: ignore[arg-type]
    with pytest.raises(WeaveError, match="has a varlen_compile_config already"):
        weaveopt.continuous_batching(batching(CompileConfig()))
    config = batching()
    made = weaveopt.continuous_batching(config)["continuous_batching_config"]
    assert config.varlen_compile_config is None and made.varlen_compile_config is not None
    assert (made.q_padding_interval_size, config.q_padding_interval_size) == (module.QUERY_INTERVAL, 0)


@pytest.mark.parametrize(
    ("graphs", "is_async", "expected"),
    [
        (None, None, (True, True)),
        (True, None, (True, True)),
        ((True, False), None, ((True, False), True)),
        (True, False, (True, False)),
        (False, None, (False, None)),
        ((False, False), None, ((False, False), None)),
    ],
)
def test_steps_on_gpus_are_captured_and_prepared_ahead(graphs: object, is_async: object, expected: object) -> None:
    config = ContinuousBatchingConfig(use_cuda_graph=graphs, use_async_batching=is_async)
    with mock.patch.object(torch.cuda, "is_available", return_value=True):
        chosen = weaveopt.continuous_batching(config)["continuous_batching_config"]
    assert (chosen.use_cuda_graph, chosen.use_async_batching) == expected
    assert (config.use_cuda_graph, config.use_async_batching) == (graphs, is_async)
