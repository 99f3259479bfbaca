"""One rank of `test_faults`: ranks that die, stall or differ, and the errors of the others. Prints one JSON line.

Arguments: the scenario, this rank's GPU, and where the store is (MASTER_ADDR and so on come by the environment).
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tests.gpu.op_cases import BULK, LL_PACKET_ONE_SHOT, POSTED, Case, make_call, make_inputs, plan_of, run_op
from weaveopt.fabrics import topology
from weaveopt.fabrics.arena import transport
from weaveopt.records.candidate import Fabric

STALL_TIMEOUT_S = 4.0
HANGS_S = 70.0
"""After so long a rank writes where it is: the test kills it soon, see `FAULT_TIMEOUT_S` in `test_op`."""
LONG_TIMEOUT_S = 60.0
HIDDEN = 1024


def error_of(step: Callable[[], object]) -> str:
    """Runs `step` and returns its error as text. The watchdog may raise at any moment, even while one is handled."""
    try:
        try:
            step()
        except BaseException as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main(scenario: str, device: int) -> None:
    faulthandler.dump_traceback_later(HANGS_S)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(device)
    if "host" in scenario.split():
        os.environ["NCCL_P2P_DISABLE"] = "1"
    dist.init_process_group("cpu:gloo,cuda:nccl")
    words = scenario.split()
    kernel = BULK if "bulk" in words else POSTED if "posted" in words else LL_PACKET_ONE_SHOT
    timeout_s = STALL_TIMEOUT_S if scenario.startswith(("stalled", "continued", "caught")) else LONG_TIMEOUT_S
    call = replace(make_call(Case(), HIDDEN, "bfloat16", world, (kernel.row(64),)), timeout_s=timeout_s)
    call = replace(call, site="layers.0", fabric=Fabric.HOST if "host" in words else Fabric.PEER)
    other = replace(call, site="layers.1")
    transport(call.fabric).reserve(topology.discover("0", 60.0), plan_of([call]), 0, 60.0)
    # Bound before, so that no rank meets another in the store when it fails.
    inputs = {n: make_inputs(Case(), n, HIDDEN, torch.bfloat16, world, seed=n) for n in (5, 6)}
    for warm in (call, other):
        for values in inputs.values():
            run_op(values, rank, warm)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph() if "graph" in scenario.split() else None
    if graph is not None:
        with torch.cuda.graph(graph):
            run_op(inputs[5], rank, call)
    dist.barrier()  # on the GPUs: nobody is inside a call any more
    torch.cuda.synchronize()
    victim = world - 1
    store = c10d._get_default_store()
    if rank == victim:
        store.set("victim", str(os.getpid()))
    victim_pid = int(store.get("victim"))
    if rank == victim and scenario.startswith(("killed", "stalled", "continued")):
        os.kill(os.getpid(), signal.SIGKILL if scenario.startswith("killed") else signal.SIGSTOP)
    differs = rank == victim and scenario.startswith("differing")
    tokens = 6 if differs and "tokens" in scenario else 5
    last = other if differs and "sites" in scenario else call

    if scenario.startswith("caught"):
        # The victim comes once all others have given up, and each of those later than the one before.
        if rank == victim:
            store.wait([f"over/{other}" for other in range(victim)])
        else:
            time.sleep(rank * STALL_TIMEOUT_S / 2)

    def fail() -> None:
        if graph is None:
            run_op(inputs[tokens], rank, last)
        else:
            graph.replay()
        torch.cuda.synchronize()
        # The watchdog's own error comes at the next step in Python.
        for _ in range(100):
            time.sleep(0.01)

    started = time.monotonic()
    at_once = error_of(fail)
    if not at_once and scenario.startswith("continued") and rank == victim:
        at_once = error_of(fail)  # what the other one sent before it gave up was all that one call needs
    seconds = time.monotonic() - started
    if scenario.startswith(("caught", "continued")):
        store.set(f"over/{rank}", "")
    time.sleep(0.2)
    error_of(lambda: run_op(inputs[5], rank, call))  # may be cut short by the watchdog's error
    later = error_of(lambda: run_op(inputs[5], rank, call))
    if scenario.startswith("continued") and rank != victim:
        os.kill(victim_pid, signal.SIGCONT)  # this rank caught its error and goes on, when the other one comes back
    told = {"rank": rank, "seconds": seconds, "at_once": at_once, "later": later}
    print(json.dumps(told), flush=True)
    sys.stderr.flush()
    if scenario.startswith(("caught", "continued")):
        store.wait([f"over/{other}" for other in range(world)])  # what was caught ends no process
    # Nothing can be taken down in order after a trap.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
