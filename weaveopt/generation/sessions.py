"""The sessions of every model: made once for a shape, used by later calls, freed with the model."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from weaveopt.errors import WeaveError
from weaveopt.generation import layers
from weaveopt.generation.compiling import Backend
from weaveopt.generation.request import GenerationRequest
from weaveopt.generation.session import DecodeSession, GraphPool
from weaveopt.generation.step import Buffers
from weaveopt.integrations.transformers.kept_managers import weights_fingerprint
from weaveopt.integrations.transformers.layer_settings import values_of
from weaveopt.records.candidate import Rejection

MAX_SESSIONS = 4
"""Shapes of a model whose caches are kept; the one that was not used for longest goes first."""


@dataclass
class _Kept:
    sessions: dict[Hashable, DecodeSession] = field(default_factory=dict)
    pool: GraphPool = field(default_factory=GraphPool)


_of_model: weakref.WeakKeyDictionary[PreTrainedModel, _Kept] = weakref.WeakKeyDictionary()


def session_for(
    model: PreTrainedModel, request: GenerationRequest, backend: Backend | None
) -> DecodeSession | Rejection:
    """The session of this shape; a new one allocates its cache."""
    kept = _of_model.setdefault(model, _Kept())
    weights = weights_fingerprint(model)
    # Captured steps and compiled ones read the weights where they were.
    kept.sessions = {key: session for key, session in kept.sessions.items() if session.weights == weights}
    key = _key(model, request, backend)
    session = kept.sessions.pop(key, None)
    if session is None:
        made = _make(model, request, backend, kept.pool, weights)
        if isinstance(made, Rejection):
            return made
        session = made
        while len(kept.sessions) >= MAX_SESSIONS:
            kept.sessions.pop(next(iter(kept.sessions)))
    kept.sessions[key] = session  # the newest last
    return session


def sessions_of(model: PreTrainedModel) -> tuple[DecodeSession, ...]:
    """Return a model's cached sessions, the most recently used last."""
    kept = _of_model.get(model)
    return tuple(kept.sessions.values()) if kept else ()


def forget(model: PreTrainedModel) -> None:
    """Frees caches and captured steps of `model`; its next call makes them anew."""
    _of_model.pop(model, None)


def _make(
    model: PreTrainedModel, request: GenerationRequest, backend: Backend | None, pool: GraphPool, weights: int
) -> DecodeSession | Rejection:
    device = model.device
    buffers = Buffers.make(request.batch, request.slots, device)
    cache = layers.make(model.config.get_text_config(decoder=True), request.slots, buffers.length)
    if isinstance(cache, Rejection):
        return cache
    if backend is not None and request.batch == 1 and device.type == "cuda" and not _routes(model):
        backend = backend.for_one_row()
    session = DecodeSession(model, cache, buffers, backend, request.positions, pool, weights)
    try:
        session.allocate(model)
    except (TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError) as error:
        if isinstance(error, (WeaveError, torch.OutOfMemoryError)):
            raise
        lines = str(error).splitlines()
        words = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        return Rejection("step", "the model does not run with a step's cache and mask", (("error", words[:200]),))
    return session


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Configuration attributes that hold the number of experts."""


def _routes(model: PreTrainedModel) -> bool:
    """True if a router chooses experts for tokens, so that all ranks have to choose the same."""
    config = model.config.get_text_config(decoder=True)
    return any(any(values_of(config, name)) for name in EXPERTS)


def _key(model: PreTrainedModel, request: GenerationRequest, backend: Backend | None) -> Hashable:
    """Key of everything that a captured step has baked in."""
    kind = model.device.type
    autocast = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
    shape = (request.batch, request.slots, request.positions, model.dtype, model.training)
    attention = model.config.get_text_config(decoder=True)._attn_implementation
    return shape, autocast, attention, None if backend is None else (backend.name, backend.mode, str(backend.options))
