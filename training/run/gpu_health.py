# SPDX-License-Identifier: Apache-2.0
"""Read a GPU's clock, temperature and power, where the package pynvml is installed."""

import math
from functools import cache
from typing import Any, NamedTuple

import torch


class Health(NamedTuple):
    """A GPU's clock in MHz, its temperature in degrees C, its power in W; NaN: unknown."""

    clock: float = math.nan
    heat: float = math.nan
    power: float = math.nan

    def words(self) -> str:
        """Return them as the end of a sentence, "" where they are unknown."""
        if math.isnan(self.clock):
            return ""
        return f"; its GPU runs at {self.clock:,.0f} MHz, {self.heat:.0f} C, {self.power:.0f} W"


def read_health(device: torch.device) -> Health:
    """Return the health of a CUDA device now; unknown on a CPU and without pynvml."""
    opened = _open(device) if device.type == "cuda" else None
    if opened is None:
        return Health()
    nvml, handle = opened
    try:
        return Health(
            float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            nvml.nvmlDeviceGetPowerUsage(handle) / 1000,  # milliwatts
        )
    except nvml.NVMLError:
        return Health()


@cache
def _open(device: torch.device) -> tuple[Any, Any] | None:
    """Return pynvml and its handle of a device, found by UUID: CUDA may number them otherwise."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid.encode())
    except pynvml.NVMLError:
        return None
