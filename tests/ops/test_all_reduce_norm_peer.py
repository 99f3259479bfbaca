"""The fused op on GPUs as far as that needs none: table, buffers, the kernel's arguments, quantization."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch

import weaveopt.ops  # noqa: F401
from tests.graphs.nonempty import some
from tests.ranks import run_ranks
from weaveopt import _native
from weaveopt.errors import ArenaError, PeerTimeoutError, WeaveError
from weaveopt.fabrics import peer as transport
from weaveopt.fabrics import watchdog
from weaveopt.fabrics.layout import Layout
from weaveopt.fabrics.topology import Group
from weaveopt.ops.reduction import peer
from weaveopt.ops.reduction.buffers import RowFormat, buffers_of, memory_plan, placed_call
from weaveopt.ops.reduction.call import FEATURES, ReductionCall, SumOut, decode
from weaveopt.ops.reduction.op import SITES
from weaveopt.ops.reduction.operands import DeferredGemm, EpilogueOperands
from weaveopt.ops.reduction.reference import reference, reference_quant
from weaveopt.ops.reduction.variant import Algorithm, KernelRow, Transfer
from weaveopt.records.candidate import Fabric
from weaveopt.records.memory import Buffer, Lifetime
from weaveopt.records.norm import NormKind, NormSpec, Quant

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
HIDDEN = 64
LLAMA = NormSpec(NormKind.RMS, 1e-5, cast_before_weight=True)
TABLE = (
    KernelRow(4, Algorithm.ONE_SHOT, Transfer.LL_PACKET),
    KernelRow(16, Algorithm.TWO_SHOT, Transfer.LL_PACKET),
    KernelRow(256, Algorithm.TWO_SHOT, Transfer.BULK, num_ctas=64),
)
FIELDS = (
    "tokens", "kernel", "num_ctas", "stream", "partial", "partial_offset", "residual", "parameters", "normalized",
    "sum", "row_scale",
)  # fmt: skip


def make_call(**changes: object) -> ReductionCall:
    call = ReductionCall(
        site="layers.0", group="tp", fabric=Fabric.PEER, world=2, hidden=HIDDEN, dtype="bfloat16", out_dtype="bfloat16",
        max_tokens=256, post=None, norm=LLAMA, timeout_s=30.0, table=TABLE,
    )  # fmt: skip
    return replace(call, **changes)  # type: ignore[arg-type]


@dataclass
class Launches:
    """Stands for the native module: keeps what a kernel would be launched with."""

    calls: list[SimpleNamespace] = field(default_factory=list)
    sites: list[SimpleNamespace] = field(default_factory=list)
    code: int = 0
    why_not: str = ""

    def module(self) -> SimpleNamespace:
        kernels = ("ll_packet_one_shot", "ll_packet_two_shot", "bulk", "direct")
        return SimpleNamespace(
            GpuKernel=SimpleNamespace(**{name: index for index, name in enumerate(kernels)}),
            QuantKind=SimpleNamespace(none="none", static="static", per_token="per_token"),
            DType=_native.DType, NUM_MAILBOXES=_native.NUM_MAILBOXES,
            GpuSite=SimpleNamespace, GpuAllReduceNorm=self.bind,
            ReductionParameters=_native.ReductionParameters, GemmMatrix=_native.GemmMatrix,
            unsupported=lambda *of: self.why_not, cuda_error_text=lambda code: f"error {code}",
        )  # fmt: skip

    def bind(self, group: object, site: SimpleNamespace) -> SimpleNamespace:
        self.sites.append(site)
        return SimpleNamespace(run=self.run)

    def run(self, *values: object) -> int:
        self.calls.append(SimpleNamespace(**dict(zip(FIELDS, values, strict=True))))
        return self.code

    @property
    def last(self) -> SimpleNamespace:
        return self.calls[-1]


@dataclass
class MadeUpArena:
    layout: Layout
    group: Group = field(default_factory=lambda: Group("tp", (0, 1), 1))
    device: int | None = None
    native: object = field(default_factory=lambda: SimpleNamespace(status=SimpleNamespace(code=_native.Code.OK)))
    peers: tuple[watchdog.Process, ...] = ()
    error: WeaveError | None = None
    captured: bool = False
    callbacks: list[object] = field(default_factory=list)
    begin_call = transport.PeerArena.begin_call

    def at_close(self, callback: object) -> None:
        self.callbacks.append(callback)

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    made = Launches()
    monkeypatch.setattr(peer, "_native", made.module())
    monkeypatch.setattr(peer.Replication, "holds", lambda *of: True)
    monkeypatch.setattr(peer, "_on_gpu", lambda value, device: torch.tensor(value))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "_exchange_device", lambda index: -1)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", lambda index: -1)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 77, raising=False)
    yield made


def bind(call: ReductionCall, monkeypatch: pytest.MonkeyPatch, **of_arena: object) -> peer.PeerReduction:
    made = MadeUpArena(**{"layout": Layout.of(memory_plan("tp", [call])), **of_arena})  # type: ignore[arg-type]
    monkeypatch.setattr(transport, "of", lambda name: made)
    return peer.PeerReduction.bind(call, call.encode(), "all_reduce_norm", lambda: None)


def run(
    site: peer.PeerReduction, tokens: int, partial: torch.Tensor | None = None, **given: torch.Tensor
) -> peer.Returned:
    if partial is None:
        partial = torch.ones(tokens, HIDDEN, dtype=torch.bfloat16)
    results = site.run(partial, EpilogueOperands(**given))
    assert results is not None
    return results


def test_a_launch_that_is_captured_keeps_the_arena(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    site = bind(make_call(), monkeypatch)
    run(site, 4)
    assert not site._arena.captured
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    run(site, 4)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    run(site, 4)
    assert site._arena.captured and len(launches.calls) == 3


def test_more_tokens_than_were_planned_for_run_in_pieces(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    site = bind(replace(make_call(), in_pieces=True), monkeypatch)
    partial, residual = torch.ones(2, 600, HIDDEN).bfloat16()
    normalized, total, row_scale = run(site, 600, partial, residual=residual)
    row_bytes = HIDDEN * 2
    for call, first, count in zip(launches.calls, (0, 256, 512), (256, 256, 88), strict=True):
        assert (call.tokens, call.kernel, call.num_ctas) == (count, 2, 64)
        for tensor, address in ((partial, call.partial), (residual, call.residual), (normalized, call.normalized)):
            assert address == tensor.data_ptr() + first * row_bytes
        assert call.sum == total.data_ptr() + first * row_bytes
        assert call.row_scale == 0 and row_scale is None
    launches.calls.clear()
    run(site, 260)
    assert [(call.tokens, call.kernel) for call in launches.calls] == [(256, 2), (4, 0)]
    assert all(call.residual == 0 for call in launches.calls)


def test_the_table_picks_the_kernel_by_token_count(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    site = bind(make_call(), monkeypatch)
    for tokens, kernel, num_ctas in ((1, 0, 0), (4, 0, 0), (5, 1, 0), (16, 1, 0), (17, 2, 64), (256, 2, 64)):
        run(site, tokens)
        assert (launches.last.tokens, launches.last.kernel, launches.last.num_ctas) == (tokens, kernel, num_ctas)
    assert site.launch(257) is None and not site.pieces(257), "through the library"
    assert site.run(torch.ones(257, HIDDEN).bfloat16(), EpilogueOperands()) is None
    launches.why_not = "rows are too long"
    assert bind(make_call(), monkeypatch).launch(5) is None


def test_no_tokens_launch_nothing(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    normalized, total, row_scale = run(bind(make_call(), monkeypatch), 0)
    assert normalized.shape == total.shape == (0, HIDDEN) and row_scale is None and not launches.calls


def test_what_is_handed_to_the_kernel(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    site = bind(make_call(norm=NormSpec(NormKind.LAYER, 1e-5), post=LLAMA), monkeypatch)
    bfloat16, wide = torch.ones(HIDDEN, dtype=torch.bfloat16), torch.ones(HIDDEN)
    residual = torch.ones(1, 5, HIDDEN, dtype=torch.bfloat16)
    scale = torch.tensor(0.5, dtype=torch.bfloat16)
    normalized, total, _ = run(
        site, 5, residual=residual, weight=wide, bias=bfloat16, post_weight=wide, reduced_bias=bfloat16.double()
    )
    seen = launches.last
    given = seen.parameters
    assert seen.stream == 77 and seen.residual == residual.data_ptr()
    assert normalized.shape == total.shape == (1, 5, HIDDEN)
    assert (seen.normalized, seen.sum, seen.row_scale) == (normalized.data_ptr(), total.data_ptr(), 0)
    assert (given.weight, given.bias, given.post_weight) == (wide.data_ptr(), bfloat16.data_ptr(), wide.data_ptr())
    assert given.reduced_bias not in (0, bfloat16.data_ptr()) and given.post_bias == given.scale_value == 0
    assert given.fp32 == 0b01011, "double became fp32; the bias is of the activations' type"
    run(site, 5, residual=residual, scale=scale.float(), weight=bfloat16)
    assert launches.last.parameters.fp32 == 1 << 5 and launches.last.parameters.scale_value != 0


def test_odd_strides_and_addresses_are_copied(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    site = bind(make_call(), monkeypatch)
    strided = torch.ones(HIDDEN, 5, dtype=torch.bfloat16).t()
    shifted = torch.ones(5 * HIDDEN + 1, dtype=torch.bfloat16)[1:].view(5, HIDDEN)
    weight = torch.ones(HIDDEN + 1, dtype=torch.bfloat16)[1:]
    run(site, 5, strided, residual=shifted, weight=weight)
    for pointer, original in ((launches.last.partial, strided), (launches.last.residual, shifted)):
        assert pointer % 16 == 0 and pointer != original.data_ptr()
    assert launches.last.parameters.weight % 16 == 0 and launches.last.parameters.weight != weight.data_ptr()
    with pytest.raises(WeaveError, match=r"residual is \(4, 64\).* expected 5 rows of 64"):
        run(site, 5, residual=torch.ones(4, HIDDEN, dtype=torch.bfloat16))
    with pytest.raises(WeaveError, match=r"a parameter is \(3,\), expected \[64\]"):
        run(site, 5, weight=torch.ones(3))


def test_results_that_are_not_wanted_are_empty(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    normalized, total, _ = run(bind(make_call(sum_out=SumOut.NONE), monkeypatch), 5)
    assert normalized.shape == (5, HIDDEN) and total.shape == (0,) and launches.last.sum == 0
    normalized, total, _ = run(bind(make_call(norm=None), monkeypatch), 5)
    assert normalized.shape == (0,) and total.shape == (5, HIDDEN) and launches.last.normalized == 0
    assert not launches.sites[0].sum_whole and launches.sites[1].sum_whole


def test_quantized_results(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    call = make_call(quant=Quant.PER_TOKEN, out_dtype="float8_e4m3fn")
    normalized, _, row_scale = run(bind(call, monkeypatch), 5)
    assert row_scale is not None and row_scale.shape == (5, 1) and row_scale.dtype is torch.float32
    assert normalized.dtype is torch.float8_e4m3fn and launches.sites[-1].out_kind is _native.OutKind.float8_e4m3fn
    assert launches.last.row_scale == row_scale.data_ptr()
    static = bind(replace(call, quant=Quant.STATIC), monkeypatch)
    with pytest.raises(WeaveError, match="needs quant_scale"):
        run(static, 5)
    _, _, row_scale = run(static, 5, quant_scale=torch.tensor(0.1))
    assert row_scale is None
    assert launches.last.parameters.quant_scale and launches.last.parameters.fp32 == 1 << 6


def test_only_normalized_rows_are_quantized() -> None:
    call = make_call(quant=Quant.PER_TOKEN, out_dtype="float8_e4m3fn", norm=None)
    with pytest.raises(WeaveError, match="no norm whose rows could be quantized"):
        decode(call.encode())


def test_direct_reads_the_partial_result_from_the_arena(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    call = make_call(table=(KernelRow(256, Algorithm.TWO_SHOT, Transfer.DIRECT),))
    plan = memory_plan("tp", [call])
    site = bind(placed_call(call, plan.of_site("layers.0")), monkeypatch)
    begin = _native.HEADER_BYTES + Layout.of(plan).transient_begin
    run(site, 5, torch.full((5, HIDDEN), 3.0, dtype=torch.bfloat16))
    assert site._partial is not None and bool((site._partial[:5] == 3).all())
    assert launches.last.partial_offset == begin > launches.sites[0].output_offset == _native.HEADER_BYTES
    a, b = torch.ones(7, 4, dtype=torch.bfloat16), torch.ones(4, HIDDEN, dtype=torch.bfloat16)
    site.run(DeferredGemm(a, b, None), EpilogueOperands())
    assert launches.last.partial == site._partial.data_ptr() and bool((site._partial[:7] == 4).all())


def test_an_arena_that_is_too_small_or_broken_is_refused(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Layout.of(memory_plan("tp", [make_call(max_tokens=16, table=TABLE[:2])]))
    with pytest.raises(ArenaError, match=r"no buffer 'output'; it was reserved with mailboxes \(\d+ bytes\)"):
        bind(make_call(), monkeypatch, layout=small)
    with pytest.raises(ArenaError, match=r"site layers.0: its mailboxes of \d+ bytes does not fit the arena of group"):
        bind(make_call(hidden=2 * HIDDEN), monkeypatch, layout=small.union(Layout.of(memory_plan("tp", [make_call()]))))
    with pytest.raises(ArenaError, match="planned for 2 ranks, group has 3"):
        bind(make_call(), monkeypatch, group=Group("tp", (0, 1, 2), 0))
    with pytest.raises(PeerTimeoutError, match=r"^the arena is unusable since an earlier call failed\. peer rank 1"):
        run(bind(make_call(), monkeypatch, error=PeerTimeoutError("peer rank 1 exited")), 5)
    launches.code = 719
    with pytest.raises(WeaveError, match=r"layers.0, group 'tp', rank 1: the kernel could not be launched: error 719"):
        run(bind(make_call(), monkeypatch), 5)


@pytest.mark.parametrize("fabric", [Fabric.PEER, Fabric.MULTIMEM])
def test_only_sites_by_multicast_use_its_mapping(
    fabric: Fabric, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An arena that has one serves both fabrics, and the direct kernel of each is another one."""
    direct = (KernelRow(256, Algorithm.TWO_SHOT, Transfer.DIRECT),)
    bind(make_call(fabric=fabric, table=direct), monkeypatch)
    assert launches.sites[-1].multicast is (fabric is Fabric.MULTIMEM)


def test_an_arena_without_the_mapping_serves_no_site_by_multicast(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(group: object, site: object) -> None:
        raise ValueError("the arenas of the group are not mapped by multicast")

    monkeypatch.setattr(peer._native, "GpuAllReduceNorm", refused)
    with pytest.raises(ArenaError, match=r"site layers\.0: the arenas of the group are not mapped by multicast"):
        bind(make_call(fabric=Fabric.MULTIMEM), monkeypatch)


def test_only_kernels_that_exist_are_asked_for() -> None:
    with pytest.raises(WeaveError, match="no GPU kernel for one_shot with transfer bulk"):
        peer.native_kernel(KernelRow(1, Algorithm.ONE_SHOT, Transfer.BULK))
    for table in ((), TABLE[::-1], TABLE[:2]):
        with pytest.raises(WeaveError, match="does not end at 256"):
            decode(make_call(table=table).encode())
    assert set(SITES) == set(FEATURES), "what a fabric's kernels can do, and what runs them"
    call = make_call(quant=Quant.PER_TOKEN, out_dtype="float8_e4m3fn")
    assert decode(call.encode()) == call


def buffers(row: KernelRow, rows: RowFormat) -> dict[str, Buffer]:
    return {buffer.name: buffer for buffer in buffers_of(Fabric.PEER, rows, row.max_tokens, (row,))}


def test_buffers_hold_what_the_kernels_lay_out() -> None:
    """The layouts of csrc/reduction/layout.cpp, for rows whose e4m3 form is no multiple of 16 bytes."""
    world, tokens, share = 4, 6, 2
    plain, fp8 = RowFormat(8, "bfloat16", "bfloat16", world), RowFormat(8, "bfloat16", "float8_e4m3fn", world)
    (one,) = buffers(KernelRow(tokens, Algorithm.ONE_SHOT, Transfer.LL_PACKET), plain).values()
    assert one == Buffer("mailboxes", 1024, Lifetime.ARENA, fill=0x80000000) and one.num_bytes >= 2 * 3 * tokens * 16
    (two,) = buffers(KernelRow(tokens, Algorithm.TWO_SHOT, Transfer.LL_PACKET), fp8).values()
    assert two.num_bytes >= 2 * 3 * share * (16 + (16 + 16) + 16)
    bulk = buffers(KernelRow(tokens, Algorithm.TWO_SHOT, Transfer.BULK), fp8)
    assert bulk["staging"].num_bytes >= 3 * share * 16 and bulk["output"].num_bytes >= tokens * (8 + 4 + 16)
    direct = buffers(KernelRow(tokens, Algorithm.TWO_SHOT, Transfer.DIRECT), plain)
    assert direct["partial"] == Buffer("partial", 256) and direct["output"] == bulk["output"]
    both = buffers_of(Fabric.PEER, fp8, tokens, TABLE)
    assert [buffer.name for buffer in both] == ["mailboxes", "output", "staging"], "those of every row, the largest"


def test_quantized_reference() -> None:
    partials = [torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(2)]
    normalized, _ = reference(partials, EpilogueOperands(), make_call())
    call = make_call(quant=Quant.PER_TOKEN, out_dtype="float8_e4m3fn", sum_out=SumOut.NONE)
    quantized, total, row_scale = reference_quant(partials, EpilogueOperands(), call)
    assert quantized.dtype is torch.float8_e4m3fn and total.shape == (0,) and row_scale.shape == (6, 1)
    torch.testing.assert_close(quantized.float() * row_scale, normalized.float(), rtol=0.07, atol=0.01)
    torch.testing.assert_close(row_scale.squeeze(1), normalized.float().abs().amax(-1) / 448)
    static = replace(call, quant=Quant.STATIC)
    saturated, _, no_scale = reference_quant(partials, EpilogueOperands(quant_scale=torch.tensor(1e-4)), static)
    assert saturated.float().abs().max() == 448 and no_scale.shape == (0,)
    with pytest.raises(WeaveError, match="needs quant_scale"):
        reference(partials, EpilogueOperands(), static)
    zeros, _, least = reference_quant([torch.zeros(1, HIDDEN).bfloat16()], EpilogueOperands(), call)
    assert not zeros.float().any() and least.item() > 0


def run_quant_op(rank: int) -> None:
    """On CPU ranks the library runs; schema, fake and tracing hold for every op."""
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    partial = torch.randn(5, HIDDEN).bfloat16()
    residual, weight = torch.randn(1, 5, HIDDEN).bfloat16(), torch.ones(HIDDEN)
    for quant, scale in ((Quant.PER_TOKEN, None), (Quant.STATIC, torch.tensor(0.1))):
        call = make_call(group="0", world=1, quant=quant, out_dtype="float8_e4m3fn")
        arguments = (partial, None, None, residual, None, None, weight, None, scale, call.encode())
        torch.library.opcheck(torch.ops.weave.all_reduce_norm_quant.default, arguments, test_utils=checks)
        got = torch.ops.weave.all_reduce_norm_quant(*arguments)
        operands = EpilogueOperands(residual=residual, weight=weight, quant_scale=scale)
        want = reference_quant([partial], operands, call)
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(some(got), want, strict=True))


def test_the_quantizing_op_on_the_cpu() -> None:
    run_ranks(run_quant_op, 1)
