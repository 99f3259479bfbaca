"""At which clock this rank's GPU runs while something repeats: a GPU at its power limit slows down.

Where products keep a GPU at its limit, time that communication gives back is in part taken again: what is spared in
waiting for the network, when little power is drawn, is missing from the average, and the products run at a lower clock.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

import torch

INTERVAL_MS = 20
SETTLING = 0.3
"""Share of the samples, from the first one on, that do not count: the clock follows the load within some 0.1 s."""


@dataclass(frozen=True)
class Clocks:
    """Means while something ran."""

    sm_mhz: float
    limited: float
    """Share of the samples in which the power limit held the clock down."""
    watts: float = 0.0


def observe(step: Callable[[], object], count: int, device: torch.device) -> Clocks | None:
    """Runs `step` so often; None where nvidia-smi is missing or says nothing of this GPU."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return None
    gpu = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    fields = "clocks.sm,clocks_event_reasons.sw_power_cap,power.draw"
    command = [smi, "-i", gpu, f"--query-gpu={fields}", "--format=csv,noheader,nounits", f"-lms={INTERVAL_MS}"]
    watcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        for _ in range(count):
            step()
        torch.cuda.synchronize(device)
    finally:
        watcher.terminate()
        said, _ = watcher.communicate()
    return parse(said)


def parse(said: str) -> Clocks | None:
    """From nvidia-smi's lines: MHz, whether the power limit holds, and watts."""
    rows = []
    for line in said.splitlines():
        mhz, _, rest = line.partition(", ")
        reason, _, watts = rest.partition(", ")
        if not watts:  # cut off: its number may be too
            continue
        try:
            rows.append((float(mhz), reason.strip() == "Active", float(watts)))
        except ValueError:  # a field that this GPU does not have
            continue
    rows = rows[int(len(rows) * SETTLING) :]
    if not rows:
        return None
    return Clocks(*(statistics.fmean(column) for column in zip(*rows, strict=True)))
