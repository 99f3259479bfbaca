"""Requirements and price of variant `pushed`: its GEMM starts with the local rows while copy engines push others.

The time is not modelled: a profile keeps that of the gather with one GEMM, see `weaveopt.cost_model.tile_config`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weaveopt.cost_model import Gemm, Machine, gemm_us, host_us, memory_us
from weaveopt.cost_model.gemm import num_units
from weaveopt.cost_model.overlapped import Message, Unmeasured, fastest
from weaveopt.cost_model.tile_config import TILE_DTYPES, TileConfig
from weaveopt.fabrics.traits import NativePart, is_built
from weaveopt.ops.gemm_comm.all_gather.call import ALL_GATHER, widest_of
from weaveopt.records.candidate import Estimate, Fabric, Rejection, Term
from weaveopt.records.site import DTYPE_BYTES, TokenCounts

try:
    from weaveopt import _native
except ImportError:  # built without it: size_refused() says so
    _native = None  # type: ignore[assignment]

ROW_ALIGNMENT = 8
"""Elements: TMA moves rows that begin at multiples of 16 bytes."""


def size_refused(gemms: Sequence[Gemm], dtype: str, tokens: TokenCounts) -> Iterator[Rejection]:
    """Token counts, rows and types that the kernel does not take."""
    if not is_built(NativePart.HOST):
        yield Rejection(NativePart.HOST.code, "weaveopt was installed without its native part")
        return
    if not tokens.is_static:
        message = "the kernel is planned for one token count, and this graph's is symbolic"
        yield Rejection("symbolic_tokens", message)
    odd = next((size for gemm in gemms for size in (gemm.k, gemm.n) if size % ROW_ALIGNMENT or size == 0), None)
    if odd is not None:
        message = f"the kernel supports rows and columns of a multiple of {ROW_ALIGNMENT}"
        yield Rejection("row_not_supported", message, (("size", odd),))
    if dtype not in TILE_DTYPES:
        yield Rejection("dtype_not_supported", "the kernel supports bf16 or fp16", (("dtype", dtype),))


def price(
    machine: Machine, fabric: Fabric, gemms: Sequence[Gemm], dtype: str, world: int, returns_rows: bool
) -> tuple[TileConfig, Estimate] | Rejection:
    """The tile configuration that is predicted fastest, with its estimate; or the rejection if its time is not known.

    Terms: `gemm`, the time in the graph; `exposed`, the time of the gather and the widest GEMM beyond that;
    `synchronize`, the kernel after which the library's other GEMMs may start; `rows`, a copy of all of them if they are
    returned, in full, though it overlaps with the GEMMs; `host`. The other GEMMs are the graph's: an error of their
    price is the same without a rewrite. The widest GEMM is not, so its price may have another error than this one's.
    """
    early = widest_of([gemm.n for gemm in gemms])
    assert early is not None, "no GEMM"
    widest, units = gemms[early], num_units(machine, dtype)
    message = Message(widest.m, widest.k, DTYPE_BYTES[dtype])

    def waves(config: TileConfig, tokens: int, _: int, columns: int) -> int:
        sizes = tokens, columns, config.tile_columns
        return 0 if _native is None else _native.product_waves(*sizes, _native.GATHER_SPARE_CTAS, world, units)

    multiplied_us = [gemm_us(machine, gemm, dtype) for gemm in gemms]
    found = fastest(ALL_GATHER.known(machine, fabric, world), machine, message, widest.n, waves, multiplied_us[early])
    if isinstance(found, Unmeasured):
        return Rejection(found.code, found.message, found.values)
    cut, us = found
    terms = (
        Term("gemm", multiplied_us[early]),
        Term("exposed", us - multiplied_us[early]),
        Term("synchronize", memory_us(machine, 1) if len(gemms) > 1 else 0.0),
        Term("rows", memory_us(machine, 2 * message.bytes) if returns_rows else 0.0),
        Term("host", host_us(machine) * machine.oversubscription(world, 1)),
    )
    others = Estimate((Term("gemm", sum(multiplied_us) - multiplied_us[early]),))
    return cut, Estimate(terms).plus(others)
