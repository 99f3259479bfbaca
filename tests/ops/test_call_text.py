"""Calls as text: what was encoded comes back equal, and everything else is one clear error."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from weaveopt.cost_model.tile_config import TileConfig
from weaveopt.errors import WeaveError
from weaveopt.fabrics.call_text import Constants, decode, encode
from weaveopt.ops.experts.call import ExpertsCall, ExpertsKernel
from weaveopt.ops.experts.exchange.call import ExpertExchangeCall
from weaveopt.ops.experts.prefetch.call import ExpertPrefetchCall
from weaveopt.ops.gemm_comm.all_gather.call import AllGatherGemmCall
from weaveopt.ops.gemm_comm.all_reduce.call import ChunkRow, GemmReductionCall
from weaveopt.ops.gemm_comm.reduce_scatter.call import GemmReduceScatterCall, GemmReduceScatterNormCall
from weaveopt.ops.reduction.call import ReductionCall, SumOut
from weaveopt.ops.reduction.variant import Algorithm, KernelRow, Transfer
from weaveopt.records.candidate import Fabric
from weaveopt.records.norm import NormKind, NormSpec, Quant

ROWS = (KernelRow(8, Algorithm.ONE_SHOT, Transfer.LL_PACKET), KernelRow(64, Algorithm.TWO_SHOT, Transfer.BULK, 16))
REDUCTION = ReductionCall(
    "layers.0.o_proj", "0", Fabric.PEER, 2, 4096, "bfloat16", "float8_e4m3fn", 64, None,
    NormSpec(NormKind.RMS, 1e-6, 1.0, True), 30.0, table=ROWS, scale=0.125, sum_out=SumOut.SHARDED, quant=Quant.STATIC,
)  # fmt: skip
SENT = ("site", "0", Fabric.SHM, 3, 64, "float32", 7, 1.5)
CALLS = (
    REDUCTION,
    replace(REDUCTION, post=NormSpec(NormKind.LAYER, 0.0), norm=None, quant=Quant.NONE),
    GemmReductionCall(REDUCTION, "chunks", (ChunkRow(8, 4), ChunkRow(64, 32))),
    GemmReductionCall(REDUCTION, "tiles", cut=TileConfig(256, 1, 4)),
    ExpertsCall("silu", True, alpha=1.702, limit=float("inf"), table=((8, "triton"), (64, ExpertsKernel.ONE))),
    ExpertExchangeCall(*SENT, num_experts=4, choices=2),
    ExpertPrefetchCall(*SENT, num_experts=4, independent=True, kernels="hopper", few_tokens=7),
    AllGatherGemmCall(*SENT, returns_rows=True, cut="columns=256 pairs=1"),
    GemmReduceScatterCall(*SENT, channel=1, scale=-0.0, replicated="a b"),
    GemmReduceScatterNormCall(*SENT, eps=1e-30, full_size_sum=True),
)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: type(call).__name__)
def test_what_was_encoded_comes_back(call: Constants) -> None:
    text = encode(call)
    found = decode(type(call), text, "some")
    assert found == call and type(found) is type(call)
    assert encode(found) == text
    assert "\n" not in text and " :" not in text


@pytest.mark.parametrize("call", CALLS, ids=lambda call: type(call).__name__)
def test_a_field_of_another_type_is_an_error(call: Constants) -> None:
    """Every field in turn gets a value that no field has."""
    record = json.loads(encode(call))
    assert len(record) >= 4
    for name in record:
        for wrong in ({"x": 1}, [[[]]]):
            with pytest.raises(WeaveError, match="not an encoded some call"):
                decode(type(call), json.dumps({**record, name: wrong}), "some")
    with pytest.raises(WeaveError, match="has no field 'colour'"):
        decode(type(call), json.dumps({**record, "colour": 1}), "some")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "Expecting value"),
        ("null", "is no ReductionCall"),
        ("[" * 100_000, "recursion"),
        ('{"site":"a"}', "missing"),
        (encode(REDUCTION).replace('"peer"', '"pear"'), "'pear' is not a valid Fabric"),
        (encode(REDUCTION).replace('"world":2', '"world":true'), "world is True, expected int"),
        (encode(REDUCTION).replace('"world":2', '"world":2.0'), "world is 2.0, expected int"),
        (encode(REDUCTION).replace('"site":"layers.0.o_proj"', '"site":null'), "site is None, expected str"),
    ],
)
def test_other_text_is_an_error(text: str, words: str) -> None:
    with pytest.raises(WeaveError, match=r"(?s)not an encoded all_reduce_norm call.*" + words):
        decode(ReductionCall, text, "all_reduce_norm")


def test_whole_numbers_are_floats_where_a_float_is_meant() -> None:
    text = encode(REDUCTION).replace('"scale":0.125', '"scale":2')
    found = decode(ReductionCall, text, "some")
    assert type(found.scale) is float and found.scale == 2.0


def test_a_table_of_pairs_holds_pairs() -> None:
    text = encode(ExpertsCall("silu", True)).replace('"table":[]', '"table":[[1,"triton",2]]')
    with pytest.raises(WeaveError, match="expected 2 values"):
        decode(ExpertsCall, text, "moe_experts")
