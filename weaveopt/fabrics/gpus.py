"""Description that a rank publishes of its GPU, and the peers' GPUs that it cannot reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import torch

from weaveopt.cost_model import Gpu
from weaveopt.fabrics import symmetric
from weaveopt.records.candidate import Rejection

Described = Mapping[str, str | int]
_BITS_PER_BYTE = 8
_TRANSFERS_PER_CLOCK = 2


def describe(index: int | None = None) -> dict[str, str | int]:
    """The GPU that this rank uses, or another one: what `gpus_of` and `without_access` read on the others.

    Nothing where CUDA cannot be used in this process: a forked child of CPU ranks, on a host that has GPUs.
    """
    try:
        device = torch.cuda.current_device() if index is None else index
        properties = torch.cuda.get_device_properties(device)
    except (RuntimeError, AssertionError):
        return {}
    kilohertz = int(getattr(properties, "memory_clock_rate", 0))
    bus_bytes = int(getattr(properties, "memory_bus_width", 0)) // _BITS_PER_BYTE
    return {
        "gpu": str(getattr(properties, "name", "")),
        "gpu_id": _id(properties),
        "processors": int(properties.multi_processor_count),
        "no_multicast": symmetric.why_no_multicast(device),
        "bytes_per_s": kilohertz * 1000 * _TRANSFERS_PER_CLOCK * bus_bytes,
    }


def gpus_of(answers: Sequence[Described]) -> tuple[Gpu, ...]:
    """Parse the GPUs of all ranks; empty if some rank published none."""
    if not all("gpu" in each for each in answers):
        return ()
    return tuple(Gpu(str(each["gpu"]), int(each["processors"]), float(each["bytes_per_s"])) for each in answers)


def without_access(answers: Sequence[Described], rank: int) -> tuple[int, ...]:
    """Indices of the ranks of this host whose GPUs that of `rank` cannot map, for the system says so.

    A GPU that this process does not see (`CUDA_VISIBLE_DEVICES` of one GPU a process) is not known to be out of reach,
    and neither is the one that this rank uses itself.
    """
    own = torch.cuda.current_device()
    seen = {_id(torch.cuda.get_device_properties(index)): index for index in range(torch.cuda.device_count())}
    found = []
    for other, described in enumerate(answers):
        index = seen.get(str(described["gpu_id"]))
        if other == rank or described["host"] != answers[rank]["host"] or index in (None, own):
            continue
        if not torch.cuda.can_device_access_peer(own, index):
            found.append(other)
    return tuple(found)


def no_multicast(answers: Sequence[Described], ranks: Sequence[int]) -> Rejection | None:
    """Why torch makes no multicast mapping of the memory of these ranks, of the first that says so; None: it does."""
    for rank, each in zip(ranks, answers, strict=True):
        why = str(each.get("no_multicast", "its GPU could not be asked"))
        if why:
            values = (("rank", rank), ("why", why))
            return Rejection("no_multicast", "torch makes no NVLink multicast mapping of a rank's memory", values)
    return None


def pair_without_access() -> tuple[int, int] | None:
    """The first two GPUs that this process sees and that cannot map each other's memory."""
    pairs = combinations(range(torch.cuda.device_count()), 2)
    return next((pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)), None)


def _id(properties: object) -> str:
    """Identity (UUID) of a GPU; empty, which matches no GPU, if torch does not expose it."""
    return str(getattr(properties, "uuid", ""))
