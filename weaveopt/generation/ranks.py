"""Requirements on ranks that generate together."""

from __future__ import annotations

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from weaveopt.errors import AgreementError
from weaveopt.fabrics import topology


def are_several() -> bool:
    """True if steps of this process may wait for other processes."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def agree_on_randomness(model: PreTrainedModel) -> None:
    """Gives every rank of a tensor- or expert-parallel model the first rank's random state, where it differs.

    One broadcast a call. Ranks that drew different samples would feed different tokens to parts of one model.
    """
    group = _group(model)
    if group is None:
        return
    device = model.device
    index = (device.index if device.index is not None else torch.cuda.current_device()) if device.type == "cuda" else 0
    own = torch.cuda.get_rng_state(index) if device.type == "cuda" else torch.get_rng_state()
    first = own.to(device, copy=True)
    dist.broadcast(first, group_src=0, group=group)
    shared = first.cpu()
    if not torch.equal(shared, own):
        if device.type == "cuda":
            torch.cuda.set_rng_state(shared, index)
        else:
            torch.set_rng_state(shared)


def one_leaves(model: PreTrainedModel, leaves: bool) -> bool:
    """True if a rank of a tensor- or expert-parallel model leaves its call to transformers' loop; `leaves`: this one.

    One all-reduce a call. The two loops run the model in different sequences, so all ranks have to take the same one.
    """
    group = _group(model)
    if group is None or group.size() == 1:
        return leaves
    flag = torch.tensor([int(leaves)], device=model.device)
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
    return bool(flag.item())


def group_name(model: PreTrainedModel) -> str:
    """Name of the process group that shards this model; empty if the model is whole on this rank."""
    group = _group(model)
    return "" if group is None else str(group.group_name)


def agree_on_failure(group: str, what: str, why: str, timeout_s: float) -> None:
    """Check that no rank of the group could compile `what`, so that all run it uncompiled.

    Raises `AgreementError` if another rank could, or failed at something else: it would wait for signals that
    uncompiled code never sends, or round differently.
    """
    if not group or topology.discover(group, timeout_s).fake:
        return
    purpose = f"running {what} uncompiled ({why})"
    channel = topology.exchange(group, timeout_s)
    answers = channel.gather({"uncompiled": what}, purpose, timeout_s)
    for rank, each in zip(channel.group.ranks, answers, strict=True):
        if each["uncompiled"] != what:
            channel.settle()
            raise AgreementError(
                f"group {group!r}: rank {channel.group.ranks[channel.group.rank]} is at {purpose!r} while rank {rank} "
                f"could not compile {each['uncompiled']}: start all ranks with the same options, versions and model"
            )


def _group(model: PreTrainedModel) -> dist.ProcessGroup | None:
    """The ranks that this model is spread over; None where it is whole on this one."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None:
        sharded = (getattr(each, "device_mesh", None) for each in model.parameters())
        mesh = next((found for found in sharded if found is not None), None)
    if mesh is None or mesh.size() == 1:
        return None
    names = mesh.mesh_dim_names or ()
    if mesh.ndim > 1 and "tp" in names:
        mesh = mesh["tp"]
    return mesh.get_group() if mesh.ndim == 1 else None
