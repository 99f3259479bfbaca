"""Enumerations and records of this family as native code takes them, on every fabric."""

from __future__ import annotations

from weaveopt.errors import WeaveError
from weaveopt.ops.reduction.variant import BETWEEN_GPUS, Algorithm, KernelRow, Transfer
from weaveopt.records.norm import NormSpec

try:
    from weaveopt import _native
except ImportError:  # built without it: no site is bound then
    _native = None  # type: ignore[assignment]

_KERNELS = {
    (Transfer.LL_PACKET, Algorithm.ONE_SHOT): "ll_packet_one_shot",
    (Transfer.LL_PACKET, Algorithm.TWO_SHOT): "ll_packet_two_shot",
    (Transfer.BULK, Algorithm.TWO_SHOT): "bulk",
    (Transfer.POSTED, Algorithm.TWO_SHOT): "posted",
    (Transfer.DIRECT, Algorithm.TWO_SHOT): "direct",
}
"""The GPU kernels by their names in `_native.GpuKernel`."""


def host_transfer(row: KernelRow) -> _native.HostTransfer:
    """Transfer of rows between GPUs of several hosts. Raises `WeaveError` where no kernel between them does that."""
    if row.transfer not in BETWEEN_GPUS or row.algorithm is not Algorithm.DOUBLING:
        raise WeaveError(f"no kernel between hosts of GPUs for {row.variant}")
    transfer: _native.HostTransfer = getattr(_native.HostTransfer, row.transfer.value)
    return transfer


def native_norm(spec: NormSpec | None) -> _native.NormSpec:
    """`spec`, or the one of no norm."""
    out = _native.NormSpec()
    if spec is not None:
        out.kind = getattr(_native.NormKind, spec.kind.value)
        out.eps = spec.eps
        out.weight_offset = spec.weight_offset
        out.cast_before_weight = spec.cast_before_weight
    return out


def kernel_name(row: KernelRow) -> str:
    """The GPU kernel that runs a row of the table. Raises `WeaveError` where there is none."""
    name = _KERNELS.get((row.transfer, row.algorithm))
    if name is None:
        raise WeaveError(f"no GPU kernel for {row.algorithm.value} with transfer {row.transfer.value}")
    return name


def out_kind(dtype: str, out_dtype: str) -> _native.OutKind:
    """Kind of GPU kernels' normalized rows for `out_dtype`, where activations are of `dtype`."""
    kind: _native.OutKind = getattr(_native.OutKind, "same" if out_dtype == dtype else out_dtype)
    return kind
