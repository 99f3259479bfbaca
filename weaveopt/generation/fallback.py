"""Decoding in transformers' own loop, for calls that the captured step does not support."""

from __future__ import annotations

import inspect

import torch.distributed as dist
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GENERATION_MODES_MAPPING, GenerateNonBeamOutput
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from weaveopt.errors import WeaveError


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
    synced_gpus: bool,
    streamer: BaseStreamer | None,
    assistant: object | None,
    inputs: dict[str, object],
) -> GenerateNonBeamOutput | Tensor:
    """The method that `generate` would have called, with the arguments that it would have had."""
    name = GENERATION_MODES_MAPPING[mode]
    method = getattr(model, name, None)
    if method is None:
        raise WeaveError(
            f"generate(custom_generate=weaveopt.generate) was asked for mode {mode.value}, which transformers has in "
            f"{name}: call generate without weaveopt.generate"
        )
    extra = {"assistant_model": assistant} if assistant is not None else {}
    known = inspect.signature(method).parameters
    return method(
        input_ids,
        logits_processor=processors,
        stopping_criteria=criteria,
        generation_config=config,
        **{key: value for key, value in {"synced_gpus": synced_gpus, "streamer": streamer}.items() if key in known},
        **extra,
        **inputs,
    )
