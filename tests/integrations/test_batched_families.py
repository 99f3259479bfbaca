"""Families that transformers batches: tokens of many random requests are those of `generate` for each alone, and
samples follow the distribution of eager logits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.logits_process import LogitsProcessorList

import weaveopt
from tests.graphs.batching import batching, compiled, prompts, tokens
from tests.graphs.executing import without_code
from tests.graphs.generating import build
from tests.graphs.models import FAMILIES
from tests.ranks.simulated import TEST_ALL

MANY, NEW = 200, 4
ARCHETYPES = ("llama",)
"""Full attention; windows, both and mixtures are among those of `make test-all`. tests/integrations/
test_continuous_batching.py has fewer requests of each."""
NOT_BATCHED = {"deepseek_v3": "index_copy_(): Source/destination tensor must have same slice shapes"}
"""Families that transformers itself fails to batch, uncompiled, with its error."""
NAMES = tuple(dict.fromkeys(each.name for each in FAMILIES))
BATCHED = tuple(name for name in NAMES if name not in NOT_BATCHED)


@pytest.fixture(autouse=True)
def codeless() -> Iterator[None]:
    torch._dynamo.reset()
    with without_code():
        yield


def alone(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    found = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    return found[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", BATCHED if TEST_ALL else ARCHETYPES)
def test_many_requests_are_those_of_generate(family: str) -> None:
    model = build(family, num_hidden_layers=2 if family.startswith(("gemma", "gpt_oss")) else 1)
    inputs = prompts(MANY, seed=7, longest=40)
    want = [alone(model, each) for each in inputs]
    assert len({tuple(each) for each in want}) > MANY // 4, "tokens hardly depend on the prompt"
    assert tokens(model, inputs, compiled(num_blocks=64), new=NEW) == want
    report = weaveopt.report(model)
    assert report.breaks == () and report.generation.batching.paths[0].steps > 1


@pytest.mark.parametrize("family", NAMES)
def test_families_that_transformers_batches(family: str) -> None:
    """Uncompiled: the table of those that it cannot is right, and complete."""
    model = build(family, num_hidden_layers=1)
    until = GenerationConfig(max_new_tokens=2, do_sample=False, pad_token_id=0, eos_token_id=-1)
    found = model.generate_batch(prompts(2), until, batching())
    for each in found.values():
        assert (NOT_BATCHED[family] in str(each.error)) if family in NOT_BATCHED else each.error is None, each.error
    assert len(found) == 2


CHOICES: dict[str, dict[str, float | int]] = {
    "temperature": {"temperature": 0.7, "top_k": 0},
    "top_k": {"temperature": 1.3, "top_k": 6},
    "top_p": {"temperature": 1.0, "top_k": 0, "top_p": 0.8},
}
SAMPLES = 1200
LEAST_EXPECTED = 5.0
"""Tokens that are expected less often are counted together."""


def exact(model: PreTrainedModel, prompt: list[int], how: GenerationConfig) -> torch.Tensor:
    """Distribution of the next token, by transformers' own processors on eager logits."""
    processors: LogitsProcessorList = model._get_logits_processor(how)
    ids = torch.tensor([prompt])
    with torch.no_grad():
        return processors(ids, model(ids).logits[:, -1].float()).softmax(-1)[0]


def chi_square(counts: Counter[int], probabilities: torch.Tensor) -> tuple[float, int]:
    """Statistic and degrees of freedom."""
    expected = probabilities * sum(counts.values())
    common = (expected >= LEAST_EXPECTED).nonzero().flatten().tolist()
    seen, wanted = [counts[at] for at in common], [float(expected[at]) for at in common]
    rest = sum(counts.values()) - sum(seen), float(expected.sum()) - sum(wanted)
    if rest[1] > 1e-6:
        seen, wanted = [*seen, rest[0]], [*wanted, rest[1]]
    assert len(seen) > 2, "there is nothing to choose from"
    return sum((got - want) ** 2 / want for got, want in zip(seen, wanted, strict=True)), len(seen) - 1


def quantile(degrees: int, normal: float = 3.09) -> float:
    """The chi-square value that one sample of a thousand exceeds, by Wilson and Hilferty."""
    return degrees * (1 - 2 / (9 * degrees) + normal * (2 / (9 * degrees)) ** 0.5) ** 3


def test_samples_follow_the_distribution_of_eager_logits() -> None:
    """Many requests of one prompt in one batch after another; no token that the processors forbid comes."""
    model = build("llama", num_hidden_layers=1)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.15)  # flatter, so that there is something to choose from
    prompt = prompts(1, seed=11, longest=5)[0]  # short: many of them are a batch
    for name, settings in CHOICES.items():
        how = GenerationConfig(max_new_tokens=1, do_sample=True, pad_token_id=0, eos_token_id=-1, **settings)  # type: ignore[arg-type]
        probabilities = exact(model, prompt, how)
        config = compiled(num_blocks=128)
        config.seed = 3
        found = model.generate_batch([prompt] * SAMPLES, how, config)
        counts = Counter(each.generated_tokens[0] for each in found.values() if each.error is None)
        assert sum(counts.values()) == SAMPLES
        forbidden = {at for at in counts if probabilities[at] == 0}
        assert not forbidden, f"{name}: {forbidden}"
        statistic, degrees = chi_square(counts, probabilities)
        assert statistic < quantile(degrees), f"{name}: {statistic:.1f} with {degrees} degrees of freedom"
        other = exact(model, prompts(1, seed=12)[0], how)
        assert any(other[at] == 0 for at in counts) or chi_square(counts, other)[0] > quantile(degrees), "shows nothing"
    assert weaveopt.report(model).breaks == ()
