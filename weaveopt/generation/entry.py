"""`weaveopt.generate`: what `model.generate(..., custom_generate=weaveopt.generate)` calls for the decode loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import (
    GENERATION_MODES_MAPPING,
    GenerateDecoderOnlyOutput,
    GenerateNonBeamOutput,
)

from weaveopt.generation import cache_copy, ranks
from weaveopt.generation.compiling import backend_for
from weaveopt.generation.fallback import in_transformers, needs_synced_gpus, withheld
from weaveopt.generation.loop import DecodeLoop, Outcome
from weaveopt.generation.request import GenerationRequest, read
from weaveopt.generation.session import CapturedStep, DecodeSession
from weaveopt.generation.sessions import session_for
from weaveopt.generation.step import ChoosingForm
from weaveopt.integrations.transformers.cache_argument import with_cache
from weaveopt.records.candidate import Rejection
from weaveopt.reporting import registry


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: BaseStreamer | None = None,
    **model_kwargs: object,
) -> GenerateNonBeamOutput | Tensor:
    """`GenerationMixin._sample`, with one captured step that is launched ahead of what the host has seen.

    Tokens are those of transformers' loop: greedy ones equal, sampled ones of the same distribution, the same for the
    same `torch.manual_seed` and on all ranks. What cannot be captured runs in transformers' own loop;
    `weaveopt.report(model)` says which calls did, and why.

    `input_ids`: `[batch, prompt]` int64. Returns `[batch, prompt + new]` int64, or with `return_dict_in_generate` a
    `GenerateDecoderOnlyOutput`. Raises `PeerTimeoutError` where a rank of the model's group is gone.
    """
    hidden = withheld()
    streamer = streamer if streamer is not None else hidden.streamer
    synced = synced_gpus or needs_synced_gpus(model, hidden.synced_gpus)
    hidden = replace(hidden, streamer=streamer, synced_gpus=synced)
    mode = generation_config.get_generation_mode(hidden.assistant_model)
    no: tuple[Rejection, ...] = ()
    if mode.value not in ("greedy_search", "sample"):
        no += (Rejection("mode", f"the generation mode is {mode.value}", (("mode", mode.value),)),)
    if synced:
        no += (Rejection("synced_gpus", "ranks go on together until the last one has ended (synced_gpus)"),)
    request = read(model, input_ids, list(logits_processor), stopping_criteria, generation_config, model_kwargs)
    if not isinstance(request, GenerationRequest):
        no += request
    if not synced and ranks.one_leaves(model, bool(no)) and not no:
        no = (Rejection("ranks_differ", "another rank of the model's group leaves its call to transformers"),)
    if not no:
        assert isinstance(request, GenerationRequest)
        with _surroundings(model), model._optimize_model_for_decode():
            session = session_for(model, request, backend_for(model, generation_config))
        found = _refused(session, request)
        if found is None:
            assert isinstance(session, DecodeSession)
            try:
                with _surroundings(model):
                    return _generate(model, session, request, input_ids, generation_config, streamer, model_kwargs)
            finally:
                session.lock.release()
        no += (found,)
    registry.note_left(model, GENERATION_MODES_MAPPING[mode], no)
    return in_transformers(
        model, mode, input_ids, logits_processor, stopping_criteria, generation_config, hidden, model_kwargs
    )  # fmt: skip


@contextmanager
def _surroundings(model: PreTrainedModel) -> Iterator[None]:
    """The same for every call: buffers made in inference mode could not be written outside of it, and compiled steps
    would differ by the mode. Streams, events and graphs are those of the model's GPU, whichever is the current one."""
    place = torch.cuda.device(model.device) if model.device.type == "cuda" else nullcontext()
    with torch.inference_mode(False), torch.no_grad(), place:
        yield


def _refused(session: DecodeSession | Rejection, request: GenerationRequest) -> Rejection | None:
    """Reason why a session cannot serve the request; if it can, the session is locked."""
    if isinstance(session, Rejection):
        return session
    if request.cache_is_wanted:
        length = request.prompt + request.max_new - 1
        reason = cache_copy.may_be_filled(request.cache, session.cache, request.batch, length)
        if reason is not None:
            return reason
    if not session.lock.acquire(blocking=False):
        return Rejection("busy", "another thread generates with the same model and shapes")
    return None


def _generate(
    model: PreTrainedModel,
    session: DecodeSession,
    request: GenerationRequest,
    input_ids: Tensor,
    config: GenerationConfig,
    streamer: BaseStreamer | None,
    inputs: dict[str, object],
) -> GenerateNonBeamOutput | Tensor:
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    next_positions = positions[:, -1:] + 1 if isinstance(positions, Tensor) else None
    session.begin(input_ids, mask if isinstance(mask, Tensor) else None, next_positions)
    if request.past:
        cache_copy.take(session.cache, request.cache, request.past)
    logits = model._prefill(input_ids, config, {**inputs, **with_cache(session.cache)}).logits
    logits = logits[:, -1].to(copy=True, dtype=torch.float32)
    session.buffers.length.fill_(request.prompt)

    form = ChoosingForm(
        request.sampled, request.processors, request.eos, request.pad, request.keeps_scores, request.keeps_logits
    )
    chosen = session.chosen(form, logits)
    if request.sampled:
        ranks.agree_on_randomness(model)
    session.choose(chosen, logits)
    outcome, scores, raw = _decode(model, session, chosen, request, streamer)
    session.follow_weights()

    if request.cache_is_wanted:
        cache_copy.fill(request.cache, session.cache, request.prompt + outcome.num_tokens - 1)
    _note(model, session, chosen, outcome)
    sequences = session.buffers.history[:, : input_ids.shape[1] + outcome.num_tokens].clone()
    if streamer is not None:
        streamer.end()
    if not config.return_dict_in_generate:
        return sequences
    return GenerateDecoderOnlyOutput(sequences=sequences, scores=scores, logits=raw, **with_cache(request.cache))


def _decode(
    model: PreTrainedModel,
    session: DecodeSession,
    chosen: CapturedStep,
    request: GenerationRequest,
    streamer: BaseStreamer | None,
) -> tuple[Outcome, tuple[Tensor, ...] | None, tuple[Tensor, ...] | None]:
    """Runs the loop; with what it did, scores and logits of the tokens that count."""
    scores: list[Tensor] = []
    raw: list[Tensor] = []

    def keep() -> None:
        if request.keeps_scores:
            scores.append(chosen.kept.scores.clone())
        if request.keeps_logits:
            raw.append(chosen.kept.logits.clone())

    def sink(tokens: Tensor) -> None:
        if streamer is not None:
            streamer.put(tokens.clone())

    with model._optimize_model_for_decode():
        loop = DecodeLoop(session.buffers.step_output, session.places, sink, request.max_new, ranks.are_several())
        outcome = loop.run(lambda: session.step(chosen), keep)
    count = outcome.num_tokens
    return (
        outcome,
        tuple(scores[:count]) if request.keeps_scores else None,
        tuple(raw[:count]) if request.keeps_logits else None,
    )


def _note(model: PreTrainedModel, session: DecodeSession, chosen: CapturedStep, outcome: Outcome) -> None:
    before = session.report_of(chosen)
    chosen.report = replace(
        before,
        calls=before.calls + 1,
        steps=before.steps + outcome.num_steps,
        replays=before.replays + outcome.num_replays,
        beyond_stop=before.beyond_stop + outcome.num_steps + 1 - outcome.num_tokens,
        loop_us=before.loop_us + outcome.loop_us,
        step_us=before.step_us + outcome.step_us,
    )
    registry.note_step(model, chosen.report)
