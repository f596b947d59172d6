# SPDX-License-Identifier: Apache-2.0
"""Read a GPU's clock, temperature and power by NVML, the library that comes with the driver."""

import ctypes
import math
from functools import cache
from typing import NamedTuple

import torch

LIBRARY = "libnvidia-ml.so.1"
SM, TEMPERATURE_GPU = 1, 0  # nvmlClockType_t, nvmlTemperatureSensors_t of nvml.h


class Health(NamedTuple):
    """A GPU's clock in MHz, its temperature in degrees C, its power in W; NaN: unknown."""

    clock: float = math.nan
    heat: float = math.nan
    power: float = math.nan

    def words(self) -> str:
        """Return the values as the end of a sentence, "" if they are unknown."""
        if math.isnan(self.clock):
            return ""
        return f"; its GPU runs at {self.clock:,.0f} MHz, {self.heat:.0f} C, {self.power:.0f} W"


def uuid_of(device: torch.device) -> str:
    """Return a CUDA device's UUID for NVML, as CUDA may number the devices in another order."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def read_health(device: torch.device) -> Health:
    """Return the health of a CUDA device now; unknown on a CPU and where NVML fails.

    The power is NVML's mean over the last second on most GPUs (nvmlDeviceGetPowerUsage).
    """
    opened = _open(device) if device.type == "cuda" else None
    if opened is None:
        return Health()
    nvml, handle = opened
    values = [ctypes.c_uint() for _ in Health._fields]
    clock, heat, power = map(ctypes.byref, values)
    codes = (
        nvml.nvmlDeviceGetClockInfo(handle, SM, clock),
        nvml.nvmlDeviceGetTemperature(handle, TEMPERATURE_GPU, heat),
        nvml.nvmlDeviceGetPowerUsage(handle, power),  # milliwatts
    )
    if any(codes):
        return Health()
    return Health(float(values[0].value), float(values[1].value), values[2].value / 1000)


@cache
def _open(device: torch.device) -> tuple[ctypes.CDLL, ctypes.c_void_p] | None:
    """Return NVML and its handle of a device, or None."""
    handle = ctypes.c_void_p()
    try:
        nvml = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    uuid = uuid_of(device).encode()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)):
        return None
    return nvml, handle
