"""Decoding in transformers' own loop, for calls that the captured step does not support.

transformers (5.17 to 5.24 at least) passes a function in `custom_generate` no streamer, no `synced_gpus`, no assistant
model, no tokenizers and no encoder inputs, though the method in whose place it is called gets them, and checks nothing
that follows from them. They are in the frames that call us.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass, fields

import torch.distributed as dist
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GENERATION_MODES_MAPPING, GenerateNonBeamOutput, GenerationMixin
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from weaveopt.errors import WeaveError


@dataclass(frozen=True)
class Withheld:
    streamer: BaseStreamer | None = None
    synced_gpus: bool | None = None
    assistant_model: object | None = None
    inputs_tensor: Tensor | None = None
    tokenizer: object | None = None
    assistant_tokenizer: object | None = None

    def given(self) -> dict[str, object]:
        """Arguments of a mode, as `generate` collects them: those that there are."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name)) is not None}


def withheld() -> Withheld:
    """Read the arguments of the nearest call of `generate` on the stack; empty if there is none."""
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is code:
            found = {each.name: frame.f_locals.get(each.name) for each in fields(Withheld)}
            # `generate` takes the tokenizers out of its own keywords; those of the decorator around it still have them.
            outer = frame.f_back.f_locals.get("kwargs") if frame.f_back is not None else None
            for name in ("tokenizer", "assistant_tokenizer"):
                found[name] = outer.get(name) if isinstance(outer, dict) else None
            return Withheld(**found)
    return Withheld()


def needs_synced_gpus(model: PreTrainedModel, asked: bool | None) -> bool:
    """Resolve `synced_gpus` as `generate` does if it was not given."""
    if asked is not None:
        return asked
    world = dist.get_world_size() if dist.is_initialized() else 1
    return bool((is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)) and world > 1)


def in_transformers(
    model: PreTrainedModel,
    mode: GenerationMode,
    input_ids: Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    hidden: Withheld,
    inputs: dict[str, object],
) -> GenerateNonBeamOutput | Tensor:
    """The method that `generate` would have called, with the arguments that it would have had, once its own check of
    them has passed."""
    name = GENERATION_MODES_MAPPING[mode]
    method = getattr(model, name, None)
    if method is None:
        raise WeaveError(
            f"generate(custom_generate=weaveopt.generate) was asked for mode {mode.value}, which transformers has in "
            f"{name}: call generate without weaveopt.generate"
        )
    given = hidden.given()
    model._validate_generation_mode(mode, config, {key: each for key, each in given.items() if key != "inputs_tensor"})
    known = inspect.signature(method).parameters
    return method(
        input_ids,
        logits_processor=processors,
        stopping_criteria=criteria,
        generation_config=config,
        **{key: value for key, value in given.items() if key in known},
        **inputs,
    )
