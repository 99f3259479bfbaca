"""Fixtures of the decode loop's tests: tiny random models, prompts of unequal lengths, and a call of both loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, CompileConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import weaveopt
from tests.graphs.models import FAMILIES, Family, config_of


@dataclass
class Heard(BaseStreamer):
    """Notes what a streamer is given."""

    tokens: list[Tensor] = field(default_factory=list)
    ends: int = 0

    def put(self, value: Tensor) -> None:
        assert self.ends == 0, "tokens after the end"
        assert value.device.type == "cpu"
        self.tokens.append(value)

    def end(self) -> None:
        self.ends += 1


def build(name: str, **settings: int | float | bool | None) -> PreTrainedModel:
    """Weights that make greedy tokens vary."""
    known = next((family.settings for family in FAMILIES if family.name == name), {})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(Family(name, {**known, **settings}))).eval()
    with torch.no_grad():
        for each, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed" not in each:
                parameter.mul_(10.0)
    model.generation_config.eos_token_id = None
    return model


def ragged(batch: int = 3, length: int = 20) -> dict[str, Tensor]:
    """Prompts with left padding of different lengths; the last has none."""
    numbers = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 128, (batch, length), generator=numbers)
    mask = torch.ones_like(ids)
    for row in range(batch - 1):
        mask[row, : 5 + 6 * row] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def theirs(model: PreTrainedModel, inputs: dict[str, Tensor], **arguments: object) -> object:
    """transformers' loop with everything that there is to compare."""
    return _call(model, inputs, disable_compile=True, **arguments)


Backend = str | Callable[..., object]


def ours(
    model: PreTrainedModel, inputs: dict[str, Tensor], backend: Backend | None = None, **arguments: object
) -> object:
    if backend is None:
        return _call(model, inputs, custom_generate=weaveopt.generate, disable_compile=True, **arguments)
    config = CompileConfig(backend=backend)
    return _call(model, inputs, custom_generate=weaveopt.generate, compile_config=config, **arguments)


def _call(model: PreTrainedModel, inputs: dict[str, Tensor], **arguments: object) -> object:
    detailed = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "do_sample": False}
    return model.generate(**inputs, **{"max_new_tokens": 16, **detailed, **arguments})  # type: ignore[operator]


def assert_same(ours: object, theirs: object) -> None:
    """Equal tokens, and scores and logits of the same steps within rounding."""
    assert torch.equal(ours.sequences, theirs.sequences)  # type: ignore[attr-defined]
    for name in ("scores", "logits"):
        found, wanted = getattr(ours, name), getattr(theirs, name)
        assert len(found) == len(wanted), name
        for step, (one, other) in enumerate(zip(found, wanted, strict=True)):
            try:
                torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
            except AssertionError as error:
                raise AssertionError(f"{name} of step {step}: {error}") from None


def steps_of(model: PreTrainedModel) -> tuple[int, int]:
    """How many forms of step there are, and how many calls they served; no call was left to transformers."""
    report = weaveopt.report(model).generation
    assert not report.left, report.left
    return len(report.steps), sum(step.calls for step in report.steps)
