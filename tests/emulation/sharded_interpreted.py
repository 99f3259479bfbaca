"""`expert_exchange` on the fabric `peer` without GPUs: `TRITON_INTERPRET=1 python -m` this file.

Ranks are arenas of one process. What pushes rows and sums them is written here anew, in torch; all between them is the
operation's own: where it looks for what came, and where the second GEMM's rows go. Prints a line of JSON for each
check: its name, and what was wrong or null.
"""

from __future__ import annotations

import ctypes
import json
import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from unittest import mock

import torch
from torch import Tensor

from tests.graphs.tolerances import KERNEL, assert_close
from tests.ops.test_expert_exchange import MAX_TOKENS, Form, Inputs, make_call, make_inputs, wanted
from weaveopt import _native
from weaveopt.fabrics.traits import TRAITS
from weaveopt.ops.experts import gpu
from weaveopt.ops.experts.exchange.call import ExpertExchangeCall
from weaveopt.ops.experts.sharded import peer
from weaveopt.ops.experts.sharded.peer import PeerExpertExchange
from weaveopt.records.candidate import Fabric
from weaveopt.records.memory import Lifetime, PlacedBuffer

HEADER = TRAITS[Fabric.PEER].header_bytes
FORMS = (
    Form(choices=2, experts=3),
    Form("clamped_swish", interleaved=True, bias=True, transposed=True, choices=3),
    Form("relu", gated=False, bias=True, choices=1, experts=1),
)


@dataclass
class Arena:
    """Arena of one rank; all bytes but the header's are of NaNs."""

    call: ExpertExchangeCall
    native: object
    group: object = None
    bytes: Tensor = field(init=False)
    placed: dict[str, PlacedBuffer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        end = 0
        for need in PeerExpertExchange.buffers(self.call):
            self.placed[need.name] = PlacedBuffer(need.name, end, need.num_bytes, Lifetime.ARENA, ())
            end += need.num_bytes
        self.bytes = torch.full((HEADER + end,), 0xFF, dtype=torch.uint8)

    def buffer(self, name: str) -> PlacedBuffer:
        return self.placed[name]

    def native_offset(self, offset: int) -> int:
        return HEADER + offset

    def begin_call(self) -> None:
        pass

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        begin = HEADER + offset
        found = self.bytes[begin : begin + math.prod(shape) * dtype.itemsize]
        return found.view(dtype).view(*shape)


def at(address: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype).view(*shape)


@dataclass
class Native:
    """Stands in for `_native.GpuShardedMixture` of one rank."""

    call: ExpertExchangeCall
    rank: int
    site: _native.GpuShardedMixtureSite
    arenas: list[Arena]

    @property
    def ids_offset(self) -> int:
        return self.site.dispatch_offset

    @property
    def rows_offset(self) -> int:
        ids = self.call.world * self.call.max_tokens * self.call.choices * 8
        return self.ids_offset + -(-ids // 256) * 256

    @property
    def result_buffers(self) -> list[int]:
        return [arena.bytes.data_ptr() + self.site.combine_offset for arena in self.arenas]

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.call.dtype)
        return found

    def dispatch(
        self, tokens: int, slot_tokens: int, x: int, x_stride: int, experts: int, traffic: int, stream: int
    ) -> int:
        call, hidden, choices = self.call, self.call.hidden, self.call.choices
        assert x_stride == hidden or tokens <= 1
        rows, ids = at(x, (tokens, hidden), self.dtype), at(experts, (tokens, choices), torch.int64)
        counted = at(traffic, (2,), torch.int64)
        for owner, arena in enumerate(self.arenas):
            begin = self.ids_offset - HEADER + self.rank * slot_tokens * choices * 8
            local = ids - owner * call.num_experts
            here = (local >= 0) & (local < call.num_experts)
            pushed = arena.tensor(begin, (slot_tokens, choices), torch.int64).fill_(-1)
            pushed[:tokens] = torch.where(here, local, -1)
            begin = self.rows_offset - HEADER + self.rank * slot_tokens * hidden * 2
            needed = here.any(1)
            arena.tensor(begin, (slot_tokens, hidden), self.dtype)[:tokens][needed] = rows[needed]
            if owner != self.rank:
                counted += torch.stack([needed.sum(), here.sum()])
        return 0

    def combine(
        self, tokens: int, slot_tokens: int, experts: int, weights: int, kind: _native.DType, out: int, stream: int
    ) -> int:
        shape = (tokens, self.call.choices)
        ids = at(experts, shape, torch.int64)
        factors = at(weights, shape, getattr(torch, kind.name)).float()
        begin = self.site.combine_offset - HEADER
        rows = self.arenas[self.rank].tensor(begin, (*shape, self.call.hidden), self.dtype).float()
        someones = (ids >= 0) & (ids < self.call.world * self.call.num_experts)
        found = torch.where(someones[..., None], factors[..., None] * rows, 0.0).sum(1)
        at(out, (tokens, self.call.hidden), self.dtype).copy_(found.to(self.dtype))
        return 0


def sites_of(call: ExpertExchangeCall) -> list[PeerExpertExchange]:
    arenas: list[Arena] = [Arena(call, rank) for rank in range(call.world)]
    made = []
    with (
        mock.patch.object(
            peer._native, "GpuShardedMixture", lambda rank, site: Native(call, rank, site, arenas), create=True
        ),
        mock.patch.object(peer._native, "GpuShardedMixtureSite", _Site, create=True),
    ):
        for arena in arenas:
            made.append(PeerExpertExchange(call, 0, arena, "here"))  # type: ignore[arg-type]
    return made


class _Site:
    """The native one, also in a build without the CUDA part."""


def check(form: Form, routing: str, counts: str, dtype: str, world: int) -> None:
    call = replace(make_call(form, dtype, world), fabric=Fabric.PEER)
    sites = sites_of(call)
    inputs: list[Inputs] = make_inputs(form, call, counts, routing, seed=3)
    slot_tokens = max(len(each.x) for each in inputs)
    for _ in range(2):
        for site, own in zip(sites, inputs, strict=True):
            site.dispatch(own.x, own.experts, slot_tokens, 0)
        for site, own in zip(sites, inputs, strict=True):
            shape, received = site._shape(slot_tokens, own.operands), site._received(slot_tokens, own.operands)
            site._through_triton(received, shape, slot_tokens, 0)
        for site, own, want in zip(sites, inputs, wanted(inputs, call), strict=True):
            got = site.combine(own.x, own.experts, own.weights, slot_tokens, 0)
            assert_close(got, want, KERNEL, f"{form} {routing} {counts}", got.dtype)
    assert sum(site.traffic.dispatched for site in sites) > 0 or "all" in routing or slot_tokens == 0
    assert slot_tokens <= MAX_TOKENS


CHECKS: dict[str, Callable[[], None]] = {
    f"{form.activation} {routing} {counts} {dtype} {world}": partial(check, form, routing, counts, dtype, world)
    for form, routing, counts, dtype, world in (
        (FORMS[0], "uniform", "even", "bfloat16", 2),
        (FORMS[0], "all on the last rank", "uneven", "float16", 3),
        (FORMS[1], "uniform", "even", "float16", 2),
        (FORMS[1], "foreign ids", "some none", "bfloat16", 4),
        (FORMS[2], "uniform", "one has all", "float16", 2),
    )
}


def main() -> None:
    from tests.emulation.triton_interpreter import interpreting

    with interpreting(), mock.patch.object(gpu, "num_sms", lambda _: 132):
        for name, run in CHECKS.items():
            try:
                run()
                wrong = None
            except Exception:  # whatever it is, it is told, and the other checks still run
                wrong = traceback.format_exc()[-3000:]
            print(json.dumps({"name": name, "wrong": wrong}), flush=True)


if __name__ == "__main__":
    main()
