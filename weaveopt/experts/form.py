"""What the experts of a transformers module compute between their GEMMs, found by trying it on numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from weaveopt.errors import WeaveError
from weaveopt.ops.moe_sharded.call import ACTIVATIONS, ExpertExchangeCall
from weaveopt.ops.moe_sharded.experts import activate
from weaveopt.records.candidate import Fabric

Tensor = torch.Tensor

_SCALES = (("alpha", "limit"), ("swiglu_alpha", "swiglu_limit"))
"""Names under which modules keep the numbers of a clamped gate."""
_ROWS, _COLUMNS = 16, 32


@dataclass(frozen=True)
class Form:
    """As in `ExpertExchangeCall`."""

    activation: str
    gated: bool
    interleaved: bool = False
    alpha: float = 0.0
    limit: float = 0.0

    def call(
        self, group: str, world: int, hidden: int, dtype: str, num_experts: int, same_tokens: bool = False
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
            activation=self.activation,
            gated=self.gated,
            interleaved=self.interleaved,
            alpha=self.alpha,
            limit=self.limit,
            same_tokens=same_tokens,
        )


def form_of(experts: nn.Module) -> Form:
    """The form that makes the same of numbers as the module does. Raises `WeaveError` where none does."""
    for name in ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm"):
        if not hasattr(experts, name):
            raise _unknown(experts, f"has no {name}: it is not one of transformers' grouped experts")
    if experts.has_post_expert_norm:
        raise _unknown(experts, "normalizes what each expert makes")
    run = _callable(experts, "_apply_gate" if experts.has_gate else "act_fn")
    with unset_fake_temporarily(), torch.no_grad(), torch.device("cpu"):
        for form in _forms(experts):
            if _agree(run, form):
                return form
    raise _unknown(experts, "has an activation that the operation does not compute")


def _callable(experts: nn.Module, name: str) -> Callable[[Tensor], Tensor]:
    found: Callable[[Tensor], Tensor] | None = getattr(experts, name, None)
    if found is None:
        raise _unknown(experts, f"has no {name}")
    return found


def _forms(experts: nn.Module) -> Iterator[Form]:
    plain = [name for name in ACTIVATIONS if name != "clamped_swish"]
    if not experts.has_gate:
        yield from (Form(name, gated=False) for name in plain)
        return
    for interleaved in (False, True):
        yield from (Form(name, True, interleaved) for name in plain)
        for alpha, limit in _SCALES:
            numbers = getattr(experts, alpha, None), getattr(experts, limit, None)
            if all(isinstance(number, int | float) for number in numbers):
                yield Form("clamped_swish", True, interleaved, float(numbers[0] or 0), float(numbers[1] or 0))


def _agree(run: Callable[[Tensor], Tensor], form: Form) -> bool:
    """On values on either side of every limit."""
    call = form.call("", 1, _COLUMNS, "float32", 1)
    random = torch.Generator().manual_seed(0)
    for scale in (1.0, 4.0, 4.0 * form.limit):
        values = torch.randn(_ROWS, _COLUMNS, generator=random) * scale
        got, want = run(values.clone()), activate(values, call)
        if got.shape != want.shape or not torch.allclose(got, want, rtol=1e-5, atol=1e-5):
            return False
    return True


def _unknown(experts: nn.Module, why: str) -> WeaveError:
    return WeaveError(f'ep_implementation="weave": {type(experts).__name__} {why}: use ep_implementation="all_to_all"')
