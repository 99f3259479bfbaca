"""Layers of models on GPUs without peer access: weave with token splits by price, weave without, Inductor.

    NCCL_P2P_DISABLE=1 WEAVE_FABRICS=library python -m benchmarks run token_split_gpu --machine h100x2

The two variables make GPUs that have NVLink exchange through the host, as those without peer access do; on GPUs that
have none only the second is needed. Unless a profile is given, collectives and contention with them are calibrated
first, on these ranks, into a profile that takes all else from `base`. Variants are captured in CUDA graphs and take
turns; then each runs back to back (see `benchmarks/suites/layers.py`). With `--set trace=FOLDER` the trace of each
variant is written; `python -m benchmarks hidden` says how much of its exchanges runs under computation.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import record
from benchmarks.ranks import Place, barrier
from benchmarks.suite import GPU, Asked, Needs, Setting, Suite, UsageError
from benchmarks.suites.layers import REMOVED, TRACE, UNSPLIT, Case, measure, variants_row
from benchmarks.workloads import decoder
from benchmarks.workloads.decoder import INDUCTOR, SHAPES, WEAVE, Workload
from weaveopt import cost_model
from weaveopt.measure import base as bases
from weaveopt.measure import suite as measuring
from weaveopt.measure.session import CalibrationSession

P2P, FABRICS = "NCCL_P2P_DISABLE", "WEAVE_FABRICS"
CALLS = ("decode:1", "decode:8", "decode:64", *(f"prefill:{n}" for n in (512, 1024, 2048, 4096, 8192)))
MODELS = ("llama-70b", "llama-8b", "mixtral-8x22b")
MEASURED = ("collectives", "library_contention")
POSITIONS, FILLED = 2048, 1000
NAMES = Setting("models", MODELS, quick=("llama-8b",), among=tuple(SHAPES))
CASES = Setting("cases", CALLS, "prefill:TOKENS,decode:BATCH", quick=("prefill:2048",))
LAYERS = Setting("layers", 0, "0: the model's number for this suite", quick=2)
PROFILE = Setting("profile", "", "machine profile of these GPUs (default: calibrated first)")
BASE = Setting("base", "h100x2", "profile that has what is not calibrated")


def cases(asked: Asked) -> list[Case]:
    return [Case(**asdict(decoder.parse(word)), model=model) for model in asked.of(NAMES) for word in asked.of(CASES)]


def calibrated(place: Place, base: str, folder: Path) -> str:
    """A profile with the library's collectives and contention as they are here, the same file for all ranks."""
    before = cost_model.load(base)
    session = CalibrationSession(place.device, lambda what, done, total: None)
    today = measuring.measure(session, "no_peer", before, MEASURED)
    path = [str(folder / "no_peer.json")]
    dist.broadcast_object_list(path, src=0)
    if place.rank == 0:
        Path(path[0]).write_text(cost_model.dumps(bases.renew(today, before).machine), encoding="utf-8")
    barrier()
    return path[0]


def rows(place: Place, cases: Sequence[Case], asked: Asked) -> Iterator[record.Row]:
    if not os.environ.get(FABRICS) or (torch.cuda.can_device_access_peer(0, 1) and not os.environ.get(P2P)):
        raise UsageError(f"token_split_gpu measures GPUs without peer access: set {P2P}=1 and {FABRICS}=library")
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        profile = asked.of(PROFILE) or calibrated(place, asked.of(BASE), Path(folder))
        for name in dict.fromkeys(case.model for case in cases):
            model = decoder.make(place, SHAPES[name], asked.of(LAYERS) or SHAPES[name].layers)
            for case in (case for case in cases if case.model == name):
                workload = Workload(model, case, place.device, POSITIONS, FILLED, gives_positions=False)
                names = (INDUCTOR, WEAVE, UNSPLIT, REMOVED)
                trace = asked.of(TRACE) and f"{asked.of(TRACE)}/{name}"
                found = measure(place, model, workload, names, profile, trace, eager=False)
                row = variants_row(place, model, case, found, given=False)
                row.parameters.update(variant=found.reports[WEAVE].variant, fabrics=os.environ[FABRICS])
                yield row
                if not found.is_right:
                    wrong.append(f"{case}: weave is {found.weave_error:.1e} from eager, {found.inductor_error:.1e}")
                del workload
                gc.collect()
                torch.cuda.empty_cache()
            del model
            gc.collect()
            torch.cuda.empty_cache()
        barrier()  # before the profile's folder is gone
    assert not wrong, "; ".join(wrong)


SUITES = (
    Suite(
        "token_split_gpu", "layers on GPUs without peer access, token splits by price", Needs(GPU, 2, worlds=(2,)),
        cases, rows, ours=(WEAVE,), baselines=(INDUCTOR, UNSPLIT), predicted="the graph that was chosen",
        bound=f"{REMOVED}: computation alone", settings=(NAMES, CASES, LAYERS, PROFILE, BASE, TRACE), by_name_only=True,
    ),
)  # fmt: skip
