"""Calls in which every rank sends rows to the others once: their constants, and the arena that they use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from weaveopt.errors import WeaveError
from weaveopt.fabrics import call_text
from weaveopt.fabrics.traits import TRAITS, arena_fabric, header_bytes
from weaveopt.records.candidate import Fabric
from weaveopt.records.memory import Buffer, MemoryPlan
from weaveopt.solver.placement import PlacementRequest, arena_bytes, place
from weaveopt.wording import counted


@dataclass(frozen=True)
class RowsCall:
    """One site's constants. `encode()` goes into the graph; equal on all ranks of the group."""

    site: str
    group: str
    """Name of the process group."""
    fabric: Fabric
    world: int
    hidden: int
    """Elements of a row."""
    dtype: str
    """Dtype of the rows: `bfloat16`, `float16` or `float32`."""
    max_tokens: int
    """Rows of all ranks together; more go through the library."""
    timeout_s: float
    channel: int = 0
    """Calls on one channel follow one another."""

    def encode(self) -> str:
        return call_text.encode(self)

    def rows_of_rank(self, tokens: int, outer: int) -> int:
        """Rows of one rank in each block: `inner` of `tokens` rows as [outer, world, inner]. Raises `WeaveError` if
        they do not divide."""
        parts = outer * self.world
        if outer < 1 or tokens % parts:
            raise WeaveError(
                f"site {self.site}: {counted(tokens, 'row')} are not {counted(outer, 'block')} for each of "
                f"{counted(self.world, 'rank')}: pad them to "
                f"a multiple of {parts}"
            )
        return tokens // parts


C = TypeVar("C", bound=RowsCall)


_decoded: dict[tuple[str, str], RowsCall] = {}
"""Decoded calls by the name of their kind and their text; every call of a site has the same text."""


def decode(kind: type[C], text: str) -> C:
    """The call of `kind` that `encode()` made `text` from. Raises `WeaveError` if it is none."""
    found = _decoded.get((kind.__name__, text))
    if found is None:
        found = _decoded[kind.__name__, text] = _decode(kind, text)
    assert isinstance(found, kind), f"{found} is no {kind}"
    return found


def _decode(kind: type[C], text: str) -> C:
    call = call_text.decode(kind, text, kind.__name__)
    if call.dtype not in ("bfloat16", "float16", "float32"):
        raise WeaveError(f"site {call.site}: dtype {call.dtype} is not supported")
    return call


def memory_plan(group: str, needs: Sequence[tuple[RowsCall, Sequence[Buffer]]]) -> MemoryPlan:
    """The plan of calls that follow one another in `group`, with the buffers of each, for use without a graph."""
    requests = [
        PlacementRequest(call.site, each, at, at) for at, (call, buffers) in enumerate(needs) for each in buffers
    ]
    fabric = arena_fabric(call.fabric for call, _ in needs)
    placed = place(requests)
    return MemoryPlan(group, fabric, header_bytes(fabric) + arena_bytes(placed), placed)


S = TypeVar("S")


class BoundCalls(Generic[C, S]):
    """Calls of one family, bound to the arena that they ran in last."""

    def __init__(self, kind: type[C], bind: Callable[[C, str, Callable[[], None]], S | None]) -> None:
        """`bind(call, text, forget)` is a bound call, or None where the fabric has none; `forget` runs when the arena
        goes. It raises `ArenaError` if no arena was reserved or the call does not fit it."""
        self._kind, self._bind = kind, bind
        self._bound: dict[str, S] = {}

    def of(self, device: str, text: str) -> S | None:
        """The bound call; None where the library runs, as for tensors of a device that the fabric does not join."""
        found = self._bound.get(text)
        call = decode(self._kind, text)
        if TRAITS[call.fabric].device != device:
            return None
        if found is None:
            found = self._bind(call, text, lambda: self._forget(text))
            if found is not None:
                self._bound[text] = found
        return found

    def _forget(self, text: str) -> None:
        self._bound.pop(text, None)
