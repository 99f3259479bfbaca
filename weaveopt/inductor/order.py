"""Reads back the order in which Inductor wrote the calls of a graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol
from unittest import mock

from torch._inductor.scheduler import Scheduler
from torch._ops import OpOverload

from weaveopt.errors import OrderError
from weaveopt.records.order import Order, order_kept


class _SchedulerNode(Protocol):
    node: object


@contextmanager
def keeping(order: Order) -> Iterator[list[str]]:
    """Inductor's compile inside of this context raises `OrderError` where the code that it writes has another order.

    Yields the names of the graph nodes that became calls, in the order in which they were written; empty where the
    compiled graph came from Inductor's cache. That one kept the order too: a compile that raises is not cached, and
    the order is part of the graph and so of its key. The scheduler's last reordering, that for partitions of CUDA
    graphs, is made while code is written (torch 2.13), so calls are read where they are written and not from the
    scheduler's list.
    """
    written: list[str] = []
    failures: list[OrderError] = []
    write_call, write_all = Scheduler.codegen_extern_call, Scheduler.codegen

    def codegen_extern_call(self: Scheduler, scheduler_node: _SchedulerNode) -> object:
        written.extend(_names(scheduler_node.node))
        return write_call(self, scheduler_node)  # type: ignore[arg-type]

    def codegen(self: Scheduler) -> object:
        result = write_all(self)
        why = order_kept(order, written)
        if why is not None:
            failures.append(OrderError(why))
            raise failures[0]
        return result

    with mock.patch.multiple(Scheduler, codegen_extern_call=codegen_extern_call, codegen=codegen):
        try:
            yield written
        except Exception:  # Inductor wraps what is raised inside of a compile in errors of its own; none is kept here
            if failures:
                raise failures[0] from None
            raise


def _names(kernel: object) -> list[str]:
    """Names of the graph nodes whose operator a call of the scheduler is.

    A call's origins also hold the nodes of what is computed for it, such as the norm before a GEMM.
    """
    op = getattr(kernel, "op_overload", None)
    origins = getattr(kernel, "origins", None) or ()
    if not isinstance(op, OpOverload):
        return []
    return sorted(each.name for each in origins if getattr(each.target, "namespace", "") == op.namespace)
