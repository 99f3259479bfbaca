"""Facts that times of local kernels depend on: the device, its driver, the libraries, and clocks."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

_CPUINFO = Path("/proc/cpuinfo")
_CPUFREQ = Path("/sys/devices/system/cpu/cpu0/cpufreq")
_DRIVER = Path("/proc/driver/nvidia/version")


def device_class(device: str, ranks_per_host: int) -> dict[str, str]:
    """Name -> value; two processes with equal values may use one another's times.

    `ranks_per_host`: ranks that compute at once, and share the host's power and memory.
    """
    found = {"device": device, "torch": torch.__version__, "ranks": str(ranks_per_host)}
    return found | (_gpu(torch.cuda.current_device()) if device == "cuda" else _cpu())


def _cpu() -> dict[str, str]:
    return {
        "processor": processor_name(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "vector_units": torch.backends.cpu.get_cpu_capability(),
        "most_khz": _text(_CPUFREQ / "cpuinfo_max_freq"),
        "governor": _text(_CPUFREQ / "scaling_governor"),
    }


@functools.cache
def processor_name() -> str:
    """Model of the host's processor, as the system names it."""
    names = re.search(r"^model name\s*:\s*(.+)$", _text(_CPUINFO), re.MULTILINE)
    return names[1] if names else platform.processor() or platform.machine()


@functools.cache
def _gpu(index: int) -> dict[str, str]:
    properties = torch.cuda.get_device_properties(index)
    version = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", _text(_DRIVER))
    return {
        "gpu": properties.name,
        "processors": str(properties.multi_processor_count),
        "driver": version[1] if version else "",
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        **_limits(str(getattr(properties, "uuid", ""))),
    }


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").strip()
    return ""


_SM_CLOCK = 1
"""NVML_CLOCK_SM."""


def _limits(uuid: str) -> dict[str, str]:
    """Enforced power limit in milliwatts and largest SM clock in MHz, as NVML says; nothing without it."""
    with suppress(OSError, AttributeError):
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() == 0:
            try:
                return _read_limits(nvml, uuid)
            finally:
                nvml.nvmlShutdown()
    return {}


def _read_limits(nvml: ctypes.CDLL, uuid: str) -> dict[str, str]:
    handle, value = ctypes.c_void_p(), ctypes.c_uint()
    if nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(handle)) != 0:
        return {}
    calls: dict[str, Callable[[], int]] = {
        "power_limit_mw": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle, ctypes.byref(value)),
        "most_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, _SM_CLOCK, ctypes.byref(value)),
    }
    return {name: str(value.value) for name, call in calls.items() if call() == 0}
