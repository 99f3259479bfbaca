"""Energy that a GPU has drawn, and the power that it may draw, as NVIDIA's management library counts them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import torch


class EnergyCounter(Protocol):
    """Counter of one device."""

    def joules(self) -> float:
        """Energy drawn since the driver was loaded, on this device. It is renewed some ten times a second."""
        ...

    def limit_watts(self) -> float:
        """Power that the device is held at."""
        ...


class NvmlCounter:
    """The counter of a GPU in `libnvidia-ml`, which comes with the driver. Raises `OSError` where there is none, and
    for GPUs that do not count (before Volta, slices)."""

    def __init__(self, device: torch.device) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._handle = ctypes.c_void_p()
        self._call("nvmlInit_v2", ())
        uuid = f"GPU-{str(torch.cuda.get_device_properties(device).uuid).removeprefix('GPU-')}".encode()
        self._call("nvmlDeviceGetHandleByUUID", (ctypes.c_char_p(uuid), ctypes.byref(self._handle)))
        self.joules()
        self.limit_watts()

    def joules(self) -> float:
        found = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetTotalEnergyConsumption", (self._handle, ctypes.byref(found)))
        return found.value / 1e3

    def limit_watts(self) -> float:
        found = ctypes.c_uint()
        self._call("nvmlDeviceGetEnforcedPowerLimit", (self._handle, ctypes.byref(found)))
        return found.value / 1e3

    def _call(self, name: str, arguments: Sequence[object]) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise OSError(f"{name} failed with code {code}")


def counter_of(device: torch.device) -> EnergyCounter | None:
    """The counter of a device; None where it has none."""
    try:
        return NvmlCounter(device) if device.type == "cuda" else None
    except (OSError, AttributeError, RuntimeError):
        return None
