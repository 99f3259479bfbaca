"""One call of `generate` as the decode loop sees it, or every reason why the loop is not for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, StaticCache
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.utils import GenerationMixin

from weaveopt.generation.processors import TensorProcessor, as_tensors
from weaveopt.integrations.transformers.cache_argument import cache_argument
from weaveopt.records.candidate import Rejection
from weaveopt.wording import counted

KNOWN_INPUTS = {"attention_mask", "position_ids", "use_cache", "logits_to_keep"}
OWN_INPUTS_ONLY_FOR_LONG_ROPE = {"Phi3ForCausalLM"}
"""Models whose `prepare_inputs_for_generation` only drops the cache when a `longrope` switches factors, which is
refused."""
ATTENTIONS = ("sdpa", "eager")
"""Implementations that take a mask as a tensor."""
ROPES_THAT_LOOK = ("dynamic", "longrope")
"""Kinds of rotary embedding whose frequencies depend on the length, which they read on the host."""
SHORTEST = 64


@dataclass(frozen=True)
class GenerationRequest:
    """Parameters of a call, as numbers; everything else is in the tensors that it passes."""

    batch: int
    max_new: int
    """New tokens until the maximum length."""
    slots: int
    """Length of the cache, rounded up so that calls of about one length share a step."""
    sampled: bool
    processors: tuple[TensorProcessor, ...]
    eos: tuple[int, ...]
    pad: int
    keeps_scores: bool
    keeps_logits: bool
    cache: Cache
    """Cache that transformers prepared, or the user's own, which the caller reads afterwards."""
    cache_is_wanted: bool
    past: int
    """Positions that the user's cache holds already."""
    prompt: int
    """Positions that the cache holds after the prefill, those of the user's cache included."""
    positions: bool
    """True if the model takes position ids."""


def read(
    model: PreTrainedModel,
    input_ids: Tensor,
    processors: list[object],
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    inputs: Mapping[str, object],
) -> GenerationRequest | tuple[Rejection, ...]:
    """The request, or every reason against it."""
    cache = inputs.get(cache_argument())
    no = [*_model_reasons(model), *_input_reasons(model, input_ids, config, inputs), *_cache_reasons(cache)]
    no += _mask_reasons(input_ids, inputs.get("attention_mask"), config, cache)
    no += _criteria_reasons(criteria)
    tensor_processors = as_tensors(processors, input_ids.shape[0])
    no += [found for found in tensor_processors if isinstance(found, Rejection)]
    if no:
        return tuple(no)
    assert isinstance(cache, (DynamicCache, StaticCache))
    max_length = min(each.max_length for each in criteria if isinstance(each, MaxLengthCriteria))
    max_new = max_length - input_ids.shape[1]
    past = int(cache.get_seq_length())
    prompt = _prompt_length(input_ids, inputs.get("attention_mask"), config, past)
    eos = [
        int(token) for each in criteria if isinstance(each, EosTokenCriteria) for token in each.eos_token_id.tolist()
    ]
    pad = getattr(config, "_pad_token_tensor", None)
    returned = bool(config.return_dict_in_generate)
    return GenerationRequest(
        batch=input_ids.shape[0],
        max_new=max_new,
        slots=rounded(max(prompt + max_new - 1, getattr(config, "max_cache_len", None) or 0)),
        sampled=bool(config.do_sample),
        processors=tuple(found for found in tensor_processors if isinstance(found, TensorProcessor)),
        eos=tuple(sorted(set(eos))),
        pad=int(pad) if eos and pad is not None else 0,
        keeps_scores=returned and bool(config.output_scores),
        keeps_logits=returned and bool(config.output_logits),
        cache=cache,
        cache_is_wanted=returned or bool(getattr(cache, "_is_user_defined", False)) or past > 0,
        past=past,
        prompt=prompt,
        positions=inputs.get("position_ids") is not None,
    )


def _prompt_length(input_ids: Tensor, mask: object, config: GenerationConfig, past: int) -> int:
    """Length of the attention mask, which covers the user's cache too. Ids may begin with the tokens in that cache.

    transformers drops a mask of ones, and notes its length in the config.
    """
    if isinstance(mask, Tensor):
        return mask.shape[1]
    return int(getattr(config, "_mask_length", None) or input_ids.shape[1] + past)


def rounded(length: int) -> int:
    """The next of four lengths between one power of two and the next, at least 64."""
    if length <= SHORTEST:
        return SHORTEST
    step = 1 << max(0, int(math.log2(length - 1)) - 2)
    return -(-length // step) * step


def _model_reasons(model: PreTrainedModel) -> list[Rejection]:
    no: list[Rejection] = []
    kind = type(model)
    if model.config.is_encoder_decoder:
        no.append(Rejection("encoder_decoder", "the model is an encoder and a decoder"))
    own = [
        name
        for name in ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "_prefill", "_sample")
        if getattr(kind, name, None) is not getattr(GenerationMixin, name)
    ]
    if kind.__name__ in OWN_INPUTS_ONLY_FOR_LONG_ROPE:
        own = [name for name in own if name != "prepare_inputs_for_generation"]
    own += ["create_masks_for_generate"] if hasattr(kind, "create_masks_for_generate") else []
    for name in own:
        no.append(Rejection("own_generation", f"the model has a {name} of its own", (("method", name),)))
    if not getattr(model, "_can_compile_fullgraph", False):
        message = "transformers does not say that the model runs with a static cache (_can_compile_fullgraph)"
        no.append(Rejection("static_cache", message))
    text = model.config.get_text_config(decoder=True)
    attention = str(getattr(text, "_attn_implementation", None))
    if attention not in ATTENTIONS:
        message = f"attention implementation {attention} takes no mask that a captured step could make"
        no.append(Rejection("attention", message, (("attn_implementation", attention),)))
    types = set(getattr(text, "layer_types", None) or ())
    if getattr(text, "attention_chunk_size", None) is not None or types - {"full_attention", "sliding_attention"}:
        message = "layers attend in another way than fully or in a sliding window"
        no.append(Rejection("layer_types", message, (("layer_types", ", ".join(sorted(types))),)))
    if not getattr(text, "is_causal", True):
        no.append(Rejection("not_causal", "attention looks ahead"))
    for rope in _rope_types(getattr(text, "rope_parameters", None)):
        if rope in ROPES_THAT_LOOK:
            message = f"rotary embedding {rope} looks at the length on the host"
            no.append(Rejection("rope", message, (("rope_type", rope),)))
    if len(set(map(str, (getattr(model, "hf_device_map", None) or {}).values()))) > 1:
        no.append(Rejection("devices", "the model's layers are on several devices"))
    if model.device.type not in ("cpu", "cuda"):
        no.append(Rejection("devices", f"the model is on {model.device.type}"))
    return no


def _rope_types(parameters: object) -> list[str]:
    if not isinstance(parameters, Mapping):
        return []
    nested = [each for each in parameters.values() if isinstance(each, Mapping)]
    return [str(each.get("rope_type")) for each in (parameters, *nested)]


def _input_reasons(
    model: PreTrainedModel, input_ids: Tensor, config: GenerationConfig, inputs: Mapping[str, object]
) -> list[Rejection]:
    no: list[Rejection] = []
    known = {*KNOWN_INPUTS, cache_argument()}
    for name, value in inputs.items():
        if value is not None and value is not False and name not in known:
            no.append(Rejection("model_input", f"the model is given {name}", (("input", name),)))
    if input_ids.dim() != 2 or input_ids.shape[1] == 0:
        no.append(Rejection("model_input", "input ids are not a batch of tokens", (("input", "input_ids"),)))
    elif input_ids.device != model.device:
        no.append(Rejection("devices", f"input ids are on {input_ids.device}, the model on {model.device}"))
    for name in ("attention_mask", "position_ids"):
        value = inputs.get(name)
        if isinstance(value, Tensor) and value.dim() != 2:
            no.append(Rejection("model_input", f"{name} has {counted(value.dim(), 'dimension')}", (("input", name),)))
    if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
        no.append(Rejection("outputs", "attentions or hidden states of every step are asked for"))
    if config.prefill_chunk_size is not None:
        no.append(Rejection("chunked_prefill", "the prefill is asked for in chunks"))
    if getattr(config, "is_assistant", False):
        no.append(Rejection("assistant", "the model drafts for another one"))
    return no


def _mask_reasons(input_ids: Tensor, mask: object, config: GenerationConfig, cache: object) -> list[Rejection]:
    """transformers takes a mask of another length too, which it cuts."""
    if input_ids.dim() != 2 or not isinstance(cache, Cache) or (isinstance(mask, Tensor) and mask.dim() != 2):
        return []
    tokens, past = input_ids.shape[1], int(cache.get_seq_length())
    length = _prompt_length(input_ids, mask, config, past)
    if length in (tokens, tokens + past):
        return []
    message = f"the attention mask has {length} positions, for {counted(tokens, 'token')} after {past} in the cache"
    return [Rejection("model_input", message, (("input", "attention_mask"),))]


def _cache_reasons(cache: object) -> list[Rejection]:
    if type(cache) not in (DynamicCache, StaticCache):
        kind = type(cache).__name__
        return [Rejection("cache", f"the cache is a {kind}, not a dynamic or static one", (("type", kind),))]
    assert isinstance(cache, Cache)
    no = [Rejection("cache", "the cache is kept in host memory")] if cache.offloading else []
    if any(cache.is_sliding) and int(cache.get_seq_length()) > 0:
        no.append(Rejection("cache", "the user's cache has sliding windows that are filled already"))
    return no


def _criteria_reasons(criteria: StoppingCriteriaList) -> list[Rejection]:
    no: list[Rejection] = []
    for each in criteria:
        if type(each) not in (MaxLengthCriteria, EosTokenCriteria):
            name = type(each).__name__
            message = f"stopping criterion {name} runs in Python after each token"
            no.append(Rejection("stopping_criterion", message, (("criterion", name),)))
    if not any(type(each) is MaxLengthCriteria for each in criteria):
        no.append(Rejection("stopping_criterion", "there is no maximum length"))
    return no
