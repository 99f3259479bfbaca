"""Machine profiles that all ranks of a test read."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from weaveopt import cost_model
from weaveopt.cost_model import Machine, validate
from weaveopt.cost_model.machine import Curve
from weaveopt.ops.gemm_comm.all_gather.call import ALL_GATHER
from weaveopt.ops.gemm_comm.all_reduce.call import ALL_REDUCE
from weaveopt.ops.gemm_comm.reduce_scatter.call import REDUCE_SCATTER, REDUCE_SCATTER_NORM
from weaveopt.plain_json import Json
from weaveopt.records.candidate import Fabric

COMMUNICATING_GEMMS = (
    ALL_REDUCE.op,
    REDUCE_SCATTER.op,
    ALL_GATHER.op,
    REDUCE_SCATTER_NORM.op,
)


def read_unchecked() -> None:
    """Files of profiles are taken as they are where what checks them is missing, as on GPU hosts without a network."""
    if importlib.util.find_spec("jsonschema") is None:
        validate._check_schema = lambda file, document: None
    if importlib.util.find_spec("msgspec") is None:
        validate.read = _parsed


def _parsed(text: str, wrong: Callable[[str, object, str], Exception] | None = None) -> Json:
    parsed: Json = json.loads(text)
    return parsed


def with_curves(base: Machine, name: str, curves: Iterable[Curve]) -> Machine:
    """A copy in which GEMMs that communicate have these curves and no others: a test says which of them is chosen."""
    added = tuple(curves)
    names = {(curve.op, curve.variant, curve.world) for curve in added}

    def stays(curve: Curve) -> bool:
        return curve.op not in COMMUNICATING_GEMMS and (curve.op, curve.variant, curve.world) not in names

    costs = tuple(
        replace(each, curves=(*filter(stays, each.curves), *added)) if each.fabric is Fabric.PEER else each
        for each in base.fabric_costs
    )
    return replace(base, name=name, fabric_costs=costs)


def written_once(machine: Machine) -> str:
    """The file that rank 0 wrote `machine` to: ranks have to name one file. It can be read here."""
    read_unchecked()
    told: list[str | None] = [None]
    if dist.get_rank() == 0:
        path = Path(tempfile.mkdtemp()) / f"{machine.name}.json"
        path.write_text(cost_model.dumps(machine))
        told = [str(path)]
    dist.broadcast_object_list(told, src=0)
    assert told[0] is not None
    return told[0]
