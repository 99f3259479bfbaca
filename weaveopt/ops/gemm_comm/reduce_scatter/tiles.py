"""Requirements and price of variant `tiles`: one kernel that computes the GEMM, pushes its tiles to their owners, and
sums; and of `tiles norm`, in which owners add a residual and normalize too.

Its time is not modelled: a profile keeps it as measured, see `weaveopt.cost_model.tile_config`.
"""

from __future__ import annotations

from collections.abc import Iterator

from weaveopt.cost_model import Gemm, Machine, gemm_us, host_us
from weaveopt.cost_model.gemm import num_units
from weaveopt.cost_model.overlapped import Message, Unmeasured, fastest
from weaveopt.cost_model.tile_config import TILE_DTYPES, TileConfig, TileKernelNames
from weaveopt.fabrics.traits import NativePart, is_built
from weaveopt.ops.gemm_comm.reduce_scatter.call import REDUCE_SCATTER
from weaveopt.records.candidate import Estimate, Fabric, Rejection, Term
from weaveopt.records.site import DTYPE_BYTES, TokenCounts
from weaveopt.wording import counted

try:
    from weaveopt import _native
except ImportError:  # built without it: size_refused() says so
    _native = None  # type: ignore[assignment]

ROW_ALIGNMENT = 8
"""Elements: TMA moves rows that begin at multiples of 16 bytes."""


def size_refused(gemm: Gemm, dtype: str, world: int, tokens: TokenCounts) -> Iterator[Rejection]:
    """Token counts, rows and types that the kernel does not take."""
    if not is_built(NativePart.HOST):
        yield Rejection(NativePart.HOST.code, "weaveopt was installed without its native part")
        return
    if not tokens.is_static:
        message = "the kernel is planned for one token count, and this graph's is symbolic"
        yield Rejection("symbolic_tokens", message)
    most = _native.product_most_tokens(world)
    if tokens.most > most:
        yield Rejection(
            "too_many_tokens", f"the kernel supports at most {counted(most, 'token')}", (("tokens", tokens.most),)
        )
    if gemm.n % ROW_ALIGNMENT or gemm.n > _native.PRODUCT_MOST_HIDDEN:
        message = f"the kernel supports rows of a multiple of {ROW_ALIGNMENT}, at most {_native.PRODUCT_MOST_HIDDEN}"
        yield Rejection("row_not_supported", message, (("hidden", gemm.n),))
    if gemm.k % ROW_ALIGNMENT or gemm.k == 0:
        message = f"the kernel supports GEMMs of a depth that is a multiple of {ROW_ALIGNMENT}"
        yield Rejection("depth_not_supported", message, (("k", gemm.k),))
    if dtype not in TILE_DTYPES:
        yield Rejection("dtype_not_supported", "the kernel supports bf16 or fp16", (("dtype", dtype),))


def price(
    machine: Machine, fabric: Fabric, gemm: Gemm, dtype: str, world: int, kernels: TileKernelNames = REDUCE_SCATTER
) -> tuple[TileConfig, Estimate] | Rejection:
    """The kernel by the tiles that are predicted fastest; or why its time is not known.

    Terms: `gemm`, as the graph's own would take; `exposed`, what the kernel takes beyond that; `host`. The model's own
    error is charged for all of it: the GEMM is not the graph's, so what is wrong with its price need not be with this
    one's.
    """
    units = num_units(machine, dtype)

    def waves(cut: TileConfig, tokens: int, hidden: int, _: int) -> int:
        sizes = tokens, hidden, cut.tile_columns, cut.reducer_ctas, world, units
        return 0 if _native is None else _native.product_waves(*sizes)

    message = Message(gemm.m, gemm.n, DTYPE_BYTES[dtype])
    multiplied_us = gemm_us(machine, gemm, dtype)
    found = fastest(kernels.known(machine, fabric, world), machine, message, gemm.k, waves, multiplied_us)
    if isinstance(found, Unmeasured):
        return Rejection(found.code, found.message, found.values)
    cut, us = found
    terms = (
        Term("gemm", multiplied_us),
        Term("exposed", us - multiplied_us),
        Term("host", host_us(machine) * machine.oversubscription(world, 1)),
    )
    return cut, Estimate(tuple(term for term in terms if term.us != 0.0))
