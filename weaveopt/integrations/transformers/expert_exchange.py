"""Expert parallelism of a transformers module as `weave::expert_exchange`: one node, without a host synchronization.

Replaces transformers' `AllToAllEP`, which reads split sizes on the host in Python and so breaks the graph in every
layer. Ranks that hold the same batch (a tensor-parallel group) each take an equal slice of it, padded to the same size
on all of them, and gather the results. `IndependentExperts` are those of ranks that promise no common calls.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional
from transformers.distributed.expert_parallel import EPImplementation

import weaveopt.ops  # noqa: F401  (registers torch.ops.weave)
from weaveopt.config import resolve
from weaveopt.errors import WeaveError
from weaveopt.fabrics import exported
from weaveopt.integrations.transformers.expert_form import activation_of, call_of

Tensor = torch.Tensor
_c10d = torch.ops._c10d_functional

_DTYPES = ("bfloat16", "float16", "float32")
NOBODYS = -1
"""Expert of the padding."""


class ExpertExchange(EPImplementation):
    """See the module's docstring. Raises `WeaveError` for experts that compute what the operation does not."""

    independent = False
    """True if ranks promise no common calls."""

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        act = activation_of(experts)
        down = _tensor(experts, "down_proj")
        group, world = ep_mesh.get_group().group_name, ep_mesh.size()
        self.experts, self.group = experts, group
        self._gate = "gate_up_proj" if act.gated else "up_proj"
        self._is_transposed, self._has_bias = bool(experts.is_transposed), bool(experts.has_bias)
        hidden = down.shape[-1] if self._is_transposed else down.shape[-2]
        # Parameters may be cast later, and text is no business of a traced function.
        self._calls = {
            getattr(torch, dtype): call_of(
                act, group, world, hidden, dtype, self.num_local_experts, self.shares_batch, self.independent
            ).encode()
            for dtype in _DTYPES
        }
        self._slice = (tp_mesh.get_group().group_name, tp_mesh.size(), tp_mesh.get_local_rank())
        exported.register(group, self, ep_mesh)  # one object for all layers of a model
        LAYERS.add(self)

    def exported(self) -> tuple[Tensor, ...]:
        """This rank's weights and biases, as `weaveopt.fabrics.exported` moves them."""
        return tuple(_local(_tensor(self.experts, name)) for name in self._names)

    def moved(self) -> None:
        """Has parameters whose local tensors moved say the offset of these, which tracers compare."""
        for name in self._names:
            parameter = _tensor(self.experts, name)
            if isinstance(parameter, DTensor) and parameter.storage_offset():
                local, mesh, placements = parameter._local_tensor, parameter.device_mesh, parameter.placements
                parameter.data = DTensor.from_local(local, mesh, placements, run_check=False)

    @property
    def _names(self) -> tuple[str, ...]:
        biases = (f"{self._gate}_bias", "down_proj_bias") if self._has_bias else ()
        return (self._gate, "down_proj", *biases)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        num_tokens, (group, world, rank) = hidden_states.shape[0], self._slice
        if world == 1:
            return self._exchange(hidden_states, top_k_index, top_k_weights)
        mine = _Slice.apply(hidden_states, group, world, rank, 0.0)
        ids = _Slice.apply(top_k_index, group, world, rank, NOBODYS)
        weights = _Slice.apply(top_k_weights, group, world, rank, 0.0)
        return _Gather.apply(self._exchange(mine, ids, weights), group, world, rank, num_tokens)  # type: ignore[no-any-return]

    def _exchange(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        gate_up, down = _tensor(self.experts, self._gate), _tensor(self.experts, "down_proj")
        if gate_up.dtype not in self._calls:
            raise WeaveError(
                f'ep_implementation="weave": experts in {gate_up.dtype}, expected one of {", ".join(_DTYPES)}: use '
                'ep_implementation="all_to_all"'
            )
        gate_up_bias = _tensor(self.experts, f"{self._gate}_bias") if self._has_bias else None
        down_bias = _tensor(self.experts, "down_proj_bias") if self._has_bias else None
        if self._is_transposed:
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        result: Tensor = torch.ops.weave.expert_exchange(
            x.to(gate_up.dtype), experts, weights, gate_up, gate_up_bias, down, down_bias, self._calls[gate_up.dtype]
        )
        return result


class IndependentExperts(ExpertExchange):
    """Experts of ranks that promise no common calls (`ep_implementation="weave_independent"`): tokens never travel.

    The weights are shared when all ranks have come to their first call of such a layer, or to
    `weaveopt.share_experts`. Raises `WeaveError` also where ranks hold the same batch.
    """

    independent = True

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        if tp_mesh.size() > 1:
            raise WeaveError(
                f'ep_implementation="weave_independent": asked for {tp_mesh.size()} tensor-parallel ranks, which hold '
                'one batch and have to call together: use ep_implementation="weave"'
            )
        # Before transformers puts local tensors in the place of the parameters, for as long as a call takes.
        experts.register_forward_pre_hook(self._share)

    def _share(self, module: nn.Module, arguments: object) -> None:
        share_when_first_called(self.group)


@torch.compiler.assume_constant_result
def share_when_first_called(group: str) -> bool:
    """Share the group's experts, once; in compiled code while it is traced, before anything holds their storage.

    Returns true. Why it failed is raised by the calls, on all ranks.
    """
    if not exported.is_shared(group) and not exported.refusal(group):
        try:
            exported.share(group, resolve().compile_timeout_s)
        except WeaveError as error:
            exported.refuse(group, str(error))
    return True


def share_experts(model: nn.Module) -> None:
    """Move the experts of `model` into memory that the other ranks read, now. All ranks call it.

    For programs in which some rank may never call the model (`weaveopt.DataParallelExperts(..., independent=True)`),
    and after parameters were replaced or converted. Raises `ExportError` on all ranks if one of them cannot share its
    memory, and `AgreementError` if one does not come within the option `compile_timeout_s`.
    """
    modules = set(model.modules())
    groups = sorted({layer.group for layer in LAYERS if layer.experts in modules})
    if not groups:
        raise WeaveError(
            f"share_experts: asked to share the experts of a {type(model).__name__}, found none that are spread over "
            "ranks by weaveopt: load it with distributed_config=weaveopt.DataParallelExperts(num_ranks)"
        )
    for group in groups:
        exported.share(group, resolve().compile_timeout_s)


LAYERS: weakref.WeakSet[ExpertExchange] = weakref.WeakSet()
"""Every layer of experts in this process."""


def _tensor(module: nn.Module, name: str) -> Tensor:
    found: Tensor = getattr(module, name)
    return found


def _local(tensor: Tensor) -> Tensor:
    """The tensor that holds this rank's part, itself: not a view of it."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


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
