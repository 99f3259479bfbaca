"""Every family: one graph, whose all-reduces are rewritten; logits and tokens as eager.

All of them on equal ranks of one process. One of each archetype on real ranks, whose weights differ: its first layer,
and without the prompt whose masks are proven, in which no other rank has a part. With `make test-all` all, and whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import DynamicCache

from tests.graphs.executing import FORCED, OneOf, executing, executing_alone, executing_one_of
from tests.graphs.models import FAMILIES, VOCABULARY, Family, config_of, load, one_layer, save
from tests.ranks import run_ranks
from tests.ranks.simulated import TEST_ALL, equal_ranks
from weaveopt.config import Config
from weaveopt.integrations.transformers.cache_argument import with_cache
from weaveopt.records.report import Decision, GraphReport

WORLD = 2
NUM_TOKENS = 3
"""One by the prefill, and two by the same decode graph: where a family's window moves, a graph for each step."""
MOVING = ("mistral", "gpt_oss")
"""Families whose window moves, by name, that make one decode step with `make test`: Gemma makes both."""
NUM_PADDED = 2
"""Positions of the first sequence that its mask hides, on the left."""
READ = ("bias_not_boolean", "bias_not_boolean")
NOT_REPEATED = ("mask_not_known not_repeated",) * 2
GENERATING = {"gpt_oss": READ, "gemma2": READ, "deepseek_v3": NOT_REPEATED}
"""Attention of both layers under `generate`, by family: its mask is an input, and CPU ranks have no kernel that reads
one of its own. Families that write attention out get a bias there, whose values are unknown. DeepSeek's keys and values
have different sizes: torch decomposes that on CPUs, for every head as it is."""
PROMPT = {
    "llama": ("cpu", "cpu"),
    "mistral": ("grouped", "grouped"),
    "gemma3_text": ("grouped", "grouped"),
    "gpt_oss": ("scores_changed not_repeated",) * 2,
    "deepseek_v3": ("head_size not_repeated",) * 2,
    "gemma2": ("scores_changed mask_not_supported not_repeated", "scores_changed not_repeated"),
}
"""With masks that the graph holds, which are proven. On CPUs the library's kernel knows no windows, caps and sinks.
Families that are not here make llama's masks and attention, so one of them shows what becomes of it."""
ONE_LAYER = ("qwen2", "qwen3", "mistral", "phi3", "olmo2", "granite", "glm4", "cohere", "qwen3_moe", "mixtral-ep")
"""Families whose layers are all alike, by id, are tested with one: what joins two of them is llama's and mixtral's."""
SPLIT = Config(force=("token_split",), strict=True)
SPLIT_FAMILIES = ("llama", "gemma2", "gemma3_text", "mixtral", "deepseek_v3", "gpt_oss-ep")
"""Families, by id, whose graphs are rewritten a second time, split by tokens: one of each of that rule's archetypes."""
ARCHETYPES = ("llama", "gemma2", "mixtral", "gpt_oss-ep")
"""Families, by id: dense, windows with soft caps, a mixture sharded by tensors, and one sharded by experts."""


@dataclass(frozen=True)
class _Generated:
    tokens: torch.Tensor
    logits: torch.Tensor
    """Logits of every new token, the first of them by the prefill."""


def _greedy(model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> _Generated:
    num_tokens = NUM_TOKENS - (not TEST_ALL and model.config.model_type in MOVING)  # type: ignore[union-attr]
    found = model.generate(  # type: ignore[operator]
        ids, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False, cache_implementation="static",
        disable_compile=True, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    return _Generated(found.sequences, torch.stack(found.logits))


def _cached(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Logits of a prompt with a cache that grows, whose masks are made in the graph and hang on no input."""
    cache = DynamicCache(config=model.config)
    return model(input_ids=ids, use_cache=True, **with_cache(cache)).logits  # type: ignore[no-any-return]


def _tested(family: Family) -> Family:
    """With as many layers as it is tested with."""
    return one_layer(family) if family.id in ONE_LAYER else family


def _check(rank: int, family: Family, folder: str) -> list[str]:
    if rank == 0:
        save(family, folder)
    dist.barrier()
    ways = OneOf((FORCED,), ([],))
    backend = executing(FORCED, ways.reports[0])
    return _problems(family, folder, backend, ways, with_prompt=TEST_ALL and family.name in PROMPT)


def _problems(
    family: Family,
    path: str,
    backend: Callable[..., object],
    ways: OneOf,
    *,
    with_prompt: bool,
) -> list[str]:
    """Graphs by the first configuration of `ways`, and those by the second, which is `SPLIT`, where there is one."""
    model = load(family, path, WORLD)
    ids = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(5))
    ids[0, :NUM_PADDED] = 0
    reports = ways.reports[0]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    problems: list[str] = []
    with torch.no_grad():
        eager = _greedy(model, ids, ids.ne(0).long())
        eager_prompt = _cached(model, ids) if with_prompt else None
        model.compile(backend=backend, dynamic=False)
        got = _greedy(model, ids, ids.ne(0).long())
        num_generating = len(reports)
        if SPLIT in ways.configs:
            ways.current = 1
            in_parts = _greedy(model, ids, ids.ne(0).long())
            ways.current = 0
            problems.extend(_split_problems(family, ways.reports[1], in_parts, eager))
            assert len(reports) == num_generating, "it was traced again"
        prompt = _cached(model, ids) if with_prompt else None
    if not torch.equal(got.tokens, eager.tokens):
        problems.append(f"tokens {got.tokens.tolist()} instead of {eager.tokens.tolist()}")
    else:
        problems.extend(_differ("generated", got.logits, eager.logits))
    if prompt is not None and eager_prompt is not None:
        problems.extend(_differ("prompt", prompt, eager_prompt))
    if {"prefill", "decode"} - {report.phase for report in reports} and family.id != "gpt_oss":
        problems.append(f"phases {[report.phase for report in reports]}")
    breaks = dict(torch._dynamo.utils.counters["graph_break"])
    if breaks:
        problems.append(f"more than one graph a call: {breaks}")
    for report in reports:
        left = [d for d in report.decisions if not d.rewritten and d.site.kind == "reduction"]
        if left:
            reasons = [(d.site.module, [r.code for r in d.site.rejections]) for d in left]
            problems.append(f"{report.phase}: {len(left)} sites left: {reasons}")
    wanted = GENERATING.get(family.name, ("grouped", "grouped"))
    problems.extend(_attention_problems(family, reports[:num_generating], wanted))
    if with_prompt:
        problems.extend(_attention_problems(family, reports[num_generating:], PROMPT[family.name]))
    return problems


def _split_problems(family: Family, reports: list[GraphReport], got: _Generated, eager: _Generated) -> list[str]:
    """Prefill and decode steps over a static cache with padding on the left, each split where the rule is forced."""
    problems = []
    if not torch.equal(got.tokens, eager.tokens):
        problems.append(f"split by tokens: tokens {got.tokens.tolist()} instead of {eager.tokens.tolist()}")
    if {"prefill", "decode"} - {report.phase for report in reports} and family.id != "gpt_oss":
        problems.append(f"split by tokens: phases {[report.phase for report in reports]}")
    if {report.variant.partition(" ")[0] for report in reports} != {"token_split"}:
        problems.append(f"split by tokens: variants {[report.variant for report in reports]}")
    return problems


def _differ(what: str, got: torch.Tensor, want: torch.Tensor) -> list[str]:
    if torch.allclose(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max())):
        return []
    return [f"logits, {what}, differ by {(got - want).abs().max():.2e} of {want.abs().max():.2e}"]


def _attention_problems(family: Family, reports: list[GraphReport], wanted: tuple[str, ...]) -> list[str]:
    """Every layer's attention has that form of the rule, or is left for that reason."""
    if not reports:
        return ["no graph"]
    wanted = wanted[: config_of(family).num_hidden_layers]
    return [
        f"{report.phase}: attention {found} instead of {wanted}"
        for report in reports
        if (found := [_outcome(d) for d in report.decisions if d.site.kind == "attention"]) != [*wanted]
    ]


def _outcome(decision: Decision) -> str:
    if decision.rewritten:
        return decision.chosen.variant
    reasons = decision.site.rejections or [r for c in decision.alternatives for r in c.rejections]
    return " ".join(dict.fromkeys(reason.code for reason in reasons))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.id)
def test_family_computes_as_eager(family: Family, tmp_path: Path) -> None:
    tested = _tested(family)
    save(tested, str(tmp_path))
    is_split = TEST_ALL or family.id in SPLIT_FAMILIES
    ways = OneOf((FORCED, SPLIT), ([], [])) if is_split else OneOf((FORCED,), ([],))
    with equal_ranks(WORLD):
        backend = executing_one_of(ways, WORLD)
        problems = _problems(tested, str(tmp_path), backend, ways, with_prompt=family.name in PROMPT)
    assert problems == []


@pytest.mark.parametrize(
    "family", [each for each in FAMILIES if TEST_ALL or each.id in ARCHETYPES], ids=lambda family: family.id
)
def test_family_on_ranks_computes_as_eager(family: Family, tmp_path: Path) -> None:
    tested = _tested(family) if TEST_ALL else one_layer(family)
    assert run_ranks(_check, WORLD, tested, str(tmp_path), timeout_s=420) == [[]] * WORLD


def _symbolic(family: Family, folder: str) -> tuple[int, dict[str, int], list[str]]:
    """With `dynamic=True` sizes are symbolic, and so are eps and every multiplier of the configuration."""
    save(family, folder)
    model = load(family, folder, WORLD)
    requests = [torch.randint(3, VOCABULARY, (2, n), generator=torch.Generator().manual_seed(n)) for n in (9, 12)]
    reports: list[GraphReport] = []
    torch._dynamo.reset()
    with torch.no_grad():
        wanted = [model(ids, use_cache=False).logits for ids in requests]
        model.compile(backend=executing_alone(FORCED, reports, WORLD), dynamic=True)
        for ids, want in zip(requests, wanted, strict=True):
            torch.testing.assert_close(model(ids, use_cache=False).logits, want, rtol=1e-4, atol=1e-4)
    left = [r.code for report in reports for d in report.decisions for r in d.site.rejections]
    rewritten = Counter(d.site.kind for report in reports for d in report.decisions if d.rewritten)
    return len(reports), dict(rewritten), left


def test_symbolic_floats_of_a_family_are_numbers(tmp_path: Path) -> None:
    """Granite has an eps, a multiplier of the embedding and one of each residual. Of one layer: two sites of reductions
    and the first, and the attention."""
    (granite,) = (_tested(family) for family in FAMILIES if family.id == "granite")
    with equal_ranks(WORLD):
        assert _symbolic(granite, str(tmp_path)) == (1, {"reduction": 3, "attention": 1}, [])
