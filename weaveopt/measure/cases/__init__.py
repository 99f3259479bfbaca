"""The families of measurements, in the order in which they are taken. A new family is one file and one line here."""

from __future__ import annotations

import re

from weaveopt.measure.cases.attention.library import AttentionKernels
from weaveopt.measure.cases.attention.masked import CausalKernels
from weaveopt.measure.cases.attention.paged import PagedKernels
from weaveopt.measure.cases.collectives import Collectives
from weaveopt.measure.cases.copies import Copies
from weaveopt.measure.cases.energy import Energies
from weaveopt.measure.cases.experts.fused import ExpertKernels
from weaveopt.measure.cases.experts.grouped_gemm import GroupedGemms
from weaveopt.measure.cases.experts.reads import ExpertReads
from weaveopt.measure.cases.experts.sharded import ShardedKernels
from weaveopt.measure.cases.family import Family
from weaveopt.measure.cases.gemm import Gemms
from weaveopt.measure.cases.gemm_comm.all_gather import AllGathers, PushedGathers
from weaveopt.measure.cases.gemm_comm.all_reduce import TileKernels
from weaveopt.measure.cases.gemm_comm.reduce_scatter import ReduceScatters, ScatteredTiles
from weaveopt.measure.cases.gemm_comm.reduce_scatter_norm import NormedTiles
from weaveopt.measure.cases.launch import Launches
from weaveopt.measure.cases.library_contention import LibraryContention
from weaveopt.measure.cases.memory import MemoryKernels
from weaveopt.measure.cases.reduction.contention import StreamContention
from weaveopt.measure.cases.reduction.gpu_hosts import GpuHosts
from weaveopt.measure.cases.reduction.host import HostKernels
from weaveopt.measure.cases.reduction.hosts import HostExchanges
from weaveopt.measure.cases.reduction.peer import PeerKernels
from weaveopt.measure.cases.reduction.shm import ShmKernels

__all__ = ["FAMILIES", "GpuHosts", "HostExchanges", "name_of"]

FAMILIES: tuple[type[Family], ...] = (
    Launches,
    Gemms,
    MemoryKernels,
    AttentionKernels,
    CausalKernels,
    PagedKernels,
    GroupedGemms,
    ExpertKernels,
    Collectives,
    PeerKernels,
    HostKernels,
    ShmKernels,
    ReduceScatters,
    AllGathers,
    StreamContention,
    LibraryContention,
    Copies,
    TileKernels,
    ScatteredTiles,
    NormedTiles,
    PushedGathers,
    ShardedKernels,
    ExpertReads,
    Energies,
)
"""Families measured within a host. On several hosts, CPU ranks measure `HostExchanges` and the link, and GPUs
`GpuHosts`."""


def name_of(family: type) -> str:
    """Name of a family for `calibrate --only`: `tile_kernels` for `TileKernels`."""
    return re.sub(r"(?<!^)([A-Z])", r"_\1", family.__name__).lower()
