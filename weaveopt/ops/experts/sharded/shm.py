"""`expert_exchange` on the fabric `shm`: rows go into the memory of their experts' ranks, and results into ours."""

from __future__ import annotations

from collections.abc import Callable

import torch

from weaveopt.errors import ArenaError
from weaveopt.fabrics import shm
from weaveopt.fabrics.shm_calls import Caller, failure, tag_of
from weaveopt.ops.experts.by_expert import ExpertWeights
from weaveopt.ops.experts.exchange.call import ExpertExchangeCall, RowTraffic, check
from weaveopt.ops.experts.exchange.local_experts import expert_rows
from weaveopt.ops.experts.sharded.buffers import needed, placed
from weaveopt.records.candidate import Fabric
from weaveopt.records.memory import Buffer
from weaveopt.wording import counted

try:
    from weaveopt import _native
except ImportError:  # built without it: no arena can be reserved, and no site is bound
    _native = None  # type: ignore[assignment]

Tensor = torch.Tensor


class ShmExpertExchange:
    """One site, ready to run."""

    __slots__ = ("_call", "_caller", "_native")

    def __init__(self, call: ExpertExchangeCall, text: str, op: str, forget: Callable[[], None]) -> None:
        arena = shm.of(call.group)
        group = arena.group
        if len(group.ranks) != call.world:
            raise ArenaError(
                f"site {call.site}: planned for {counted(call.world, 'rank')}, group has {len(group.ranks)}"
            )
        site = _native.ShardedMixtureSite()
        site.dispatch_offset, site.combine_offset = placed(call, self.buffers(call), arena)
        site.tag, site.timeout_s = tag_of(call.site, text), call.timeout_s
        site.max_tokens, site.choices, site.num_experts = call.max_tokens, call.choices, call.num_experts
        site.hidden, site.dtype = call.hidden, getattr(_native.DType, call.dtype)
        self._call, self._caller = call, Caller(op, call.site, group, call.timeout_s)
        self._native = _native.ShardedMixture(arena.native, site)
        arena.at_close(forget)

    @staticmethod
    def buffers(call: ExpertExchangeCall) -> tuple[Buffer, ...]:
        """Arena buffers of the call on every rank: rows that peers push here, and results returned to this one.

        Raises `WeaveError` without the native module.
        """
        return needed(call, Fabric.SHM)

    @staticmethod
    def bind(call: ExpertExchangeCall, text: str, op: str, forget: Callable[[], None]) -> ShmExpertExchange:
        """Raises `ArenaError` if no arena was reserved or the call does not fit it."""
        return ShmExpertExchange(call, text, op, forget)

    @property
    def traffic(self) -> RowTraffic:
        return RowTraffic(self._native.rows_dispatched, self._native.rows_returned)

    def run(self, x: Tensor, experts: Tensor, weights: Tensor, operands: ExpertWeights) -> Tensor | None:
        """[tokens, hidden]; None, on all ranks, where one of them has more tokens than were planned for."""
        call, native = self._call, self._native
        check(x, experts, weights, operands, call)
        x, experts, factors = x.contiguous(), experts.contiguous(), weights.float().contiguous()
        out = torch.empty_like(x)
        try:
            self._expect_success(native.enter())
            native.dispatch(x.data_ptr(), experts.data_ptr(), x.shape[0], torch.get_num_threads())
            fits = all(self._batch(x, operands, *part) for part in call.sources())
            if fits:
                code = native.finish(factors.data_ptr(), out.data_ptr(), torch.get_num_threads())
            else:
                code = native.end_without_results()
            self._expect_success(code)
        except BaseException:  # also of a signal's handler, between any two steps
            native.abandon()
            raise
        return out if fits else None

    def _expect_success(self, code: int) -> None:
        if code:
            raise failure(self._caller, code, self._native.status)

    def _batch(self, x: Tensor, operands: ExpertWeights, first: int, last: int) -> bool:
        """The experts on the rows of some ranks; False where one of those has too many tokens."""
        native, num_threads = self._native, torch.get_num_threads()
        code, num_routes = native.collect(first, last)
        self._expect_success(code)
        if num_routes <= 0:
            return bool(num_routes == 0)
        rows = x.new_empty(num_routes, self._call.hidden)
        ids = torch.empty(num_routes, dtype=torch.int64)
        native.gather(rows.data_ptr(), ids.data_ptr(), num_threads)
        results = expert_rows(rows, ids, operands, self._call).contiguous()
        native.return_results(results.data_ptr(), num_threads)
        return True
