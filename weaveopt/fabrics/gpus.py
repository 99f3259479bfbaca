"""Description that a rank publishes of its GPU, and the peers' GPUs that it cannot reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

import torch

from weaveopt.cost_model import Gpu
from weaveopt.fabrics import symmetric
from weaveopt.records.candidate import Rejection

try:
    from weaveopt import _native
except ImportError:  # built without it: why_no_host_memory() says so
    _native = None  # type: ignore[assignment]

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
        "no_host_memory": why_no_host_memory(device),
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


def no_host_memory(answers: Sequence[Described], ranks: Sequence[int]) -> Rejection | None:
    """Why GPUs of these ranks cannot use memory of the host, of the first that says so; None: all can."""
    for rank, each in zip(ranks, answers, strict=True):
        why = str(each.get("no_host_memory", "its GPU could not be asked"))
        if why:
            message = "a rank's GPU cannot use memory of the host that processes share"
            return Rejection("no_host_memory", message, (("rank", rank), ("why", why)))
    return None


def why_no_host_memory(index: int) -> str:
    """Reason, by the driver, why GPU `index` cannot use memory that this process registers; empty if it can."""
    if _native is None or not _native.has_cuda:
        return "weaveopt was installed without its CUDA part"
    return str(_native.why_no_host_memory(index))


def memory_node(index: int) -> int:
    """Memory node of the host that GPU `index` is attached to; -1 if the system does not say."""
    properties = torch.cuda.get_device_properties(index)
    words = [getattr(properties, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    if None in words:
        return -1
    domain, bus, device = (int(str(word)) for word in words)
    node = Path(f"/sys/bus/pci/devices/{domain:04x}:{bus:02x}:{device:02x}.0/numa_node")
    try:
        return max(int(node.read_text()), -1)
    except (OSError, ValueError):
        return -1


def pair_without_access() -> tuple[int, int] | None:
    """The first two GPUs that this process sees and that cannot map each other's memory."""
    pairs = combinations(range(torch.cuda.device_count()), 2)
    return next((pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)), None)


def have_peer_atomics() -> bool:
    """True if all GPUs that this process sees support native atomics on each other's memory: NVLink does, PCIe not."""
    if _native is None or not _native.has_cuda:
        return False
    return all(_native.has_peer_atomics(*pair) for pair in combinations(range(torch.cuda.device_count()), 2))


def _id(properties: object) -> str:
    """Identity (UUID) of a GPU; empty, which matches no GPU, if torch does not expose it."""
    return str(getattr(properties, "uuid", ""))
