"""`weaveopt.replicated_key_heads`: four ranks and two key heads, against the whole model in one process.

What ranks compute together is compared with the whole model on real ranks, for every family, and compiled for one of
them. What compiling changes is compared with eager on equal ranks of one process. `make test-all` compiles all families
on real ranks, and every step of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.distributed import DistributedConfig

import weaveopt
from tests.graphs.executing import FORCED, Backend, executing, executing_alone
from tests.graphs.models import FAMILIES, VOCABULARY, Family, config_of, one_layer, save
from tests.ranks import run_ranks
from tests.ranks.simulated import TEST_ALL, equal_ranks
from weaveopt.errors import WeaveError
from weaveopt.integrations.transformers.cache_argument import cache_argument, with_cache
from weaveopt.integrations.transformers.key_heads import ATTENTION_STYLE
from weaveopt.records.report import GraphReport

WORLD = 4
NUM_KEY_HEADS = 2
UNSHARDED = {"phi3", "olmo2", "deepseek_v3", "gpt_oss", "gpt_oss-ep"}
"""Families, by id, whose ranks attend with all heads under transformers' own plan, so that none needs replicas."""
CAPTURED = ("llama", "gemma2", "qwen3_moe", "mixtral-ep")
GENERATED = ("llama", "qwen3", "mixtral")
TRAINED = ("llama", "qwen2", "qwen3")
TESTED = tuple(
    one_layer(known, num_attention_heads=8, num_key_value_heads=8 if known.name == "deepseek_v3" else NUM_KEY_HEADS)
    for known in FAMILIES
)
"""Two query heads for each rank; key heads of DeepSeek are its query heads."""
PARTS = (slice(0, 7), slice(7, 8), slice(8, 9))
"""A prompt, and two steps over its cache, each of which is a graph of its own."""
ON_RANKS = {each: len(PARTS) for each in CAPTURED} if TEST_ALL else {"llama": 1}
"""How many graphs of a family are compiled on real ranks."""


def _parallel(family: Family, path: str) -> DistributedConfig:
    asked = DistributedConfig(tp_size=WORLD, ep_size=WORLD if family.expert_parallel else None)
    return weaveopt.replicated_key_heads(path, asked)


def _load(path: str, parallel: DistributedConfig | None) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, distributed_config=parallel).eval()


def _prompt() -> Tensor:
    return torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(5))


def _logits(model: nn.Module, num_parts: int = len(PARTS)) -> Tensor:
    """Logits of a prompt, and of steps over its cache."""
    ids, found = _prompt(), []
    cache = DynamicCache(config=model.config)
    for part in PARTS[:num_parts]:
        output = model(input_ids=ids[:, part], use_cache=True, **with_cache(cache))
        cache = getattr(output, cache_argument())
        found.append(output.logits)
    return torch.cat(found, dim=1)


def _differ(what: str, got: Tensor, want: Tensor) -> list[str]:
    if got.shape == want.shape and torch.allclose(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max())):
        return []
    return [f"{what}: {tuple(got.shape)}, {(got - want).abs().max():.2e} of {want.abs().max():.2e}"]


def _check(rank: int, families: tuple[Family, ...], folder: str) -> list[str]:
    problems: list[str] = []
    for family in families:
        path = f"{folder}/{family.id}"
        if rank == 0:
            save(family, path)
        dist.barrier()
        problems.extend(f"{family.id}: {problem}" for problem in _problems(family, path))
    return problems


def _problems(family: Family, path: str) -> list[str]:
    parallel = _parallel(family, path)
    styles = parallel.tp_plan.values() if isinstance(parallel.tp_plan, dict) else ()
    problems = [] if (ATTENTION_STYLE in styles) is (family.id not in UNSHARDED) else [f"plan {parallel.tp_plan}"]
    whole, model = _load(path, None), _load(path, parallel)
    with torch.no_grad():
        want = _logits(whole)
        problems += _differ("eager", _logits(model), want)
        if family.id in GENERATED:
            problems += _generated(whole, model)
        if num_parts := ON_RANKS.get(family.id):
            problems += _captured(model, want[:, : PARTS[num_parts - 1].stop], num_parts, executing)
    if family.id in TRAINED:
        called = torch.compile(model, backend="aot_eager") if TEST_ALL and family.id == "llama" else model
        problems += _gradients_differ(_gradients(called), _gradients(whole))
        # What is saved is the checkpoint that was loaded.
        held = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in _weights(model)}
        problems += [name for name, each in whole.named_parameters() if not torch.equal(held[name], each)]
    return problems


def _weights(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, each.detach()) for name, each in model.named_parameters()]


def _captured(
    model: PreTrainedModel,
    want: Tensor,
    num_parts: int,
    backend: Backend,
) -> list[str]:
    reports: list[GraphReport] = []
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend(FORCED, reports), dynamic=False)
    problems = _differ("captured", _logits(compiled, num_parts), want)
    left = [d.site.module for each in reports for d in each.decisions if d.site.kind == "reduction" and not d.rewritten]
    num_reductions = sum(d.site.kind == "reduction" for each in reports for d in each.decisions)
    if left or not num_reductions:
        problems.append(f"{num_reductions} sites, left as they are: {left}")
    return problems


def _generated(whole: PreTrainedModel, model: PreTrainedModel) -> list[str]:
    asked = {"input_ids": _prompt(), "max_new_tokens": 6, "do_sample": False, "disable_compile": True}
    want = whole.generate(**asked)
    found = {
        "generate": model.generate(**asked),
        "a static cache": model.generate(cache_implementation="static", prefill_chunk_size=4, **asked),
        "weaveopt.generate": model.generate(custom_generate=weaveopt.generate, **asked),
    }
    problems = [f"{how}: {tokens.tolist()}" for how, tokens in found.items() if not torch.equal(tokens, want)]
    steps = weaveopt.report(model).generation.steps
    return problems + ([] if sum(step.calls for step in steps) == 1 else ["weaveopt.generate ran in transformers"])


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    """Gradients of every weight, each rank's part of it put together."""
    model.zero_grad()
    model(input_ids=_prompt(), labels=_prompt(), use_cache=False).loss.backward()
    found = {name.removeprefix("_orig_mod."): each.grad for name, each in model.named_parameters()}
    assert None not in found.values()
    return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in found.items()}


def _gradients_differ(got: dict[str, Tensor], want: dict[str, Tensor]) -> list[str]:
    assert got.keys() == want.keys()
    return [problem for name in want for problem in _differ(f"gradient of {name}", got[name], want[name])]


@pytest.mark.parametrize("part", [0, 1])
def test_every_family_computes_what_one_process_computes(part: int, tmp_path: object) -> None:
    for problems in run_ranks(_check, WORLD, TESTED[part::2], str(tmp_path), timeout_s=600):
        assert problems == []


@pytest.mark.parametrize("family", [each for each in TESTED if each.id in CAPTURED], ids=lambda family: family.id)
def test_compiled_as_eager(family: Family, tmp_path: Path) -> None:
    """A prompt and one step, and a dense family's gradients, on equal ranks."""
    save(family, str(tmp_path))
    with equal_ranks(WORLD):
        model = _load(str(tmp_path), _parallel(family, str(tmp_path)))
        with torch.no_grad():
            problems = _captured(model, _logits(model, 2), 2, partial(executing_alone, world=WORLD))
        if family.id in TRAINED:
            want = _gradients(model)
            problems += _gradients_differ(_gradients(torch.compile(model, backend="aot_eager")), want)
    assert problems == []


def _asked(tp_size: int, **settings: int) -> DistributedConfig:
    config = config_of(Family("llama", {"num_attention_heads": 12, "hidden_size": 96, **settings}))
    return weaveopt.replicated_key_heads(config, DistributedConfig(tp_size=tp_size))


@dataclass(frozen=True)
class _Refused:
    ranks: int
    settings: dict[str, int]
    words: str


@pytest.mark.parametrize(
    "case",
    [
        _Refused(3, {}, "12 query heads and 2 key heads, asked for 3 ranks: give a multiple of the key heads"),
        _Refused(8, {}, "give a multiple of the key heads that divides the query heads"),
    ],
    ids=lambda case: case.words[:20],
)
def test_what_cannot_be_laid_out_is_refused(case: _Refused) -> None:
    with pytest.raises(WeaveError, match=re.escape(case.words)):
        _asked(case.ranks, **case.settings)


def test_ranks_that_divide_the_key_heads_need_nothing() -> None:
    assert _asked(2).tp_plan is None
    assert _asked(1).tp_plan is None
    assert isinstance(_asked(4).tp_plan, dict)
