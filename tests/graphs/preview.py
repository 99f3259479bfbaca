"""Capture and rewrite a function in one process, with a fake process group: no peers, no kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.testing._internal.distributed.fake_pg import FakeStore

from weaveopt import cost_model
from weaveopt.cli.question import ExplainArguments
from weaveopt.config import Config
from weaveopt.fabrics import topology
from weaveopt.preview import preview
from weaveopt.records.report import GraphReport

FORCED = ("all_reduce_rms_norm",)


@contextmanager
def fake_group(world: int) -> Iterator[None]:
    """A process group of `world` ranks in which this process is rank 0 and no other exists."""
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def without_sensitivity() -> Iterator[None]:
    """`weaveopt explain` leaves out what would change the choices: to ask takes as long as all the rest."""
    with mock.patch.object(ExplainArguments, "shows_all", False):
        yield


def previewed(
    fn: Callable[..., object],
    inputs: tuple[Tensor, ...],
    *,
    world: int = 2,
    dynamic: bool = False,
    disable: tuple[str, ...] = (),
    force: tuple[str, ...] = FORCED,
    machine: str = "cpu",
    device: str = "cpu",
    static: bool = False,
    config: Config | None = None,
) -> GraphReport:
    """The report on the only graph of `fn`; `static`: its sizes are numbers, else the token counts are not. `config`
    stands in place of `disable` and `force`."""
    torch._dynamo.reset()
    reports: list[GraphReport] = []
    with fake_group(world), torch.no_grad():
        seen = preview(
            config or Config(disable=disable, force=force),
            topology.fake(world, device=device),
            cost_model.load(machine),
            reports.append,
        )
        compiled = torch.compile(fn, backend=seen, fullgraph=True, dynamic=dynamic)
        with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()) as mode:
            compiled(*(mode.from_tensor(x, static_shapes=static or None) for x in inputs))
    assert len(reports) == 1, f"{len(reports)} graphs"
    return reports[0]
