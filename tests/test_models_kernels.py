"""Families with the attention kernels of GPUs, whose operators have a form for CPUs: one process, bf16."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, StaticCache

from tests.graphs.executing import FORCED, executing
from tests.graphs.models import FAMILIES, VOCABULARY, WINDOW, config_of
from weaveopt.config import Config
from weaveopt.integrations.transformers.cache_argument import with_cache
from weaveopt.records.report import Decision, GraphReport
from weaveopt.rewrites.causal_attention.candidates import RULE

NUM_PADDED, NUM_TOKENS, ROOM = 3, 9, 16


@dataclass(frozen=True)
class Case:
    """A family, and what becomes of the attention of its layers."""

    family: str
    prompt: tuple[str, ...]
    """Without padding, by `KERNELS`: the mask is proven."""
    window: tuple[int, ...] = (0,)
    reads: tuple[str, ...] = ("masked", "grouped")
    """With padding over a static cache: forms that read a mask."""
    facts: dict[str, float] = field(default_factory=dict)


KERNELS = {"known": ("flash", "cudnn"), "window": ("flash", "masked"), "masked": ("masked",)}
"""Kernels that may serve a prompt: the cheapest of those that support it. A window of few tokens is as cheap read as
computed."""
CASES = (
    Case("llama", ("known", "known"), (0, 0)),
    Case("mistral", ("window",), (WINDOW,)),
    Case("gemma2", ("masked", "masked"), (WINDOW, 0), ("masked",), {"softcap": 50.0, "is_written_out": True}),
    Case("gpt_oss", ("masked", "masked"), (0, 0), ("masked",), {"has_sinks": True, "is_written_out": True}),
)


def _model(case: Case) -> PreTrainedModel:
    torch.manual_seed(0)
    family = next(each for each in FAMILIES if each.name == case.family)
    config = config_of(replace(family, settings={**family.settings, "num_hidden_layers": len(case.prompt)}))
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def _calls(model: PreTrainedModel) -> list[torch.Tensor]:
    """Logits of a prompt, and of one with padding over a static cache and of the token after it."""
    ids = torch.randint(3, VOCABULARY, (2, NUM_TOKENS), generator=torch.Generator().manual_seed(5))
    padding = torch.ones_like(ids)
    padding[0, :NUM_PADDED] = 0
    cache = StaticCache(config=model.config, max_cache_len=ROOM)
    plain = model(input_ids=ids, use_cache=False).logits
    padded = model(input_ids=ids, attention_mask=padding, use_cache=True, **with_cache(cache)).logits
    padded[0, :NUM_PADDED] = 0.0  # of what is padding itself
    padding = torch.cat([padding, padding[:, -1:]], 1)
    decoded = model(input_ids=ids[:, :1], attention_mask=padding, use_cache=True, **with_cache(cache)).logits
    return [plain, padded, decoded]


def _attention(report: GraphReport) -> list[Decision]:
    return [decision for decision in report.decisions if decision.site.kind == "attention"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.family)
def test_family_by_the_kernels_of_gpus(case: Case) -> None:
    model, reports = _model(case), list[GraphReport]()
    torch._dynamo.reset()
    config = Config(force=(RULE,), machine="h200x4", strict=FORCED.strict)
    with torch.no_grad():
        eager = _calls(model)
        model.compile(backend=executing(config, reports), dynamic=False)
        got = _calls(model)
    for name, mine, want in zip(("plain", "padded", "decoded"), got, eager, strict=True):
        largest = float(want.abs().max())
        # bf16 through two layers: a few units in the last place of the largest logit.
        torch.testing.assert_close(mine, want, rtol=0.0, atol=0.03 * largest, msg=lambda text, n=name: f"{n}\n{text}")
    plain, *reading = reports
    assert len(reading) == 2
    for report in reports:
        assert [each.rewritten for each in _attention(report)] == [True] * len(case.prompt) and report.fallbacks == ()
    for decision, form, window in zip(_attention(plain), case.prompt, case.window, strict=True):
        assert decision.chosen.variant in KERNELS[form], decision.chosen
        assert dict(decision.site.facts)["mask"] == (f"window window={window}" if window else "causal")
    for decision in (decision for report in reading for decision in _attention(report)):
        assert decision.chosen.variant in case.reads and dict(decision.site.facts)["mask"] == "read at run time"
    for name, value in case.facts.items():
        assert [dict(d.site.facts)[name] for report in reports for d in _attention(report)] == [value] * (
            len(case.prompt) * len(reports)
        )
