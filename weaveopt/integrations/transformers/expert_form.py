"""Form of a transformers module's experts between their GEMMs, found by running it on numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from weaveopt.errors import WeaveError
from weaveopt.ops.experts.activation import Activation, computing
from weaveopt.ops.experts.exchange.call import ExpertExchangeCall
from weaveopt.records.candidate import Fabric

Tensor = torch.Tensor

_ALPHAS = ("alpha", "swiglu_alpha")
_LIMITS = ("limit", "swiglu_limit")
"""Names under which modules keep the numbers of a clamped gate."""
_COLUMNS = 32
_TOLERANCE = 1e-5
"""Modules may compute in fp32 whatever they are given."""


def call_of(
    act: Activation,
    group: str,
    world: int,
    hidden: int,
    dtype: str,
    num_experts: int,
    same_tokens: bool = False,
    independent: bool = False,
) -> ExpertExchangeCall:
    """Through the library: a rule puts a fabric and its memory in."""
    return ExpertExchangeCall(
        site="expert_exchange",
        group=group,
        fabric=Fabric.LIBRARY,
        world=world,
        hidden=hidden,
        dtype=dtype,
        max_tokens=0,
        timeout_s=0.0,
        num_experts=num_experts,
        activation=act.name,
        gated=act.gated,
        interleaved=act.interleaved,
        alpha=act.alpha,
        limit=act.limit,
        same_tokens=same_tokens,
        independent=independent,
    )


def activation_of(experts: nn.Module) -> Activation:
    """The activation that makes the same of numbers as the module does. Raises `WeaveError` where none does."""
    for name in ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm"):
        if not hasattr(experts, name):
            raise _unknown(experts, f"has no {name}: it is not one of transformers' grouped experts")
    if experts.has_post_expert_norm:
        raise _unknown(experts, "normalizes what each expert makes")
    gated = bool(experts.has_gate)
    run = _callable(experts, "_apply_gate" if gated else "act_fn")
    limits, alphas = _numbers(experts, _LIMITS), _numbers(experts, _ALPHAS)
    with unset_fake_temporarily(), torch.no_grad(), torch.device("cpu"):
        found = computing(run, _COLUMNS, gated, limits, alphas, _TOLERANCE)
    if found is None:
        raise _unknown(experts, "has an activation that the operation does not compute")
    return found


def _callable(experts: nn.Module, name: str) -> Callable[[Tensor], Tensor]:
    found: Callable[[Tensor], Tensor] | None = getattr(experts, name, None)
    if found is None:
        raise _unknown(experts, f"has no {name}")
    return found


def _numbers(experts: nn.Module, names: tuple[str, ...]) -> list[float]:
    values = [getattr(experts, name, None) for name in names]
    return [float(value) for value in values if isinstance(value, int | float)]


def _unknown(experts: nn.Module, why: str) -> WeaveError:
    return WeaveError(f'ep_implementation="weave": {type(experts).__name__} {why}: use ep_implementation="all_to_all"')
