"""`weave::all_reduce_norm` and `mm_all_reduce_norm` on spawned ranks against the one reference.

Uninitialized memory is filled with NaN throughout, in results and in the arena: a row that was never written, or that
was read before it was written, shows.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist

import weaveopt.ops  # noqa: F401
from tests.graphs.tolerances import KERNEL, LIBRARY, assert_close
from tests.ranks import run_ranks
from tests.ranks.simulated import TEST_ALL
from weaveopt.errors import WeaveError
from weaveopt.fabrics import shm, topology
from weaveopt.fabrics.shm import ShmArena
from weaveopt.ops.reduction.buffers import memory_plan
from weaveopt.ops.reduction.call import ReductionCall, SumOut, decode
from weaveopt.ops.reduction.operands import EpilogueOperands
from weaveopt.ops.reduction.reference import reference
from weaveopt.records.candidate import Fabric
from weaveopt.records.norm import NormKind, NormSpec

Tensor = torch.Tensor
WORLDS = (2, 3, 4, 5, 6) if TEST_ALL else (2, 3, 4, 6)
TOKENS = (0, 1, 3, 7, 33, 130)
HIDDENS = (8, 64, 1000, 4096)
DTYPES = ("bfloat16", "float16", "float32")
LLAMA = NormSpec(NormKind.RMS, 1e-5, cast_before_weight=True)
GEMMA = NormSpec(NormKind.RMS, 1e-6, weight_offset=1.0)
LAYER = NormSpec(NormKind.LAYER, 1e-5)
INNER = 24


@dataclass(frozen=True)
class Form:
    """Properties of a case beyond the sum: the op's optional arguments and the call's options."""

    norm: NormSpec | None = LLAMA
    post: NormSpec | None = None
    residual: bool = True
    reduced_bias: bool = False
    scale: float = 1.0
    scale_tensor: bool = False
    wide_weights: bool = False
    biases: bool = False
    wide_out: bool = False
    sum_out: SumOut = SumOut.WHOLE
    product: str = ""
    """`mm`, `row` (addend of one row) or `full` (addend of all rows); empty: the partial result is given."""
    strided: bool = False
    three_dims: bool = False


FORMS = (
    Form(),
    Form(norm=GEMMA, wide_weights=True),
    Form(norm=LAYER, biases=True),
    Form(residual=False, wide_out=True),
    Form(reduced_bias=True, scale=0.125),
    Form(scale_tensor=True, scale=3.0, norm=GEMMA),
    Form(post=GEMMA, norm=GEMMA, wide_weights=True),
    Form(post=LAYER, norm=None, biases=True),
    Form(post=LLAMA, norm=LAYER, biases=True, reduced_bias=True, wide_out=True),
    Form(sum_out=SumOut.NONE, strided=True),
    Form(product="mm", three_dims=True),
    Form(product="row", residual=False, strided=True),
    Form(product="full", norm=LAYER),
    Form(norm=None, strided=True),
)


@dataclass(frozen=True)
class Inputs:
    """Every rank's first arguments, and the arguments that all ranks share."""

    firsts: list[tuple[Tensor, Tensor, Tensor | None] | tuple[Tensor]]
    rest: EpilogueOperands

    def partials(self) -> list[Tensor]:
        return [first[0] if len(first) == 1 else product_of(*first) for first in self.firsts]


def product_of(a: Tensor, b: Tensor, addend: Tensor | None) -> Tensor:
    return a @ b if addend is None else torch.addmm(addend, a, b)


@functools.cache
def normal_numbers() -> Tensor:
    """Drawn once: every tensor is a stretch of them that begins at a random place."""
    return torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))


def make_inputs(form: Form, tokens: int, hidden: int, dtype: torch.dtype, world: int, seed: int) -> Inputs:
    random = torch.Generator().manual_seed(seed)

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        begin = int(torch.randint(1 << 19, (), generator=random))
        numbers = normal_numbers()[begin : begin + math.prod(shape)].to(dtype, copy=True)
        if form.strided and len(shape) == 2:
            return numbers.view(shape[::-1]).t()
        return numbers.view(shape)

    weight_dtype = torch.float32 if form.wide_weights else dtype
    firsts: list[tuple[Tensor, Tensor, Tensor | None] | tuple[Tensor]] = []
    for _ in range(world):
        if not form.product:
            firsts.append((tensor(tokens, hidden),))
            continue
        addend = {"mm": None, "row": tensor(hidden), "full": tensor(tokens, hidden)}[form.product]
        firsts.append((tensor(tokens, INNER), tensor(INNER, hidden) / INNER**0.5, addend))
    residual = tensor(tokens, hidden) if form.residual else None
    if residual is not None and form.three_dims:
        residual = residual.reshape(1, tokens, hidden)
    has_post_weight = form.post is not None
    return Inputs(
        firsts,
        EpilogueOperands(
            tensor(hidden) if form.reduced_bias else None,
            torch.tensor(0.5, dtype=dtype) if form.scale_tensor else None,
            residual,
            tensor(hidden, dtype=weight_dtype) if has_post_weight else None,
            tensor(hidden) if has_post_weight and form.biases else None,
            tensor(hidden, dtype=weight_dtype) if form.norm is not None else None,
            tensor(hidden) if form.norm is not None and form.biases else None,
        ),
    )


def make_call(form: Form, hidden: int, dtype: str, world: int, max_tokens: int, one_shot: bool) -> ReductionCall:
    out_dtype = "float32" if form.wide_out else dtype
    return ReductionCall(
        site=f"{form}", group="0", fabric=Fabric.SHM, world=world, hidden=hidden, dtype=dtype, out_dtype=out_dtype,
        max_tokens=max_tokens, one_shot_max_tokens=max_tokens if one_shot else 0, post=form.post, norm=form.norm,
        timeout_s=30.0, scale=form.scale, sum_out=form.sum_out,
    )  # fmt: skip


def run_op(inputs: Inputs, rank: int, call: ReductionCall) -> tuple[Tensor, Tensor]:
    first = inputs.firsts[rank]
    op = torch.ops.weave.all_reduce_norm if len(first) == 1 else torch.ops.weave.mm_all_reduce_norm
    normalized, total = op(*first, *inputs.rest[:7], call.encode())
    return normalized, total


def reserve_for(max_tokens: int, hidden: int, world: int) -> ShmArena:
    widest = make_call(Form(), hidden, "float32", world, max_tokens, one_shot=True)
    return shm.reserve(topology.discover("0", 30.0), memory_plan("0", [widest]), 0, 30.0)


def fill_with_nan(memory: ShmArena) -> None:
    dist.barrier()  # a peer may still read
    memory.tensor(0, (memory.num_bytes,), torch.uint8).fill_(0xFF)
    dist.barrier()


def digest(*results: Tensor) -> str:
    hashed = hashlib.sha1()
    for result in results:
        hashed.update(result.contiguous().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def check(got: tuple[Tensor, Tensor], inputs: Inputs, call: ReductionCall, what: str, library: bool = False) -> None:
    want = reference(inputs.partials(), inputs.rest, call)
    for name, result, expected in zip(("normalized", "sum"), got, want, strict=True):
        assert result.is_contiguous()
        table = LIBRARY if library else KERNEL
        assert_close(result, expected, table, f"{name} of {what}", getattr(torch, call.dtype))


def run_grid(rank: int, world: int) -> list[str]:
    """All dtypes, sizes and token counts, each with two forms in turn and both algorithms; digests of all results."""
    torch.use_deterministic_algorithms(True)  # new tensors start as NaN
    memory = reserve_for(max(TOKENS), max(HIDDENS), world)
    digests = []
    for index, (dtype, hidden, tokens) in enumerate(itertools.product(DTYPES, HIDDENS, TOKENS)):
        for form in (FORMS[(2 * index) % len(FORMS)], FORMS[(2 * index + 1 + index // 7) % len(FORMS)]):
            inputs = make_inputs(form, tokens, hidden, getattr(torch, dtype), world, seed=index)
            both = []
            if index % 6 == 0:
                fill_with_nan(memory)
            for one_shot in (True, False):
                call = make_call(form, hidden, dtype, world, max(TOKENS), one_shot)
                got = run_op(inputs, rank, call)
                again = run_op(inputs, rank, call)
                both.append(digest(*got))
                assert digest(*again) == both[-1], f"two runs differ: {call}"
                if rank == index % world:
                    check(got, inputs, call, f"{tokens} tokens, {call}")
            assert both[0] == both[1], f"one-shot and two-shot differ: {tokens} tokens, {call}"
            digests.append(both[0])
    return digests


@pytest.mark.parametrize("world", WORLDS)
def test_equals_the_reference_and_all_ranks_agree_bitwise(world: int) -> None:
    digests = run_ranks(run_grid, world, world)
    assert len(digests[0]) == 2 * len(DTYPES) * len(HIDDENS) * len(TOKENS)
    for rank in range(1, world):
        assert digests[rank] == digests[0]


def run_every_form(rank: int, world: int) -> None:
    torch.use_deterministic_algorithms(True)
    memory = reserve_for(33, 1000, world)
    for form, dtype, one_shot in itertools.product(FORMS, DTYPES, (True, False)):
        fill_with_nan(memory)
        inputs = make_inputs(form, 33, 1000, getattr(torch, dtype), world, seed=5)
        call = make_call(form, 1000, dtype, world, 33, one_shot)
        check(run_op(inputs, rank, call), inputs, call, f"{call}")


def run_through_library(rank: int, world: int) -> None:
    """Fabric `library`, and `shm` with more tokens than planned."""
    reserve_for(5, 64, world)
    for form, dtype, fabric in itertools.product(FORMS, DTYPES, (Fabric.LIBRARY, Fabric.SHM)):
        inputs = make_inputs(form, 7, 64, getattr(torch, dtype), world, seed=6)
        before = [first[0].clone() for first in inputs.firsts]
        call = replace(make_call(form, 64, dtype, world, 5, False), fabric=fabric)
        check(run_op(inputs, rank, call), inputs, call, f"{call}", library=True)
        assert all(torch.equal(first[0], kept) for first, kept in zip(inputs.firsts, before, strict=True))


def run_sharded_chain(rank: int, world: int) -> None:
    """Three sites: the residual between them stays sharded; the last sum is whole. Rows of others hold NaN."""
    torch.use_deterministic_algorithms(True)
    hidden, max_tokens = 64, 33
    memory = reserve_for(max_tokens, hidden, world)
    for dtype, tokens, library_at_end in itertools.product(DTYPES, (0, 1, 2, 7, 33), (False, True)):
        fill_with_nan(memory)
        first = make_call(Form(sum_out=SumOut.SHARDED), hidden, dtype, world, max_tokens, one_shot=False)
        middle = replace(first, residual_sharded=True)
        last = replace(middle, sum_out=SumOut.WHOLE)
        if library_at_end:
            last = replace(last, fabric=Fabric.LIBRARY)
        steps = [make_inputs(Form(), tokens, hidden, getattr(torch, dtype), world, seed) for seed in (1, 2, 3)]
        residual = want_residual = steps[0].rest.residual
        for call, inputs in zip((first, middle, last), steps, strict=True):
            sharded = replace(inputs, rest=inputs.rest._replace(residual=residual))
            normalized, residual = run_op(sharded, rank, call)
            whole = inputs.rest._replace(residual=want_residual)
            want, want_residual = reference(inputs.partials(), whole, call)
            table = LIBRARY if call.fabric is Fabric.LIBRARY else KERNEL
            assert_close(normalized, want, table, f"{tokens} tokens, {call}")
            begin, end = call.share(tokens, rank) if call.sum_out is SumOut.SHARDED else (0, tokens)
            assert_close(residual[begin:end], want_residual[begin:end], table, f"{tokens} tokens, {call}")
            if call.sum_out is SumOut.SHARDED:
                assert residual[:begin].isnan().all() and residual[end:].isnan().all()
            # The chain goes on from the same rounding on both sides.
            want_residual = want_residual.clone()
            want_residual[begin:end] = residual[begin:end]


def run_changing_layouts(rank: int, world: int) -> list[str]:
    """Sites whose output rows overlap in every way, called in random order without anything between."""
    memory = reserve_for(128, 512, world)
    calls = []
    for max_tokens, hidden, one_shot, base in (
        (64, 512, True, 0),
        (3, 64, False, 0),
        (17, 64, True, 512),
        (64, 64, False, 128),
    ):
        call = make_call(Form(), hidden, "float32", world, max_tokens, one_shot)
        calls.append(replace(call, site=f"{hidden}x{max_tokens}", output_offset=base))
    order = torch.randint(len(calls), (150,), generator=torch.Generator().manual_seed(11)).tolist()
    digests = []
    for step, index in enumerate(order):
        call = calls[index]
        inputs = make_inputs(Form(), call.max_tokens, call.hidden, torch.float32, world, seed=step)
        got = run_op(inputs, rank, call)
        digests.append(digest(*got))
        check(got, inputs, call, f"step {step} of {order}")
    assert memory.native.epoch > len(order)
    return digests


def run_all_of_these(rank: int, world: int) -> list[str]:
    run_every_form(rank, world)
    run_through_library(rank, world)
    run_sharded_chain(rank, world)
    return run_changing_layouts(rank, world)


def test_forms_library_sharded_residual_and_layouts() -> None:
    """In one spawn: starting ranks costs more than these cases. The traceback of a failure names its function."""
    digests = run_ranks(run_all_of_these, 3, 3)
    assert digests[1] == digests[0] and digests[2] == digests[0]


def run_threads(rank: int, world: int) -> str:
    assert torch.get_num_threads() == 3
    reserve_for(300, 1000, world)
    parts = []
    for one_shot in (True, False):
        call = make_call(Form(), 1000, "bfloat16", world, 300, one_shot)
        inputs = make_inputs(Form(), 300, 1000, torch.bfloat16, world, seed=3)
        got = run_op(inputs, rank, call)
        check(got, inputs, call, f"{call}")
        parts.append(digest(*got))
    assert parts[0] == parts[1]
    return parts[0]


def test_threads_change_no_bit() -> None:
    results = run_ranks(run_threads, 2, 2, threads=3)
    assert results[0] == results[1]


def compiled_step(partial: Tensor, a: Tensor, b: Tensor, residual: Tensor, weight: Tensor, call: str) -> Tensor:
    normed, total = torch.ops.weave.all_reduce_norm(partial * 2, None, None, residual, None, None, weight, None, call)
    last, _ = torch.ops.weave.mm_all_reduce_norm(a, b.t(), None, None, None, total, None, None, weight, None, call)
    return last + normed


def run_compiled(rank: int, world: int) -> None:
    """Under Inductor with a symbolic token count, and with gradients switched on in eager."""
    reserve_for(64, 64, world)
    call = make_call(Form(), 64, "float32", world, 64, one_shot=False).encode()
    compiled = torch.compile(compiled_step, dynamic=True, fullgraph=True)
    for tokens in (5, 9, 64, 70):
        own = torch.Generator().manual_seed(rank)
        partial, a = torch.randn(tokens, 64, generator=own), torch.randn(tokens, 16, generator=own)
        b, residual, weight = torch.ones(64, 16), torch.ones(tokens, 64), torch.ones(64)
        with torch.no_grad():
            got = compiled(partial, a, b, residual, weight, call)
        want = compiled_step(partial, a, b.requires_grad_(), residual, weight, call)
        assert_close(got, want.detach(), KERNEL, f"{tokens} tokens")
    assert len(torch._dynamo.utils.counters["stats"]) and torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def test_compiles_with_symbolic_token_counts() -> None:
    run_ranks(run_compiled, 2, 2)


def run_opcheck(rank: int) -> None:
    """Schema, no mutation or aliasing, fake against real, and tracing, as torch checks them; a group of one."""
    reserve_for(8, 64, 1)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    for form in FORMS:
        call = make_call(form, 64, "bfloat16", 1, 8, one_shot=True)
        inputs = make_inputs(replace(form, sum_out=call.sum_out), 8, 64, torch.bfloat16, 1, seed=1)
        first = inputs.firsts[0]
        op = torch.ops.weave.all_reduce_norm if len(first) == 1 else torch.ops.weave.mm_all_reduce_norm
        torch.library.opcheck(op.default, (*first, *inputs.rest[:7], call.encode()), test_utils=checks)


def test_opcheck() -> None:
    run_ranks(run_opcheck, 1)


def test_fake_results_have_the_shapes_of_the_reference() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    for form in FORMS:
        inputs = make_inputs(form, 7, 64, torch.bfloat16, 2, seed=1)
        call = make_call(form, 64, "bfloat16", 2, 7, one_shot=True)
        want = reference(inputs.partials(), inputs.rest, call)
        with FakeTensorMode(allow_non_fake_inputs=True):
            got = run_op(inputs, 0, call)
        assert [(g.shape, g.dtype) for g in got] == [(w.shape, w.dtype) for w in want]


def test_call_survives_its_encoding() -> None:
    for form in FORMS:
        call = make_call(form, 64, "bfloat16", 3, 7, one_shot=True)
        assert decode(call.encode()) == call
        assert decode(call.encode()).encode() == call.encode()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output_offset": -64}, "before the transient zone"),
        ({"normalized_aliases_arena": True}, "shm has no arena for normalized rows"),
        ({"fabric": Fabric.NVSHMEM}, "does not end at"),
        ({"out_dtype": "float16"}, "is not supported"),
        ({"norm": None, "sum_out": SumOut.NONE}, "neither norm nor sum"),
    ],
)
def test_impossible_calls_are_refused(change: dict[str, object], message: str) -> None:
    call = replace(make_call(Form(), 64, "bfloat16", 3, 7, one_shot=True), **change)  # type: ignore[arg-type]
    with pytest.raises(WeaveError, match=message):
        decode(call.encode())
    with pytest.raises(WeaveError, match="not an encoded"):
        decode("{}")
