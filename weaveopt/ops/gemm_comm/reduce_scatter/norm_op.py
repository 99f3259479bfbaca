"""`weave::gemm_reduce_scatter_norm`: this rank's rows of a sum over ranks, with a residual added, and their RMS norm.

    partial = a @ b                                            # [tokens, hidden], rounded
    total = (reduce_scatter_tensor(partial, "sum") + residual).to(dtype)      # [own rows, hidden], in fp32 until then
    scaled = total.float() * rsqrt(mean(total.float() ** 2, -1) + eps)        # rounded where call.cast_before_weight
    normalized = (scaled * (weight + call.weight_offset)).to(dtype)
    return normalized, total          # where call.full_size_sum, a [tokens, hidden] of which own rows alone hold data

`a` is [tokens, k] and `b` [k, hidden]; own rows are tokens / world, those of rank r from `r * tokens / world` on;
`residual` [own rows, hidden] has this rank's rows alone. `a`, `b`, `residual` and both results are of one dtype: bf16,
fp16 or fp32; `weight` [hidden], of that dtype or fp32, or None. `call` is an encoded `GemmReduceScatterNormCall`. No
kernel reads `replicated`: the first call compares them with the other ranks', as that of `weave::gemm_reduce_scatter`.

On `peer` with `call.cut` all of it is one kernel, in bf16 or fp16 on compute capability 9.0, with rows of at most 8192
elements: the one of `weave::gemm_reduce_scatter`, whose teams add and normalize what they sum. Sums are in fp32, in the
order of the ranks, and rounded once, with the residual in them. What it does not take goes through
`weave::gemm_reduce_scatter`'s other ways, whose rows are rounded before plain torch adds the residual to them.

Raises what that operator does, and `WeaveError` for a residual or a weight of another size, dtype or device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist

from weaveopt.errors import WeaveError
from weaveopt.fabrics import topology
from weaveopt.fabrics.rows_call import BoundCalls, decode
from weaveopt.ops.gemm_comm.reduce_scatter import fake
from weaveopt.ops.gemm_comm.reduce_scatter.call import GemmReduceScatterNormCall, Products, part_of
from weaveopt.ops.gemm_comm.reduce_scatter.op import SITES, BoundGemmReduceScatter, compare, compare_again
from weaveopt.ops.gemm_comm.reduce_scatter.peer import PeerGemmReduceScatter
from weaveopt.ops.gemm_comm.reduce_scatter.reference import add_and_normalize, through_library

Tensor = torch.Tensor
NAME = "gemm_reduce_scatter_norm"


def _bind(call: GemmReduceScatterNormCall, text: str, forget: Callable[[], None]) -> BoundGemmReduceScatter | None:
    """Binds the reduce-scatter that sums the rows."""

    def forget_all() -> None:
        compare_again(text)
        forget()

    kind = SITES.get(call.fabric)
    return None if kind is None else kind.bind(call.scatter, text, NAME, forget_all)


_bound: BoundCalls[GemmReduceScatterNormCall, BoundGemmReduceScatter] = BoundCalls(GemmReduceScatterNormCall, _bind)


def _check(site: GemmReduceScatterNormCall, products: Products, residual: Tensor, weight: Tensor | None) -> None:
    """Raises `WeaveError`."""
    dtype = products.a[0].dtype
    shape = part_of(site.scatter, products.num_tokens, 1).shape(site.scatter)
    if residual.shape != shape or residual.dtype is not dtype:
        found = f"{tuple(residual.shape)} {residual.dtype}"
        raise WeaveError(f"site {site.site}: the residual is {found}, expected this rank's rows {shape} {dtype}")
    if weight is not None and (weight.shape != (site.hidden,) or weight.dtype not in (dtype, torch.float32)):
        found = f"{tuple(weight.shape)} {weight.dtype}"
        raise WeaveError(f"site {site.site}: the norm's weight is {found}, expected {(site.hidden,)} {dtype} or fp32")


def _run(
    device: str,
    a: Tensor,
    b: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    call: str,
    replicated: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    # Below autograd: the GEMM goes into an `out=`, which autograd refuses for inputs that require gradients.
    with torch._C._AutoDispatchBelowAutograd():
        products, site, record = Products([a], [b]), _bound.of(device, call), decode(GemmReduceScatterNormCall, call)
        compare(NAME, record, call, replicated or ())
        _check(record, products, residual, weight)
        if isinstance(site, PeerGemmReduceScatter):
            made = site.run_norm(products, residual, weight, record)
            if made is not None:
                return made
        rows = None if site is None else site.run(products, 1)
        if rows is None:
            rows = through_library(products, 1, record.scatter)
        normalized, total = add_and_normalize(rows.float(), residual, weight, record)
        return normalized, _returned(total, record)


def _returned(total: Tensor, call: GemmReduceScatterNormCall) -> Tensor:
    """`total` [own rows, hidden] as the call returns it."""
    if not call.full_size_sum:
        return total
    whole = total.new_empty(call.sum_rows(len(total)), call.hidden)
    whole[call.local_rows(len(total), dist.get_rank(topology.process_group(call.group)))] = total
    return whole


_library = torch.library.Library("weave", "FRAGMENT")
# Any strides are taken, so Inductor need not copy inputs into the ones that were traced.
_library.define(
    f"{NAME}(Tensor a, Tensor b, Tensor residual, Tensor? weight, str call, Tensor[]? replicated=None) "
    "-> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout),
)
for _device in ("cpu", "cuda"):
    _library.impl(NAME, functools.partial(_run, _device), _device.upper())
torch.library.register_fake(f"weave::{NAME}", fake.gemm_reduce_scatter_norm, lib=_library)
