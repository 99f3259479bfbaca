"""`all_reduce_norm` on the fabric `tcp`: CPU ranks of several hosts. What a call does on its host is that of `shm`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial as partial_call
from typing import NoReturn

import torch

from weaveopt.errors import ArenaError, WeaveError
from weaveopt.fabrics import tcp as arena
from weaveopt.fabrics.call_queue import BegunCall
from weaveopt.ops.reduction.buffers import PARTIAL, expect_world, locate
from weaveopt.ops.reduction.call import ReductionCall
from weaveopt.ops.reduction.in_flight import no_scale
from weaveopt.ops.reduction.operands import DeferredGemm, EpilogueOperands, QuantResults, Results
from weaveopt.ops.reduction.shm import ShmReduction, native_site
from weaveopt.wording import counted

try:
    from weaveopt import _native
except ImportError:  # built without it: arena.of() says so before anything here is needed
    _native = None  # type: ignore[assignment]

Tensor = torch.Tensor


class TcpSite(ShmReduction):
    """One site, ready to run."""

    __slots__ = ()

    @staticmethod
    def bind(call: ReductionCall, text: str, op: str, forget: Callable[[], None]) -> TcpSite:
        """`call`, encoded as `text`, in the arena and over the connections that its group has now.

        Raises `ArenaError` if no arena was reserved, the call does not fit it, or the ranks are spread otherwise.
        """
        memory = arena.of(call.group)
        expect_world(call, memory.group)
        hosts = memory.hosts
        if len(hosts.ranks) != call.hosts:
            raise ArenaError(
                f"site {call.site}: planned for {counted(call.hosts, 'host')}, group has {len(hosts.ranks)}"
            )
        buffers = locate(call, memory.layout)
        site = native_site(call, text, buffers)
        ranks = [list(each) for each in hosts.ranks]
        table = [(row.max_tokens, getattr(_native.HostExchange, row.algorithm.value)) for row in call.table]
        memory.expect_wiring(call.site, [row.algorithm.value for row in call.table])
        try:
            native = _native.AllReduceNormOfHosts(
                memory.local.native, memory.wire, hosts.own, ranks, table, site,
                torch.get_num_threads(),
            )  # fmt: skip
        except ValueError as error:
            raise ArenaError(f"site {call.site}: {error}") from None
        memory.at_close(forget)
        return TcpSite(call, op, native, memory, buffers[PARTIAL])

    @property
    def _memory(self) -> arena.TcpArena:
        assert isinstance(self._arena, arena.TcpArena), type(self._arena)
        return self._arena

    def run(
        self, partial: Tensor | DeferredGemm, operands: EpilogueOperands, out: Results | None = None
    ) -> tuple[Tensor, Tensor, None] | None:
        """As `ShmReduction.run`, after all calls in flight."""
        self._memory.begun.drain()
        return super().run(partial, operands, out)

    def start(self, partial: Tensor, operands: EpilogueOperands) -> TcpFlight | None:
        """Begin the op on the group's thread. None: the library does it."""
        if partial.numel() // self._hidden > self._max_tokens or not self.replication.holds(operands):
            return None
        like = partial if operands.residual is None else operands.residual
        results = self.results(like.contiguous())
        begun = self._memory.begun.begin(partial_call(self._run_begun, partial, operands, results))
        return TcpFlight(results, begun)

    def _run_begun(self, partial: Tensor, operands: EpilogueOperands, results: Results) -> None:
        with torch.no_grad():  # a thread has its own mode
            found = ShmReduction.run(self, partial, operands, results)
        assert found is not None, f"site {self._call.site}: more tokens than when it was begun"

    def _fail(self, code: int) -> NoReturn:
        """As `ShmReduction._fail`; where another site's call failed first, with what became of that one."""
        memory = self._memory
        first = memory.error
        if first is not None and self._native.status.code == _native.Code.OK:
            raise type(first)(f"{self._caller.where}: the arena is unusable since an earlier call failed. {first}")
        try:
            super()._fail(code)
        except WeaveError as error:
            if code not in (int(_native.Code.BUSY), int(_native.Code.FORKED)):
                # Of its own, without a traceback: that would hold this site, and so the connections, open.
                memory.error = first or type(error)(str(error))
            raise


class TcpFlight:
    """A call on the group's thread."""

    __slots__ = ("_call", "results")

    def __init__(self, results: Results, call: BegunCall) -> None:
        self._call = call
        self.results: QuantResults = (*results, no_scale(results[1]))

    def end(self) -> None:
        self._call.wait()
