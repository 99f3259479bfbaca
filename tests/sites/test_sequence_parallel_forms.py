"""GEMM -> reduce-scatter and all-gather -> GEMM as functional collectives spell them: every case of torch's own pass.

`test/distributed/tensor/parallel/test_micro_pipeline_tp.py` of torch says which cases there are; these are our own
graphs for them. Where torch's pass leaves a case alone it is said here what becomes of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from tests.graphs.capturing import captured, codes, gathered, gathers, scattered, scatters, sites_in
from tests.graphs.functional_collectives import (
    all_gather_single,
    all_gather_single_autograd,
    reduce_scatter_single,
    reduce_scatter_single_autograd,
)
from tests.graphs.nonempty import some
from tests.graphs.preview import fake_group
from tests.graphs.rewriting import check_rewritten
from tests.graphs.site_values import check, run
from weaveopt.rule import FoundSite

WORLD = 4
E4M3 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with fake_group(WORLD), torch.no_grad():
        yield


def sites(fn: object, *inputs: Tensor, runs: bool = True) -> list[FoundSite]:
    """Sites of the only graph; the values that they claim are computed again on simulated ranks, and rewritten too."""
    [graph] = captured(fn, *inputs)  # type: ignore[arg-type]
    found = sites_in(graph, WORLD)
    if runs:
        check(found, run(graph, WORLD), WORLD)
        check_rewritten(graph, WORLD)
    return found


def rows(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(*sizes, dtype=dtype)


def shards(cut: int, *sizes: int) -> Tensor:
    """A shard of activations of these sizes, cut along one dimension."""
    return rows(*(size // WORLD if dim == cut else size for dim, size in enumerate(sizes)))


def test_gathers_along_every_dimension() -> None:
    """Gathers of two and of three dimensions, the whole value returned or not. Torch's pass leaves dimension 1 of three
    alone where one view makes it: with a batch of one. The last dimension is what a GEMM contracts over: no part of a
    result is whole before all shards are there."""

    def gather(x: Tensor, w: Tensor, dim: int, returns: bool) -> tuple[Tensor, ...]:
        whole = all_gather_single(x, dim, dist.group.WORLD)
        return (whole, whole @ w) if returns else (whole @ w,)

    cases = [(dim, sizes, returns) for sizes in ((64, 32), (4, 64, 32), (1, 64, 32)) for dim in range(len(sizes))
             for returns in (False, True) if sizes[dim] >= WORLD]  # fmt: skip

    def every(w: Tensor, *xs: Tensor) -> list[tuple[Tensor, ...]]:
        return [gather(x, w, dim, returns) for x, (dim, _, returns) in zip(xs, cases, strict=True)]

    found = sites(every, rows(32, 16), *(shards(dim, *sizes) for dim, sizes, _ in cases))
    assert len(found) == len(cases)
    for site, (dim, sizes, returns) in zip(found, cases, strict=True):
        if dim == len(sizes) - 1:
            assert codes(site) == ["gather_dim_not_supported"], (dim, sizes)
            continue
        [facts] = gathers([site])
        within = dim == 1 and sizes[0] > 1
        assert (facts.dim, facts.outer) == ((1, sizes[0]) if within else (0, 1)), (dim, sizes)
        assert (facts.m, facts.n, facts.k) == (len(torch.empty(sizes).view(-1, 32)), 16, 32)
        assert facts.gathered_is_read == returns and (facts.dtype, facts.gemm_dtype) == ("bfloat16", "bfloat16")


def test_scatters_along_every_dimension() -> None:
    cases = [(dim, sizes, op) for sizes in ((64, 32), (4, 64, 32), (1, 64, 32)) for dim in range(len(sizes))
             for op in ("sum", "avg") if sizes[dim] >= WORLD]  # fmt: skip

    def every(w: Tensor, *xs: Tensor) -> list[Tensor]:
        return [
            reduce_scatter_single(x @ w, op, dim, dist.group.WORLD) for x, (dim, _, op) in zip(xs, cases, strict=True)
        ]

    found = sites(every, rows(32, 16), *(rows(*sizes) for _, sizes, _ in cases))
    for site, (dim, sizes, op) in zip(some(found), cases, strict=True):
        [facts] = scatters([site])
        last, within = dim == len(sizes) - 1, len(sizes) == 3 and dim == 1 and sizes[0] > 1
        assert (facts.dim, facts.outer) == ((-1, 1) if last else (1, sizes[0]) if within else (0, 1)), (dim, sizes)
        assert (facts.m, facts.n, facts.k) == (len(torch.empty(sizes).view(-1, 32)), 16, 32)
        assert (facts.reduce_op, facts.scale, facts.sum_is_read) == (op, 1.0, True)


def test_scaled_gemms() -> None:
    """FP8 with a scale a tensor and a scale a row; gathers send e4m3 as it is, or as the bytes that it is made of."""

    def scaled(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        flat = torch._scaled_mm(x.flatten(0, -2), w, a, b, out_dtype=torch.bfloat16)
        return flat.view(*x.shape[:-1], -1)

    def every(
        x: Tensor, shard: Tensor, cut: Tensor, w: Tensor, one: Tensor, by_row: Tensor, by_column: Tensor
    ) -> object:
        whole = all_gather_single(shard, 0, dist.group.WORLD)
        pieces = [piece.view(torch.uint8) for piece in all_gather_single(cut, 0, dist.group.WORLD).chunk(WORLD)]
        erased = torch.cat(pieces, dim=1).view(E4M3)
        as_bytes = all_gather_single(shard.view(torch.uint8), 0, dist.group.WORLD).view(E4M3)
        partial = scaled(x, w, torch.reciprocal(by_row.reshape(-1, 1)), by_column)
        return (
            scaled(whole, w, one, one),
            scaled(erased, w, one, one),
            scaled(as_bytes, w, one, one),
            reduce_scatter_single(scaled(x, w, one, one), "avg", 0, dist.group.WORLD),
            reduce_scatter_single(partial, "sum", 1, dist.group.WORLD),
        )

    x, w = rows(4, 16, 32, dtype=E4M3), rows(64, 32, dtype=E4M3).T
    shard, cut = rows(1, 16, 32, dtype=E4M3), rows(4, 4, 32, dtype=E4M3)
    one, by_row, by_column = torch.ones(()), torch.ones(4, 16, 1), torch.ones(1, 64)
    found = sites(every, x, shard, cut, w, one, by_row, by_column, runs=False)  # `check` knows no scales
    assert [(facts.dim, facts.dtype, facts.gemm_dtype, facts.is_scaled) for facts in gathers(found)] == [
        (0, "float8_e4m3fn", "float8_e4m3fn", True),
        (1, "float8_e4m3fn", "float8_e4m3fn", True),
        (0, "float8_e4m3fn", "float8_e4m3fn", True),
    ]
    assert [(facts.dim, facts.dtype, facts.is_scaled) for facts in scatters(found)] == [
        (0, "bfloat16", True),
        (1, "bfloat16", True),
    ]


def test_two_groups() -> None:
    """Collectives of another group are in between; what no GEMM makes or reads is no site."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "other"))

    def fn(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        hidden = all_gather_single(x, 0, (mesh, 0)) @ up.t()
        whole = all_gather_single(hidden, 0, (mesh, 1))
        whole = whole / whole.pow(2).sum().sqrt()
        hidden = reduce_scatter_single(whole, "avg", 0, (mesh, 1))
        return reduce_scatter_single(hidden @ down.t(), "avg", 0, (mesh, 0))

    [graph] = captured(fn, rows(8, 10), rows(7, 10), rows(10, 7))
    found = sites_in(graph, 2)
    tp = mesh["tp"].get_group().group_name
    assert [(site.site.kind, site.site.groups) for site in found] == [("all_gather", (tp,)), ("reduce_scatter", (tp,))]
    assert len(graph.groups) == 2


def test_several_gemms_read_one_gather() -> None:
    """Projections of one gathered value, by one gather or by one each (DTensor makes one for every module)."""

    def fn(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        whole = all_gather_single(x, 1, dist.group.WORLD)
        again = all_gather_single(x, 1, dist.group.WORLD)
        return torch.nn.functional.linear(whole, wq, bias), whole @ wk.T, again @ wv.T

    def of_two_dtypes(x: Tensor, wq: Tensor, wk: Tensor) -> tuple[Tensor, ...]:
        whole = all_gather_single(x, 0, dist.group.WORLD)
        return whole.bfloat16() @ wq.T, whole @ wk.T.float(), whole.bfloat16() @ wq.T.exp()

    def both(x: Tensor, wide: Tensor, *ws: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        return fn(x, *ws), of_two_dtypes(wide, ws[0], ws[1])

    found = sites(
        both, rows(2, 4, 32), rows(4, 32, dtype=torch.float32), rows(16, 32), rows(8, 32), rows(8, 32), rows(16)
    )
    qkv, mixed = gathers(found)
    assert (qkv.num_gemms, qkv.num_gathers, qkv.n, qkv.has_bias) == (3, 2, 32, True)
    assert (qkv.gathered_is_read, len(found[0].site.collectives)) == (False, 2)
    # The value that travels is wide; two GEMMs read it narrow, the other one reads it as it is.
    assert (mixed.dtype, mixed.gemm_dtype, mixed.num_gemms, mixed.gathered_is_read) == ("float32", "bfloat16", 2, True)


def test_what_lies_around_the_scatter() -> None:
    """Casts, the division of a mean, biases before and after, the residual and the norm of the shard."""

    def mean_of_wide(x: Tensor, w: Tensor) -> Tensor:
        return (reduce_scatter_single((x @ w).float() / WORLD, "sum", 1, dist.group.WORLD)).bfloat16()

    def with_everything(x: Tensor, w: Tensor, own: Tensor, bias: Tensor, residual: Tensor, weight: Tensor) -> object:
        partial = torch.nn.functional.linear(x, w, own)
        total = residual + (reduce_scatter_single(partial, "sum", 1, dist.group.WORLD) / WORLD + bias)
        return total, torch.nn.functional.rms_norm(total, (16,), weight, 1e-5)

    def every(x: Tensor, w: Tensor, wt: Tensor, vector: Tensor, residual: Tensor) -> object:
        return mean_of_wide(x, w), with_everything(x, wt, vector, vector, residual, vector)

    found = sites(every, rows(2, 16, 32), rows(32, 16), rows(16, 32), rows(16), rows(2, 4, 16))
    wide, whole = scatters(found)
    assert (wide.dtype, wide.gemm_dtype, wide.out_dtype, wide.scale) == ("float32", "bfloat16", "bfloat16", 1 / WORLD)
    assert (whole.has_bias, whole.has_bias_after, whole.has_residual, whole.has_norm) == (True, True, True, True)
    assert (whole.scale, whole.dtype, whole.out_dtype) == (1 / WORLD, "bfloat16", "bfloat16")
    assert "+ bias + residual -> rms_norm(eps=1e-05)" in found[1].site.description
    after = scattered(found[1]).after
    assert after is not None and after.norm is not None and after.norm.output in found[1].nodes


def test_sums_before_and_behind_the_scatter() -> None:
    """Gradients of q, k and v: added and scattered once, or scattered apart and added. Other rows may be added too."""

    def every(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, rest: Tensor) -> tuple[Tensor, ...]:
        once = reduce_scatter_single((x @ wq + x @ wk) + x @ wv, "sum", 1, dist.group.WORLD)
        a = reduce_scatter_single(x @ wq, "sum", 1, dist.group.WORLD)
        b = reduce_scatter_single(x @ wk, "sum", 1, dist.group.WORLD)
        plus = reduce_scatter_single(x @ wv + rest, "sum", 1, dist.group.WORLD)
        return once, a + b, plus

    def apart(x: Tensor, wq: Tensor, wk: Tensor) -> tuple[Tensor, ...]:
        """Two sums of other meanings: a rewrite may not make one of them."""
        a = reduce_scatter_single(x @ wq, "sum", 1, dist.group.WORLD)
        other = a + reduce_scatter_single(x.view(32, 32) @ wk, "sum", 0, dist.group.WORLD).view(a.shape)
        b = reduce_scatter_single(x.exp() @ wq, "sum", 1, dist.group.WORLD) / WORLD
        mean = b + reduce_scatter_single(x.exp() @ wk, "sum", 1, dist.group.WORLD)
        twice = reduce_scatter_single((x.sin() @ wq) * 0.5 / WORLD, "sum", 1, dist.group.WORLD)
        wide = reduce_scatter_single(x.sin() @ wk, "sum", 1, dist.group.WORLD).float() * 2
        uneven = reduce_scatter_single((x.cos() @ wq) * 0.5 + x.cos() @ wk, "sum", 1, dist.group.WORLD)
        return other, mean, twice, wide, uneven

    found = sites(every, rows(2, 16, 32), *(rows(32, 16) for _ in range(3)), rows(2, 16, 16))
    once, behind, plus = scatters(found)
    assert (once.num_gemms, once.num_partials, once.k) == (3, 1, 96)
    assert (behind.num_gemms, behind.num_partials, behind.k, behind.has_residual) == (2, 2, 64, False)
    assert (plus.num_gemms, plus.has_addend, plus.k) == (1, True, 32)
    found = sites(apart, rows(2, 16, 32), rows(32, 16), rows(32, 16))
    assert [(each.num_partials, each.scale, each.out_dtype) for each in scatters(found)] == [
        *[(1, 1.0, "bfloat16")] * 2, (1, 1 / WORLD, "bfloat16"), (1, 1.0, "bfloat16"),
        (1, 0.5 / WORLD, "bfloat16"), (1, 1.0, "bfloat16"),
    ]  # fmt: skip
    assert [codes(site) for site in found if codes(site)] == [["form_not_known"]]


def test_forward_and_backward() -> None:
    """A backward pass gathers gradients for one GEMM by rows and one that contracts over them, and scatters others."""
    up, down = (rows(*sizes).requires_grad_() for sizes in ((64, 32), (32, 64)))

    def fn(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        hidden = torch.nn.functional.linear(all_gather_single_autograd(x, 0, dist.group.WORLD), up).relu()
        return reduce_scatter_single_autograd(torch.nn.functional.linear(hidden, down), "sum", 0, dist.group.WORLD)

    with torch.enable_grad():
        forward, backward = captured(fn, rows(4, 32).requires_grad_(), up, down)
    assert [forward.phase, backward.phase] == ["forward", "backward"]
    for graph, contractions in ((forward, 0), (backward, 1)):
        found = sites_in(graph, WORLD)
        assert check(found, run(graph, WORLD), WORLD) == 2
        [gather], [scatter] = gathers(found), scatters(found)
        # The forward pass saves the gathered rows; in the backward pass the weight's gradient reads them.
        assert (gather.m, gather.num_gemms, gather.num_contractions, gather.gathered_is_read) == (
            16,
            1,
            contractions,
            True,
        )
        assert (scatter.m, scatter.n, scatter.k, scatter.num_gemms) == (16, 32, 64, 1)
        structure = gathered(found[0])
        assert len(structure.kept) == 1 and structure.kept[0] is structure.gemms[0].a
        assert check_rewritten(graph, WORLD).num_rewritten == 2


def test_gathered_parameters_are_left() -> None:
    """Weights that ranks hold a part of each (FSDP), in forward, backward and inference, cut along both dimensions.

    What makes their gradients is a GEMM whose sum is scattered, as any other: of rows, or of columns.
    """
    mesh = init_device_mesh("cpu", (WORLD,))
    w1 = distribute_tensor(torch.zeros(64, 32, requires_grad=True), mesh, [Shard(0)])
    w2 = distribute_tensor(torch.zeros(32, 64, requires_grad=True), mesh, [Shard(1)])

    def whole(w: Tensor) -> Tensor:
        gathered = w.redistribute(mesh, [Replicate()])  # type: ignore[attr-defined]
        return gathered.to_local(grad_placements=[Partial()]).bfloat16()  # type: ignore[no-any-return]

    def fn(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return torch.nn.functional.linear(torch.nn.functional.linear(x, whole(w1)).relu(), whole(w2))

    def as_left_operand(x: Tensor, w: Tensor) -> Tensor:
        return all_gather_single(w, 0, dist.group.WORLD) @ x.exp().T

    with torch.enable_grad():
        forward, backward = captured(fn, rows(2, 8, 32), w1, w2)
    graphs = [forward, *captured(fn, rows(2, 8, 32), w1, w2), *captured(as_left_operand, rows(8, 32), rows(16, 32))]
    every = [site for graph in graphs for site in sites_in(graph, WORLD)]
    assert [codes(site) for site in every] == [["gathers_parameter"]] * 5
    assert all(site.site.kind == "all_gather" for site in every)
    found = sites_in(backward, WORLD)
    assert check(found, run(backward, WORLD), WORLD) == len(found) == 2
    assert check_rewritten(backward, WORLD).codes == ("dtype_changes",) * 2
    gradients = {(facts.dim, facts.m, facts.n, facts.dtype, facts.gemm_dtype) for facts in scatters(found)}
    assert gradients == {(0, 64, 32, "float32", "bfloat16"), (-1, 32, 64, "float32", "bfloat16")}


def test_activations_that_are_inputs_are_no_parameters() -> None:
    """A layer that is compiled by itself gathers what it is called with; its weight may be gathered too."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return all_gather_single(x, 0, dist.group.WORLD) @ all_gather_single(w, 0, dist.group.WORLD).T

    activations, weight = sites(fn, rows(16, 32), rows(8, 32))
    assert gathers([activations])[0].n == 32 and codes(weight) == ["gathers_parameter"]


def test_near_misses() -> None:
    """A form that resembles a site and is none is rejected with its reason."""

    def scatter(x: Tensor, op: str = "sum") -> Tensor:
        return reduce_scatter_single(x, op, 0, dist.group.WORLD)

    def fn(x: Tensor, w: Tensor, wide: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        shared = x @ w
        flipped = (x @ w).flip(0)
        mixed = (x @ w).view(4, 16, 16).transpose(0, 1).reshape(64, 16)
        turned = (x @ w).view(4, 16, 16).transpose(0, 1).reshape(64, 16)
        table = torch.nn.functional.embedding(torch.arange(64), weight)
        return (
            scatter(shared), shared.sin(), scatter(x @ w, "max"), scatter(wide @ wide.T), scatter(flipped),
            scatter(mixed), scatter(table), scatter((x @ w).relu()), scatter(torch.addmm(weight, x, w, alpha=2)),
            scatter((x @ w) * weight.sum()), scatter(x @ w + turned), scatter((x @ w + weight) * 0.5),
        )  # fmt: skip

    inputs = rows(64, 32), rows(32, 16), rows(64, 32, dtype=torch.float64), rows(64, 16)
    found = [(code, site.site.rejections[0].message) for site in sites(fn, *inputs) for code in codes(site)]
    assert [code for code, _ in found] == [
        "read_by_others", "not_a_sum", "dtype_not_supported", "form_not_known", "scatter_dim_not_supported",
        *["form_not_known"] * 4,
    ]  # fmt: skip
    for words, (_, message) in zip(("alpha", "no number", "different orders", "no number"), found[5:], strict=True):
        assert words in message

    def gather(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        def whole(x: Tensor) -> Tensor:
            return all_gather_single(x, 0, dist.group.WORLD)

        y = x.sin()
        mixed = whole(y.exp()).view(WORLD, 8, 2, 32).transpose(1, 2).reshape(64, 32)
        return (
            w @ whole(y).T, whole(y.cos()).T @ whole(y.cos()), mixed @ w.T, whole(y.tan()).roll(1, 0) @ w.T,
            whole(y.double()) @ w.double().T, whole(y.sinh()).relu() @ w.T,
        )  # fmt: skip

    assert sorted(codes(site) for site in sites(gather, rows(16, 32), rows(24, 32))) == [
        ["dtype_not_supported"], ["form_not_known"], ["gather_dim_not_supported"], ["gather_dim_not_supported"],
        ["gathers_columns"], ["layout_not_supported"],
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, E4M3])
def test_casts_that_change_values_stay(dtype: torch.dtype) -> None:
    """Fake quantization on either side: a cast to few values, and back."""

    def fn(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        whole = all_gather_single(y.sin(), 0, dist.group.WORLD).to(dtype).to(w.dtype)
        return reduce_scatter_single((x @ w).to(dtype).to(w.dtype), "sum", 0, dist.group.WORLD), whole @ w

    found = sites(fn, rows(64, 32), rows(16, 32), rows(32, 16))
    assert [codes(each) for each in found] == [["form_not_known"]] * 2


def test_bytes_that_are_read_as_other_numbers_stay() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return all_gather_single(x.sin(), 0, dist.group.WORLD).view(torch.float16) @ w

    (found,) = sites(fn, rows(16, 32), rows(32, 16, dtype=torch.float16), runs=False)
    assert codes(found) == ["form_not_known"] and "other numbers" in found.site.rejections[0].message


@pytest.mark.parametrize("sizes", [(), (1,), (1, 1), (64, 1)])
def test_gemms_that_add_numbers(sizes: tuple[int, ...]) -> None:
    """`addmm` takes whatever expands to its result."""

    def fn(x: Tensor, y: Tensor, w: Tensor, added: Tensor) -> tuple[Tensor, ...]:
        whole = torch.addmm(added, all_gather_single(y.sin(), 0, dist.group.WORLD), w)
        return reduce_scatter_single(torch.addmm(added, x, w), "sum", 0, dist.group.WORLD), whole

    found = sites(fn, rows(64, 32), rows(16, 32), rows(32, 16), torch.zeros(sizes, dtype=torch.bfloat16))
    assert [codes(each) for each in found] == []


def test_what_the_process_does_not_know() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return reduce_scatter_single(all_gather_single(x, 0, dist.group.WORLD) @ w, "sum", 0, dist.group.WORLD)

    [graph] = captured(fn, rows(16, 32), rows(32, 16))
    assert [codes(site) for site in sites_in(graph, WORLD // 2)] == [["group_not_known"]] * 2
    graph_of_none = type(graph)(graph.name, graph.phase, graph.tokens, (), graph.graph)
    assert [codes(site) for site in sites_in(graph_of_none, WORLD)] == [["group_not_known"]] * 2
    gather, scatter = sites_in(graph, WORLD)
    assert gather.nodes & scatter.nodes, "one GEMM between both: they share it"
