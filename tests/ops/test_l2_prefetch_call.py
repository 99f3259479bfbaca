"""`weave::all_reduce_norm_prefetch` as far as that needs no GPU: what reaches the kernel, and what compilers see."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping

import pytest
import torch
import torch.distributed as dist
from torch._inductor.utils import run_and_get_code

import weaveopt.ops  # noqa: F401
from tests.ops.test_all_reduce_norm_peer import HIDDEN, Launches, bind, launches, make_call, run
from weaveopt.cost_model.l2_prefetch import LINE_BYTES, NOTHING_US, OPERATION, Order, parse_variant
from weaveopt.cost_model.machine import KernelCurve
from weaveopt.errors import WeaveError
from weaveopt.measure.cases.all_reduce_norm import prefetch as family
from weaveopt.measure.clock import Sample
from weaveopt.records.candidate import Fabric
from weaveopt.reductions.call import Prefetch
from weaveopt.reductions.operands import Operands, split

_ = launches
PREFETCH = Prefetch(8 * LINE_BYTES, Order.FRONT, 12)


def test_kernels_that_send_packets_load_what_the_call_says(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    site = bind(make_call(prefetch=PREFETCH), monkeypatch)
    weight = torch.zeros(64, HIDDEN).bfloat16()
    for tokens, loads in ((1, True), (5, True), (12, True), (13, False), (16, False), (17, False)):
        partial = torch.ones(tokens, HIDDEN).bfloat16()
        assert site.run(partial, Operands(next_weights=(weight,))) is not None
        expected = ((weight.data_ptr(), 8 * LINE_BYTES, 1, 8 * LINE_BYTES),) if loads else ()
        assert launches.last.tokens == tokens and launches.last.ranges == expected, tokens
    run(site, 4)
    assert launches.last.ranges == (), "no weights were given"
    site = bind(make_call(), monkeypatch)
    assert site.run(torch.ones(4, HIDDEN).bfloat16(), Operands(next_weights=(weight,))) is not None
    assert launches.last.ranges == (), "the call loads nothing"


def test_all_but_the_ranges_is_as_without(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    partial, residual, weight = torch.ones(4, HIDDEN).bfloat16(), torch.ones(4, HIDDEN).bfloat16(), torch.ones(HIDDEN)
    known = Operands(residual=residual, weight=weight)
    for call in (make_call(), make_call(prefetch=PREFETCH)):
        site = bind(call, monkeypatch)
        assert site.run(partial, known._replace(next_weights=(torch.zeros(64, HIDDEN).bfloat16(),))) is not None
    own = [{**vars(each), "ranges": 0, "normalized": 0, "sum": 0} for each in launches.calls]
    assert own[0] == own[1]


def test_only_peer_kernels_load_weights() -> None:
    for fabric in (Fabric.SHM, Fabric.MULTIMEM, Fabric.LIBRARY):
        call = make_call(prefetch=PREFETCH)
        text = call.encode().replace('"fabric":"peer"', f'"fabric":"{fabric.value}"')
        with pytest.raises(WeaveError, match="loads nothing beside an exchange"):
            torch.ops.weave.all_reduce_norm_prefetch(
                torch.zeros(1, HIDDEN, device="meta"), None, None, None, None, None, None, None, [], text
            )


def test_the_schema_s_arguments_come_apart() -> None:
    x, w = torch.ones(1), torch.ones(2)
    rest = (None, None, x, None, None, w, None)
    assert split((*rest, "call")) == (Operands(residual=x, weight=w), "call")
    operands, text = split((*rest, [w, x], "call"))
    assert text == "call" and list(operands.next_weights) == [w, x] and operands.quant_scale is None


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of this process."""
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=datetime.timedelta(seconds=60)
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_compiled_graphs_copy_no_weight(alone: None) -> None:
    """Inductor hands weights on as they lie, strided ones too; results are those of the operation without them."""
    group = dist.distributed_c10d._get_default_group().group_name
    call = make_call(group=group, world=1, fabric=Fabric.LIBRARY, table=(), max_tokens=8)
    plain, loading = call.encode(), call.encode()
    x, residual, norm = torch.randn(4, HIDDEN).bfloat16(), torch.randn(4, HIDDEN).bfloat16(), torch.ones(HIDDEN)
    weight, strided = torch.randn(32, HIDDEN).bfloat16(), torch.randn(HIDDEN, 32).bfloat16().t()

    def step(x: torch.Tensor, residual: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows, total = torch.ops.weave.all_reduce_norm_prefetch(
            x * 2, None, None, residual, None, None, norm, None, list(weights), loading
        )
        return rows, total, *(rows @ each.t() for each in weights)

    with torch.no_grad():
        got, code = run_and_get_code(torch.compile(step), x, residual, weight, strided)
        want = torch.ops.weave.all_reduce_norm(x * 2, None, None, residual, None, None, norm, None, plain)
    for result, expected in zip(got, want, strict=False):
        assert torch.equal(result, expected)
    (text,) = code
    called = next(line for line in text.splitlines() if "all_reduce_norm_prefetch.default(" in line)
    names = called.partition("[")[2].partition("]")[0].split(", ")
    inputs = next(line for line in text.splitlines() if line.strip().endswith("= args"))
    assert len(names) == 2 and all(name in inputs for name in names), (called, inputs)


def sample(us: float, spread: float = 0.01) -> Sample:
    return Sample(us, spread)


def taken(**us: float) -> Mapping[family.What, Sample]:
    """`front_4=19.0`: microseconds with 4 bytes loaded."""
    found: dict[family.What, Sample] = {None: sample(20.0)}
    for name, value in us.items():
        order, size = name.split("_")
        found[Order(order), int(size)] = sample(value)
    return found


def test_what_is_saved_is_what_exceeds_the_spread() -> None:
    times = dict(taken(front_4=19.0, front_1=19.95, front_2=19.5, front_8=19.4, columns_1=20.5, columns_2=21.0))
    points = [(point.size, point.us) for point in family.saved(times, Order.FRONT)]
    assert points == [(1, NOTHING_US), (2, 0.5), (4, 1.0)], "beyond the best size nothing is read"
    assert [(point.size, point.us) for point in family.saved(times, Order.COLUMNS)] == [(1, NOTHING_US)]


def test_the_family_writes_a_curve_for_each_order_and_count() -> None:
    made = family.PrefetchedWeights(times={(2, 8): dict(taken(front_4=19.0, columns_4=18.0))})

    class Draft:
        kernels: list[KernelCurve] = []  # noqa: RUF012

        def origin(self, name: str, samples: object, what: str) -> str:
            return name

    made.write(Draft())  # type: ignore[arg-type]
    assert {parse_variant(curve.variant) for curve in Draft.kernels} == {(order, 8, 2) for order in Order}
    assert all(curve.op == OPERATION and curve.counts == "bytes" for curve in Draft.kernels)
    nothing = family.PrefetchedWeights()
    nothing.write(None)  # type: ignore[arg-type]


def test_sizes_stay_within_a_share_of_the_cache() -> None:
    assert max(family.sizes_of(50 << 20, quick=False)) == 24 << 20
    assert family.sizes_of(50 << 20, quick=True) == (1 << 20, 8 << 20, 24 << 20)
    assert family.sizes_of(1 << 20, quick=False) == ()
