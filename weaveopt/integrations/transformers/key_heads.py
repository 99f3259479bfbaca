"""Replication of key heads: with more tensor-parallel ranks than key heads, several ranks share each key and value
head.

transformers shards the key heads of a model, and cannot shard one. Here the ranks are a grid of `key heads x replicas`:
the weights of `k_proj` and `v_proj` are sharded over the first dimension and replicated over the second, and each rank
attends with its own query heads to the one key head that those share. DTensor reads a checkpoint in that layout and
writes the one that was read.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional
from transformers.distributed.parallel_utils import (
    ALL_PARALLEL_STYLES,
    replace_layer_number_by_wildcard,
)
from transformers.distributed.tensor_parallel import ColwiseParallel, LocalParamsParallel

from weaveopt.errors import WeaveError
from weaveopt.integrations.transformers.layer_settings import values_of
from weaveopt.wording import counted

if TYPE_CHECKING:
    from transformers import PreTrainedConfig
    from transformers.distributed import DistributedConfig

ATTENTION_STYLE = "weave_replicated_key_heads"
WEIGHT_STYLE = "weave_replicated_key_heads_weight"
_PROJECTIONS = ("k_proj", "v_proj")
_FUSED = ("qkv_proj", "query_key_value", "Wqkv", "c_attn")
"""Names of projections that make queries, keys and values at once."""
_MARK = "_weave_num_key_heads"
_c10d = torch.ops._c10d_functional


def replicated_key_heads(
    model: str | os.PathLike[str] | PreTrainedConfig, parallel: DistributedConfig
) -> DistributedConfig:
    """`parallel` with a plan that replicates key heads where `parallel.tp_size` is a multiple of their number.

        parallel = weaveopt.replicated_key_heads(name, DistributedConfig(tp_size=16))
        model = AutoModelForCausalLM.from_pretrained(name, distributed_config=parallel)

    `model` is what `from_pretrained` gets, or a configuration. Returned as it is where key heads need no replicas.
    Raises `WeaveError` for ranks that neither divide the key heads nor are a multiple of them, and for models whose
    attention cannot be laid out so.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    world = parallel.tp_size or 1
    if world == 1 or parallel.tp_plan == {}:
        return parallel
    config = AutoConfig.from_pretrained(model) if isinstance(model, str | os.PathLike) else model
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    given = parallel.tp_plan if isinstance(parallel.tp_plan, dict) else {}
    rules = {**skeleton.tp_plan, **given}
    found: dict[str, str] = {}
    for name, module in skeleton.named_modules():
        found.update(_rules_of(replace_layer_number_by_wildcard(name), module, rules, world))
    if not found:
        return parallel
    if parallel.dp_size > 1:
        raise WeaveError(
            f"replicated_key_heads: asked for {counted(world, 'tensor-parallel rank')} with FSDP over "
            f"{parallel.dp_size}, which shards no weight that is replicated so: give fsdp_size=1, dp_replicate_size=1"
        )
    return replace(parallel, tp_plan={**given, **found})


def _rules_of(name: str, module: nn.Module, rules: dict[str, str], world: int) -> dict[str, str]:
    """Rules for one attention module; none where it is no such module, or its key heads need no replicas."""
    heads = values_of(getattr(module, "config", None), "num_key_value_heads")
    for fused in _FUSED:
        if rules.get(f"{name}.{fused}") == "colwise" and any(isinstance(each, int) and each % world for each in heads):
            raise WeaveError(f"replicated_key_heads: {name}.{fused} holds queries, keys and values in one weight")
    if rules.get(f"{name}.k_proj") != "colwise" or not isinstance(getattr(module, "k_proj", None), nn.Linear):
        return {}
    if _num_key_heads(module) % world == 0:
        return {}
    _check(name, module, world)
    style = rules.get(name, "local_params")
    if style not in ("local_params", ATTENTION_STYLE):
        raise WeaveError(f"replicated_key_heads: {name} has the plan {style}, expected none or local_params")
    found = {name: ATTENTION_STYLE}
    for projection, linear in _projections(module):
        if rules.get(f"{name}.{projection}") != "colwise":
            raise WeaveError(f"replicated_key_heads: {name}.{projection} is not sharded, as {name}.k_proj is")
        found.update(
            {f"{name}.{projection}.{each}": WEIGHT_STYLE for each, _ in linear.named_parameters(recurse=False)}
        )
    return found


def _projections(attention: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for name in _PROJECTIONS:
        linear = getattr(attention, name, None)
        if isinstance(linear, nn.Linear):
            yield name, linear


def _num_key_heads(attention: nn.Module) -> int:
    linear, size = attention.k_proj, getattr(attention, "head_dim", None)
    assert isinstance(linear, nn.Linear)
    return linear.out_features // size if isinstance(size, int) else linear.out_features


def _check(name: str, attention: nn.Module, world: int) -> None:
    groups, heads = getattr(attention, "num_key_value_groups", None), _num_key_heads(attention)
    if not isinstance(groups, int):
        raise WeaveError(f"replicated_key_heads: {type(attention).__name__} has no num_key_value_groups")
    if world % heads or (groups * heads) % world:
        raise WeaveError(
            f"replicated_key_heads: {name} has {counted(groups * heads, 'query head')} and "
            f"{counted(heads, 'key head')}, asked for {counted(world, 'rank')}: give a multiple of the key heads that "
            "divides the query heads"
        )


def _grid(mesh: DeviceMesh, heads: int) -> DeviceMesh:
    """The ranks of `mesh` as `heads x replicas`, one grid for all layers: making one is collective."""
    grids: dict[int, DeviceMesh] = mesh.__dict__.setdefault("_weave_key_head_grids", {})
    if heads not in grids:
        # `weaveopt explain` distributes fake tensors, and a mesh reads the numbers of its ranks.
        with unset_fake_temporarily():
            grids[heads] = mesh._unflatten(0, (heads, mesh.size() // heads), ("key_heads", "key_head_replicas"))
    return grids[heads]


class ReplicatedKeyHeads(LocalParamsParallel):
    """Parallel style of an attention module: query heads of this rank share its one key head. Precedes the rules of
    its children."""

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        heads, world = _num_key_heads(module), mesh.size()
        if heads % world:
            _check(type(module).__name__, module, world)
            # Its name is enough: Dynamo need not trace how a mesh finds a group.
            replicas = str(_grid(mesh, heads).get_group(1).group_name)
            for _, linear in _projections(module):
                setattr(linear, _MARK, heads)
                # Output features of all ranks together.
                linear.out_features = linear.out_features // heads * world
                linear.forward = functools.partial(_linear, linear, linear.forward, replicas)  # type: ignore[method-assign]
            groups = module.num_key_value_groups
            assert isinstance(groups, int)
            module.num_key_value_groups = groups * heads // world  # type: ignore[assignment]
        return super().install_forward(module, mesh)  # type: ignore[no-any-return]


def _linear(module: nn.Linear, forward: Callable[[Tensor], Tensor], replicas: str, x: Tensor) -> Tensor:
    """`forward(x)` on this rank's part. Gradients of the weights are summed over the group `replicas`."""
    if not torch.is_grad_enabled():
        return forward(x)  # transformers has put the local parts in
    if isinstance(x, DTensor):
        x = x.to_local(grad_placements=[Partial()])
    bias = None if module.bias is None else _local(module.bias, replicas)
    return functional.linear(x, _local(module.weight, replicas), bias)


def _local(weight: Tensor, replicas: str) -> Tensor:
    assert isinstance(weight, DTensor)
    return _GradientOfAllReplicas.apply(weight.to_local(), replicas)  # type: ignore[no-any-return]


class _GradientOfAllReplicas(torch.autograd.Function):
    """Gradient of `x` on a replicated key head: each rank has that of its query heads, and those are summed over
    `group`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _c10d.wait_tensor(_c10d.all_reduce(grad.contiguous(), "sum", ctx.group)), None


class ReplicatedKeyHeadsWeight(ColwiseParallel):
    """Parallel style of a `k_proj` or `v_proj` weight or bias: sharded over the key heads, replicated over the ranks
    of each."""

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        heads = getattr(module, _MARK, None)
        if heads is None:
            super().shard_param(module, param, mesh)
            return
        whole = module._parameters[param]
        assert whole is not None
        placements = [Shard(max(whole.ndim - 2, 0)), Replicate()]
        module._parameters[param] = nn.Parameter(
            distribute_tensor(whole, _grid(mesh, heads), placements, src_data_rank=None),
            requires_grad=whole.requires_grad,
        )


ALL_PARALLEL_STYLES.register(ATTENTION_STYLE, ReplicatedKeyHeads())
ALL_PARALLEL_STYLES.register(WEIGHT_STYLE, ReplicatedKeyHeadsWeight())
