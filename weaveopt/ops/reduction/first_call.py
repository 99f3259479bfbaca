"""The first calls of these kernels by NVLink multicast in a new arena, against the reference (`fabrics.multicast`).

Partial results are small integers, so sums over ranks are exact in every dtype and order: they are compared bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weaveopt.errors import WeaveError
from weaveopt.fabrics import multicast
from weaveopt.fabrics.layout import Layout
from weaveopt.fabrics.multicast import Run
from weaveopt.fabrics.peer import PeerArena
from weaveopt.fabrics.topology import Group
from weaveopt.ops.reduction.buffers import memory_plan
from weaveopt.ops.reduction.call import ReductionCall
from weaveopt.ops.reduction.operands import EpilogueOperands, QuantResults
from weaveopt.ops.reduction.peer import PeerReduction
from weaveopt.ops.reduction.reference import reference_quant
from weaveopt.ops.reduction.variant import OP, Algorithm, KernelRow, Transfer
from weaveopt.records.candidate import Fabric
from weaveopt.records.norm import NormKind, NormSpec, Quant

Tensor = torch.Tensor
_TOKENS, _HIDDEN = 67, 1024
"""Shares of the tokens that are not equal; several rows a CTA on no GPU, but several CTAs on all."""
_LARGEST = 8
_FORMS = (
    ("bfloat16", "bfloat16", Quant.NONE),
    ("float16", "float16", Quant.NONE),
    ("float32", "float32", Quant.NONE),
    ("bfloat16", "float32", Quant.NONE),
    ("bfloat16", "float8_e4m3fn", Quant.PER_TOKEN),
)
"""Dtypes of partial results and of normalized rows: every width of a load that reduces and a store that broadcasts."""
_TOLERANCE = {"bfloat16": 2**-7, "float16": 2**-9, "float32": 1e-4, "float8_e4m3fn": 2**-2}
"""Tolerance of normalized rows, by their dtype; a wrong row is off by far more."""


class MulticastCalls:
    """See the module's docstring and `multicast.FirstCall`."""

    def layout(self, group: Group) -> Layout:
        return Layout.of(memory_plan(group.name, _calls(group)))

    def prepare(self, arena: PeerArena) -> Run:
        prepared = [_Prepared.of(call, arena) for call in _calls(arena.group)]

        def run() -> str:
            return next((wrong for each in prepared if (wrong := each.wrong())), "")

        return run


def _calls(group: Group) -> tuple[ReductionCall, ...]:
    return tuple(
        ReductionCall(
            site=f"the first call by multicast, {dtype} to {out_dtype}",
            group=group.name,
            fabric=Fabric.MULTIMEM,
            world=len(group.ranks),
            hidden=_HIDDEN,
            dtype=dtype,
            out_dtype=out_dtype,
            max_tokens=_TOKENS,
            post=None,
            norm=NormSpec(NormKind.RMS, 1e-5),
            timeout_s=multicast.TIMEOUT_S,
            table=(KernelRow(_TOKENS, Algorithm.TWO_SHOT, Transfer.DIRECT),),
            quant=quant,
        )
        for dtype, out_dtype, quant in _FORMS
    )


@dataclass(frozen=True)
class _Prepared:
    """One call with what it takes and what has to come of it."""

    call: ReductionCall
    site: PeerReduction
    partial: Tensor
    expected: QuantResults

    @staticmethod
    def of(call: ReductionCall, arena: PeerArena) -> _Prepared:
        site = PeerReduction.bound_to(arena, call, call.encode(), OP, lambda: None)
        launch = site.launch(_TOKENS)
        if launch is None:
            raise WeaveError(f"{call.site}: the GPU does not run the kernel")
        device = arena.tensor(0, (1,), torch.uint8).device
        partials = [_partial(rank, call.dtype).to(device) for rank in range(call.world)]
        return _Prepared(call, site, partials[arena.group.rank], reference_quant(partials, EpilogueOperands(), call))

    def wrong(self) -> str:
        """Runs the call: how its results differ from the reference; empty where they do not."""
        results = self.site.run(self.partial, EpilogueOperands())
        if results is None:
            return f"{self.call.site}: the kernel did not run"
        normalized, total, row_scale = self.expected
        tolerances = (_TOLERANCE[self.call.out_dtype], 0.0, _TOLERANCE[self.call.dtype])
        for name, got, want, tolerance in zip(
            ("normalized", "sum", "row_scale"), results, (normalized, total, row_scale), tolerances, strict=True
        ):
            count = 0 if got is None else _num_wrong(got, want, tolerance)
            if count:
                return f"{self.call.site}: {count} of {want.numel()} elements of {name} are not the reference's"
        return ""


def _partial(rank: int, dtype: str) -> Tensor:
    """Partial result of `rank`; every rank can compute all of them."""
    values = torch.randint(-_LARGEST, _LARGEST + 1, (_TOKENS, _HIDDEN), generator=torch.Generator().manual_seed(rank))
    return values.to(getattr(torch, dtype))


def _num_wrong(got: Tensor, want: Tensor, tolerance: float) -> int:
    """Elements further from the wanted ones than `tolerance`, relative to the larger of their size and 1."""
    off = (got.float() - want.float()).abs()
    return int((~(off <= tolerance * want.float().abs().clamp_min(1.0))).sum())
