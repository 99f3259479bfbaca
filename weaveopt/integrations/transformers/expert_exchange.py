"""Expert parallelism of a transformers module as `weave::expert_exchange`: one node, without a host synchronization.

Replaces transformers' `AllToAllEP`, which reads split sizes on the host in Python and so breaks the graph in every
layer. Ranks that hold the same batch (a tensor-parallel group) each take an equal slice of it, padded to the same size
on all of them, and gather the results.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from transformers.distributed.expert_parallel import EPImplementation

import weaveopt.ops  # noqa: F401  (registers torch.ops.weave)
from weaveopt.errors import WeaveError
from weaveopt.integrations.transformers.expert_form import activation_of, call_of

Tensor = torch.Tensor
_c10d = torch.ops._c10d_functional

_DTYPES = ("bfloat16", "float16", "float32")
NOBODYS = -1
"""Expert of the padding."""


class ExpertExchange(EPImplementation):
    """See the module's docstring. Raises `WeaveError` for experts that compute what the operation does not."""

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        act = activation_of(experts)
        down = _tensor(experts, "down_proj")
        group, world = ep_mesh.get_group().group_name, ep_mesh.size()
        self._experts, self._gate = experts, "gate_up_proj" if act.gated else "up_proj"
        self._is_transposed, self._has_bias = bool(experts.is_transposed), bool(experts.has_bias)
        hidden = down.shape[-1] if self._is_transposed else down.shape[-2]
        # Parameters may be cast later, and text is no business of a traced function.
        self._calls = {
            getattr(torch, dtype): call_of(
                act, group, world, hidden, dtype, self.num_local_experts, self.shares_batch
            ).encode()
            for dtype in _DTYPES
        }
        self._slice = (tp_mesh.get_group().group_name, tp_mesh.size(), tp_mesh.get_local_rank())

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        num_tokens, (group, world, rank) = hidden_states.shape[0], self._slice
        if world == 1:
            return self._exchange(hidden_states, top_k_index, top_k_weights)
        mine = _Slice.apply(hidden_states, group, world, rank, 0.0)
        ids = _Slice.apply(top_k_index, group, world, rank, NOBODYS)
        weights = _Slice.apply(top_k_weights, group, world, rank, 0.0)
        return _Gather.apply(self._exchange(mine, ids, weights), group, world, rank, num_tokens)  # type: ignore[no-any-return]

    def _exchange(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        gate_up, down = _tensor(self._experts, self._gate), _tensor(self._experts, "down_proj")
        if gate_up.dtype not in self._calls:
            raise WeaveError(
                f'ep_implementation="weave": experts in {gate_up.dtype}, expected one of {", ".join(_DTYPES)}: use '
                'ep_implementation="all_to_all"'
            )
        gate_up_bias = _tensor(self._experts, f"{self._gate}_bias") if self._has_bias else None
        down_bias = _tensor(self._experts, "down_proj_bias") if self._has_bias else None
        if self._is_transposed:
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        result: Tensor = torch.ops.weave.expert_exchange(
            x.to(gate_up.dtype), experts, weights, gate_up, gate_up_bias, down, down_bias, self._calls[gate_up.dtype]
        )
        return result


def _tensor(module: nn.Module, name: str) -> Tensor:
    found: Tensor = getattr(module, name)
    return found


def _rows_of_rank(tokens: int, world: int) -> int:
    return (tokens + world - 1) // world


def _own(x: Tensor, world: int, rank: int, fill: float) -> Tensor:
    """Return this rank's equal share of the rows of `x`, padded at the end with rows of `fill`."""
    rows = _rows_of_rank(x.shape[0], world)
    return functional.pad(x, (0, 0, 0, rows * world - x.shape[0]), value=fill)[rank * rows : (rank + 1) * rows]


def _gathered(x: Tensor, group: str, world: int, tokens: int) -> Tensor:
    whole: Tensor = _c10d.wait_tensor(_c10d.all_gather_into_tensor(x.contiguous(), world, group))
    return whole[:tokens]


class _Slice(torch.autograd.Function):
    """Shard of rows that all ranks have; each rank has the gradient of its shard, so the backward pass gathers
    those."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, world: int, rank: int, fill: float) -> Tensor:
        ctx.back = (group, world, x.shape[0])
        return _own(x, world, rank, fill).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _gathered(grad, *ctx.back), None, None, None, None


class _Gather(torch.autograd.Function):
    """All-gather of rows; all ranks have the gradient of the whole, so the backward pass takes this rank's shard."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, world: int, rank: int, tokens: int) -> Tensor:
        ctx.back = (world, rank, 0.0)
        return _gathered(x, group, world, tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _own(grad, *ctx.back).contiguous(), None, None, None, None
